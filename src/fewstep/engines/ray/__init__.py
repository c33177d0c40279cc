"""Trainer groups on Ray: worker processes that each run the engine of one process or of ranks, on the roles that live
with their group. Ray itself is imported when a run begins.
"""

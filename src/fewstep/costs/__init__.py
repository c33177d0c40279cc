"""What a recipe costs before it runs: memory, FLOPs and time, on any number of GPUs.

The phases of the method run as they are, on networks without weights that count instead of computing (``counted.py``,
``trace.py``); a layout says how the counts fall on GPUs (``layouts.py``), and a few measured coefficients how long they
take (``speed.py``).
"""

"""The report of a run: one HTML file that needs nothing else, not even a network."""

from fewstep.observe.report.page import write_report

__all__ = ["write_report"]

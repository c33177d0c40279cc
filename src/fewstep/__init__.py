"""fewstep: flow-matching teachers distilled into students that need one to four steps."""

__version__ = "0.1.0"

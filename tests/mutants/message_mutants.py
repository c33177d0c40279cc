"""Mutants of what a user is told: what is refused in time, and how far a loop is."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

# fmt: off
MESSAGES = (
    Mutant("blocks-unchecked-in-the-file", "config/rules.py",
           "            causal.partition(frames)\n",
           "            pass\n",
           ("test_config.py::test_sections_that_do_not_go_together_are_refused",)),
    Mutant("no-line-of-a-loop", "observe/loops.py",
           "self._now() - self._printed_at >= self._interval_s",
           "False",
           ("observe/test_loops.py::test_without_a_terminal_the_first_turn_and_then_one_in_ten_seconds_has_a_line",)),
)

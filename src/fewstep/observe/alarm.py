"""A warning when the student's latents drift: their mean or std at a stop leaves the neighbourhood of its first value.

A distillation that burns colours or collapses shows here thousands of iterations before anybody looks at the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from fewstep.observe.metrics import Row
from fewstep.observe.wording import number

STD_FACTOR = 2.0
"""The std may lie between the first one divided and multiplied by this."""
MEAN_SHIFT = 0.5
"""The mean may move by this many of the first std."""
IN_A_ROW = 2
"""Readings outside before it is told: one reading is one small batch."""

ADVICE = (
    "Compare the latest samples with earlier ones; if they are worse, go back to an earlier checkpoint with a lower "
    "learning rate of the student or more critic updates."
)


class SkipAlarm:
    """Watches the counters of skipped updates; ``earlier``: the rows of a run that is resumed."""

    def __init__(self, earlier: Iterable[Row] = ()):
        self._skipped: dict[str, float] = {}
        for row in earlier:
            self.check(row)

    def check(self, row: Row) -> list[str]:
        """One message for each role that has skipped updates since its last row."""
        messages = []
        for name, skipped in row.values.items():
            role = name.removesuffix("/skipped")
            if role != name and skipped > self._skipped.get(name, 0):
                more = skipped - self._skipped.get(name, 0)
                messages.append(
                    f"The {role} skipped {more:g} updates up to iteration {row.iteration}: loss or gradient was not "
                    "finite. Where this goes on, lower the learning rate and look at the data."
                )
                self._skipped[name] = skipped
        return messages


class LatentAlarm:
    """Watches ``latents/mean.<place>`` and ``latents/std.<place>``; ``earlier``: the rows of a run that is resumed."""

    def __init__(self, earlier: Iterable[Row] = ()):
        self._first: dict[str, tuple[int, float, float]] = {}
        self._outside: dict[str, int] = {}
        """Readings in a row, by place."""
        for row in earlier:
            self.check(row)

    def check(self, row: Row) -> list[str]:
        """One message for each place that has drifted, at the second reading in a row that says so, or at the first that
        is not finite; it is silent until that place has come back."""
        messages = []
        for name, std in row.values.items():
            place = name.removeprefix("latents/std.")
            mean = row.values.get(f"latents/mean.{place}")
            if place == name or mean is None:
                continue
            problem, before = self._problem(place, row.iteration, mean, std), self._outside.get(place, 0)
            finite = math.isfinite(mean) and math.isfinite(std)
            now = 0 if problem is None else before + 1 if finite else max(before + 1, IN_A_ROW)
            if problem and before < IN_A_ROW <= now:
                messages.append(problem)
            self._outside[place] = now
        return messages

    def _problem(self, place: str, iteration: int, mean: float, std: float) -> str | None:
        where = f"The student's latents at {place.replace('stop', 'stop ')}"
        if not (math.isfinite(mean) and math.isfinite(std)):
            return f"{where} are not finite (mean {number(mean)}, std {number(std)}): go back to an earlier checkpoint."
        if place not in self._first:
            if std > 0:
                self._first[place] = (iteration, mean, std)
            return None
        at, first_mean, first_std = self._first[place]
        if std > STD_FACTOR * first_std:
            change = (
                f"have std {number(std)}, more than twice the {number(first_std)} of iteration {at}: contrast burns."
            )
        elif std < first_std / STD_FACTOR:
            change = (
                f"have std {number(std)}, less than half the {number(first_std)} of iteration {at}: samples collapse."
            )
        elif abs(mean - first_mean) > MEAN_SHIFT * first_std:
            change = (
                f"have mean {number(mean)}, more than half a std ({number(first_std)}) away from the "
                f"{number(first_mean)} of iteration {at}: brightness or colour drifts."
            )
        else:
            return None
        return f"{where} {change} {ADVICE}"

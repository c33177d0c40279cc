"""The axes of a chart: range, scale and tick marks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fewstep.observe.wording import number

LOG_RATIO = 30.0
"""Positive values that differ by more than this factor are drawn on a logarithmic scale."""

_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_TIME_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True)
class Axis:
    """A range of values and the ticks in it: pairs of value and label."""

    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float) -> float:
        """The place of a value, 0 at the low end and 1 at the high end."""
        if self.log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def value_axis(values: Sequence[float], linear: bool = False) -> Axis:
    """The vertical axis for finite ``values``: logarithmic by LOG_RATIO unless ``linear``; with 0 where it is near."""
    low, high = min(values), max(values)
    if low > 0 and high / low > LOG_RATIO and not linear:
        margin = (high / low) ** 0.04
        return Axis(low / margin, high * margin, True, _log_ticks(low / margin, high * margin))
    room = (high - low) * 0.06 or abs(low) * 0.5 or 1.0
    starts_at_zero = 0 <= low < 0.4 * high
    low, high = (0.0 if starts_at_zero else low - room), high + room
    return Axis(low, high, False, _linear_ticks(low, high, 6))


def iteration_axis(values: Sequence[float], most_ticks: int) -> Axis:
    """The horizontal axis in finished iterations."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    ticks = _linear_ticks(low, high, most_ticks, factors=(1.0, 2.0, 5.0, 10.0))
    return Axis(low, high, False, tuple(tick for tick in ticks if tick[0] == int(tick[0])))


def time_axis(values: Sequence[float], most_ticks: int) -> Axis:
    """The horizontal axis in seconds of training, from 0, labelled in a unit that fits."""
    high = max(*values, 1e-3)
    if high < 2:
        return Axis(0.0, high, False, tuple((value, f"{label} s") for value, label in _linear_ticks(0.0, high, 5)))
    days = 86400 * math.ceil(high / (most_ticks * 86400))
    step = next((step for step in _TIME_STEPS_S if high / step <= most_ticks), days)
    unit_s, unit = next(((size, name) for size, name in _TIME_UNITS if step % size == 0), (1, "s"))
    ticks = [float(step * place) for place in range(int(high / step) + 1)]
    return Axis(0.0, high, False, tuple((tick, f"{number(tick / unit_s)} {unit}") for tick in ticks))


def _linear_ticks(
    low: float, high: float, most: int, factors: tuple[float, ...] = (1.0, 2.0, 2.5, 5.0, 10.0)
) -> tuple[tuple[float, str], ...]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in factors if power * factor >= rough * 0.999)
    digits = max(0, 2 - math.floor(math.log10(step)))
    places = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return tuple((tick, number(tick)) for tick in (round(place * step, digits) for place in places))


def _log_ticks(low: float, high: float) -> tuple[tuple[float, str], ...]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / 6))
    factors = (1,) if last - first > 4 else ((1, 3) if high / low > 100 else (1, 2, 5))
    ticks = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
    return tuple((tick, number(tick)) for tick in ticks if low <= tick <= high)

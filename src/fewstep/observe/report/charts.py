"""Line charts as inline SVG, with the values for the pointer beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fewstep.observe.report.axes import Axis, iteration_axis, time_axis, value_axis
from fewstep.observe.wording import duration, number

MAX_POINTS = 240
"""Points that one line is drawn with; more are drawn as means, with the range from least to greatest behind them."""
MAX_DOTS = 30
"""Lines over time of up to this many points show every point: each is one validation."""

_WIDTHS = {"full": 1130, "half": 550, "third": 356}
_HEIGHTS = {"full": 240, "half": 210, "third": 180}
_TOP, _BOTTOM, _RIGHT = 10.0, 26.0, 14.0


@dataclass(frozen=True)
class Series:
    """One line. ``colour`` is a class of the style sheet; values may be NaN or infinite."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """``over``: what the horizontal axis counts, ``iteration`` or ``time``. ``width``: its share of the page, ``full``,
    ``half`` or ``third``. ``linear``: never on a logarithmic scale."""

    title: str
    series: Sequence[Series]
    over: str = "iteration"
    note: str = ""
    width: str = "half"
    linear: bool = False


@dataclass(frozen=True)
class Point:
    """What stands at one place of a line: the mean of the values there, and their range."""

    x: float
    y: float
    low: float
    high: float


def draw(chart: Chart) -> str:
    """The chart as a figure; where it has no finite value, a figure that says so."""
    finite = [y for series in chart.series for _, y in series.points if math.isfinite(y)]
    places = [x for series in chart.series for x, _ in series.points]
    body = _svg(chart, places, finite) if finite else '<p class="empty">No finite value was logged.</p>'
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    legend = "".join(_legend(series) for series in chart.series)
    caption = f'<span class="title">{escape(chart.title)}</span><span class="keys">{legend}</span>'
    return f'<figure class="chart {chart.width}"><figcaption>{caption}</figcaption>{body}{note}</figure>'


def thinned(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[Point | None]:
    """At most ``most`` places along the line; None is a gap, where every value is NaN or infinite."""
    size = max(1, math.ceil(len(points) / most))
    line: list[Point | None] = []
    for start in range(0, len(points), size):
        bucket = [(x, y) for x, y in points[start : start + size] if math.isfinite(y)]
        if not bucket:
            line.append(None)
            continue
        values = [y for _, y in bucket]
        x = sum(x for x, _ in bucket) / len(bucket)
        line.append(Point(x, sum(values) / len(values), min(values), max(values)))
    return line


def _legend(series: Series) -> str:
    finite = [y for _, y in series.points if math.isfinite(y)]
    label = escape(series.label) or "last"
    value = f" <b>{number(finite[-1])}</b>" if finite else ""
    return f'<span class="key {escape(series.colour)}"><i></i>{label}{value}</span>'


def _svg(chart: Chart, places: Sequence[float], finite: Sequence[float]) -> str:
    width, height = _WIDTHS[chart.width], _HEIGHTS[chart.width]
    horizontal = time_axis if chart.over == "time" else iteration_axis
    up = value_axis(finite, chart.linear)
    left = 14 + 6.4 * max((len(label) for _, label in up.ticks), default=0)
    frame = _Frame(horizontal(places, max(4, width // 100)), up, left, width - _RIGHT, height - _BOTTOM, _TOP)
    lines = [(series, thinned(series.points)) for series in chart.series]
    drawn = "".join(_line(frame, series, line, chart.over == "time") for series, line in lines)
    lines = [(series, line) for series, line in lines if any(line)]
    dots = "".join(f'<circle class="{escape(series.colour)}" r="3.5"/>' for series, _ in lines)
    lookup = [{"label": series.label, "points": _lookup(frame, chart.over, line)} for series, line in lines]
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(chart.title)}" '
        f'data-lines="{escape(json.dumps(lookup))}">{frame.grid()}{drawn}<g class="hover"><line/>{dots}</g></svg>'
    )


@dataclass(frozen=True)
class _Frame:
    """Values to places in the picture."""

    across: Axis
    up: Axis
    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return round(self.left + self.across.at(value) * (self.right - self.left), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - self.up.at(value) * (self.bottom - self.top), 1)

    def grid(self) -> str:
        rules = [
            f'<line class="rule" x1="{self.left}" x2="{self.right}" y1="{self.y(value)}" y2="{self.y(value)}"/>'
            f'<text x="{self.left - 7}" y="{self.y(value) + 3.5}" text-anchor="end">{label}</text>'
            for value, label in self.up.ticks
        ]
        labels = [
            f'<text x="{self.x(value)}" y="{self.bottom + 17}" text-anchor="{self._anchor(value)}">{label}</text>'
            for value, label in self.across.ticks
        ]
        return "".join(rules + labels)

    def _anchor(self, value: float) -> str:
        return "end" if self.x(value) > self.right - 12 else "middle"


def _line(frame: _Frame, series: Series, line: Sequence[Point | None], dots: bool) -> str:
    parts = []
    for run in _runs(line):
        if any(point.low < point.high for point in run):
            edge = [(point.x, point.high) for point in run] + [(point.x, point.low) for point in reversed(run)]
            parts.append(f'<path class="band" d="{_path(frame, edge)}Z"/>')
        parts.append(f'<path class="line" d="{_path(frame, [(point.x, point.y) for point in run])}"/>')
        if (dots and len(line) <= MAX_DOTS) or len(run) == 1:
            parts += [f'<circle class="dot" cx="{frame.x(p.x)}" cy="{frame.y(p.y)}" r="2.6"/>' for p in run]
    broken = sorted({frame.x(x) for x, y in series.points if not math.isfinite(y)})
    parts += [f'<path class="broken" d="M{x - 3} {frame.top}l6 6m0 -6l-6 6"/>' for x in broken[:MAX_POINTS]]
    return f'<g class="{escape(series.colour)}">{"".join(parts)}</g>'


def _runs(line: Sequence[Point | None]) -> list[list[Point]]:
    """The stretches between gaps."""
    runs: list[list[Point]] = [[]]
    for point in line:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if run]


def _path(frame: _Frame, points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{frame.x(x)} {frame.y(y)}" for x, y in points)


def _lookup(frame: _Frame, over: str, line: Sequence[Point | None]) -> list[tuple[float, float, str, str]]:
    """For the pointer: the place of each point in the picture, and its two values in words."""
    place = duration if over == "time" else lambda x: f"iteration {number(round(x))}"
    return [(frame.x(point.x), frame.y(point.y), place(point.x), number(point.y)) for point in line if point]

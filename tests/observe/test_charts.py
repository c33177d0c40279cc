"""The charts of a report: places in the picture against the formula, thinning, scales, gaps."""

import json
import math
import re
from html import unescape
from itertools import pairwise

import pytest

from fewstep.observe.report.axes import iteration_axis, time_axis, value_axis
from fewstep.observe.report.charts import MAX_POINTS, Chart, Series, draw, thinned


def lines(figure: str) -> list[dict]:
    """What the figure holds for the pointer: for each line its label and [x, y, words of x, words of y]."""
    (found,) = re.findall(r'data-lines="([^"]*)"', figure)
    return json.loads(unescape(found))


def test_points_lie_where_a_linear_scale_puts_them():
    points = [(10.0, 1.0), (20.0, 3.0), (30.0, 2.0), (110.0, 2.5)]
    ((line,),) = [lines(draw(Chart("loss", [Series("critic", "c1", points)])))]
    assert line["label"] == "critic"
    xs, ys = [point[0] for point in line["points"]], [point[1] for point in line["points"]]
    width, height = xs[-1] - xs[0], ys[0] - ys[1]
    for (x, y), px, py in zip(points, xs, ys, strict=True):
        assert px - xs[0] == pytest.approx((x - 10) / 100 * width, abs=0.11)
        assert ys[0] - py == pytest.approx((y - 1) / 2 * height, abs=0.11)
    assert height > 0, "larger values stand higher"
    assert [point[2:] for point in line["points"]][1] == ["iteration 20", "3"]


def test_values_over_several_powers_of_ten_get_a_logarithmic_scale():
    points = [(float(place), 10.0**-place) for place in range(4)]
    (line,) = lines(draw(Chart("loss", [Series("", "c0", points)])))
    ys = [point[1] for point in line["points"]]
    steps = [later - earlier for earlier, later in pairwise(ys)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.21)
    axis = value_axis([y for _, y in points])
    assert axis.log
    assert axis.at(1e-2) == pytest.approx((axis.at(1e-1) + axis.at(1e-3)) / 2)
    assert not value_axis([0.0, 1.0, 1e6]).log, "zero has no logarithm"
    assert not value_axis([1e-9, 1.0], linear=True).log


@pytest.mark.parametrize("values", [[0.0], [3.0], [-2.5e-7], [1e-12, 2e-12], [-1e6, 1e6], [0.0, 3e38], [1e-45, 3e38]])
def test_every_range_has_an_axis_with_its_ticks_inside(values):
    axis = value_axis(values)
    assert all(0 <= axis.at(value) <= 1 for value in values)
    assert all(-1e-6 <= axis.at(tick) <= 1 + 1e-6 for tick, _ in axis.ticks)
    assert len({label for _, label in axis.ticks}) == len(axis.ticks) <= 20


@pytest.mark.parametrize(
    ("high_s", "last_label"),
    [(0.5, "0.5 s"), (40.0, "40 s"), (300.0, "5 min"), (5400.0, "90 min"), (36000.0, "10 h"), (1.0e6, "10 d")],
)
def test_time_is_labelled_in_a_unit_that_fits(high_s, last_label):
    axis = time_axis([high_s / 3, high_s], most_ticks=6)
    assert axis.low == 0
    assert axis.at(high_s) == pytest.approx(1)
    assert axis.ticks[-1][1] == last_label
    assert 3 <= len(axis.ticks) <= 8


def test_iterations_are_labelled_with_whole_numbers():
    for values, num_ticks in (([1.0, 2.0], 2), ([7.0], 1), ([1.0, 8.0], 4), ([5.0, 12345.0], 2)):
        axis = iteration_axis(values, most_ticks=4)
        assert len(axis.ticks) == num_ticks
        assert all(label.replace(",", "").isdigit() for _, label in axis.ticks)


def test_thinning_keeps_means_and_extremes():
    points = [(float(place), math.sin(place) + (50.0 if place == 777 else 0.0)) for place in range(1001)]
    line = [point for point in thinned(points) if point]
    size = math.ceil(1001 / MAX_POINTS)
    assert len(line) == math.ceil(1001 / size) <= MAX_POINTS
    first = points[:size]
    assert line[0].x == pytest.approx(sum(x for x, _ in first) / size)
    assert line[0].y == pytest.approx(sum(y for _, y in first) / size)
    assert max(point.high for point in line) == max(y for _, y in points)
    assert min(point.low for point in line) == min(y for _, y in points)


def test_few_points_are_drawn_as_they_are():
    points = [(1.0, 2.0), (2.0, math.nan), (3.0, 4.0)]
    first, gap, last = thinned(points)
    assert (first.x, first.y, first.low, first.high) == (1.0, 2.0, 2.0, 2.0)
    assert gap is None
    assert (last.x, last.y) == (3.0, 4.0)


def test_a_value_that_is_not_finite_breaks_the_line_and_is_marked():
    values = [1.0, 2.0, math.nan, 3.0, 4.0, math.inf]
    points = [(float(place), value) for place, value in enumerate(values)]
    figure = draw(Chart("loss", [Series("", "c0", points)]))
    assert figure.count('class="line"') == 2
    assert figure.count('class="broken"') == 2
    assert len(lines(figure)[0]["points"]) == 4


def test_a_line_without_any_finite_value_is_said_in_words():
    figure = draw(Chart("loss", [Series("", "c0", [(1.0, math.nan), (2.0, math.inf)])]))
    assert "No finite value" in figure
    assert "<svg" not in figure


def test_many_points_show_their_range_and_few_do_not():
    many = draw(Chart("loss", [Series("", "c0", [(float(i), math.sin(i)) for i in range(1000)])]))
    few = draw(Chart("loss", [Series("", "c0", [(float(i), math.sin(i)) for i in range(100)])]))
    assert 'class="band"' in many
    assert 'class="band"' not in few

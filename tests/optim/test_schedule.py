"""The learning rate against the formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from fewstep.optim.schedule import ScheduleSection, factor


def factors(section: ScheduleSection, total: int) -> list[float]:
    return [float(factor(section, torch.tensor(update), total)) for update in range(total)]


def test_a_constant_rate_is_the_full_rate_at_every_update():
    assert factors(ScheduleSection(), 5) == [1.0] * 5


def test_the_warm_up_rises_in_a_straight_line_and_its_last_update_has_the_full_rate():
    assert factors(ScheduleSection(warmup_updates=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_warm_up_longer_than_the_run_never_reaches_the_full_rate():
    assert factors(ScheduleSection(name="cosine", warmup_updates=10), 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_the_cosine_falls_from_the_full_rate_at_the_first_update_to_the_final_one_at_the_last():
    found = factors(ScheduleSection(name="cosine", final=0.1), 9)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * update / 8)) / 2 for update in range(9)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(0.1, rel=1e-12)


def test_the_line_falls_evenly():
    assert factors(ScheduleSection(name="linear", final=0.2), 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2], rel=1e-12)


def test_the_decay_begins_after_its_share_of_all_updates():
    found = factors(ScheduleSection(name="linear", constant=0.4), 10)
    expected = [1.0] * 5 + [1 - (update - 4) / 5 for update in range(5, 10)]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_warm_up_counts_within_the_constant_stretch():
    found = factors(ScheduleSection(name="linear", warmup_updates=3, constant=0.5), 11)
    rise, flat = [1 / 3, 2 / 3, 1.0], [1.0] * 3
    assert found == pytest.approx(rise + flat + [1 - (update - 5.5) / 4.5 for update in range(6, 11)], abs=1e-12)


def test_a_decay_never_begins_before_the_warm_up_has_ended():
    found = factors(ScheduleSection(name="linear", warmup_updates=4, constant=0.1), 9)
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert found[4:] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize("name", ["cosine", "linear"])
@pytest.mark.parametrize(("constant", "total"), [(0.0, 2), (0.5, 3), (0.85, 10), (0.85, 1001), (0.0, 7)])
def test_the_last_update_has_the_final_rate_however_short_the_decay(name, constant, total):
    section = ScheduleSection(name=name, constant=constant, final=0.05)
    assert float(factor(section, torch.tensor(total - 1), total)) == pytest.approx(0.05, rel=1e-9)


@pytest.mark.parametrize("total", [1, 2, 10])
def test_a_constant_stretch_to_the_end_leaves_no_decay(total):
    assert factors(ScheduleSection(name="cosine", constant=1.0, final=0.05), total) == [1.0] * total


def test_a_run_of_one_update_has_the_full_rate():
    assert factors(ScheduleSection(name="cosine", final=0.1), 1) == [1.0]


def test_the_rate_stays_final_beyond_the_last_update():
    section = ScheduleSection(name="cosine", final=0.1)
    assert float(factor(section, torch.tensor(50), 9)) == pytest.approx(0.1, rel=1e-12)


@pytest.mark.parametrize(
    "values", [{"final": 0.1}, {"constant": 0.5}, {"name": "cosine", "final": 1.5}, {"name": "step"}]
)
def test_a_schedule_that_would_not_be_read_is_refused(values):
    """PITFALLS, config: no key is parsed and then ignored."""
    with pytest.raises(ValidationError):
        ScheduleSection(**values)

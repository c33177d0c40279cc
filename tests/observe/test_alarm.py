"""PITFALLS, row "curves": latent mean and std with an alarm."""

import math

import pytest

from fewstep.observe.alarm import LatentAlarm
from fewstep.observe.metrics import Row


def row(iteration: int, mean: float, std: float, stop: int = 0) -> Row:
    return Row("train", iteration, 0.0, {f"latents/mean.stop{stop}": mean, f"latents/std.stop{stop}": std})


@pytest.mark.parametrize(
    ("mean", "std", "word"),
    [
        (0.3, 1.61, "more than twice"),
        (0.3, 0.39, "less than half"),
        (0.71, 0.8, "half a std"),
        (-0.11, 0.8, "half a std"),
        (math.nan, 0.8, "not finite"),
        (0.3, math.inf, "not finite"),
    ],
)
def test_a_drift_beyond_the_limits_is_reported_with_its_stop_and_values(mean, std, word):
    """The limits of a first mean 0.3 and std 0.8: std in [0.4, 1.6], mean in [-0.1, 0.7]."""
    alarm = LatentAlarm()
    assert alarm.check(row(5, 0.3, 0.8, stop=2)) == []
    if math.isfinite(mean) and math.isfinite(std):
        assert alarm.check(row(8, mean, std, stop=2)) == []  # one small batch may be anything
    (message,) = alarm.check(row(10, mean, std, stop=2))
    assert word in message
    assert "stop 2" in message
    if math.isfinite(mean) and math.isfinite(std):
        assert "iteration 5" in message
        assert "earlier checkpoint" in message


@pytest.mark.parametrize(("mean", "std"), [(0.3, 1.59), (0.3, 0.41), (0.69, 0.8), (-0.09, 0.8)])
def test_a_drift_within_the_limits_is_silent(mean, std):
    alarm = LatentAlarm([row(5, 0.3, 0.8)])
    assert [alarm.check(row(iteration, mean, std)) for iteration in (10, 15, 20)] == [[], [], []]


def test_readings_that_are_outside_now_and_then_are_silent():
    alarm = LatentAlarm([row(5, 0.0, 1.0)])
    assert [alarm.check(row(10 + place, 0.0, std)) for place, std in enumerate([0.4, 1.0, 2.1, 0.9])] == [[]] * 4


def test_an_alarm_is_silent_until_the_latents_have_come_back():
    alarm = LatentAlarm([row(5, 0.0, 1.0)])
    stds = [3.0, 3.1, 3.0, 1.0, 3.0, 3.0, 3.0]
    counts = [len(alarm.check(row(10 + place, 0.0, std))) for place, std in enumerate(stds)]
    assert counts == [0, 1, 0, 0, 0, 1, 0]


def test_stops_are_watched_apart():
    alarm = LatentAlarm([row(5, 0.0, 1.0, stop=0), row(6, 0.0, 0.1, stop=1)])
    assert alarm.check(row(10, 0.0, 0.11, stop=1)) == []
    assert alarm.check(row(10, 0.0, 0.11, stop=0)) == []
    assert alarm.check(row(11, 0.0, 0.9, stop=1)) == []
    assert len(alarm.check(row(15, 0.0, 0.11, stop=0))) == 1
    assert len(alarm.check(row(15, 0.0, 0.9, stop=1))) == 1


def test_a_resumed_run_keeps_its_first_values_and_does_not_repeat_itself():
    alarm = LatentAlarm([row(5, 0.0, 1.0), row(10, 0.0, 0.9), row(15, 0.0, 0.45), row(20, 0.0, 0.45)])
    assert alarm.check(row(25, 0.0, 0.44)) == []
    assert alarm.check(row(30, 0.0, 0.9)) == []
    assert alarm.check(row(35, 0.0, 2.1)) == []
    assert len(LatentAlarm([row(5, 0.0, 1.0), row(35, 0.0, 2.1)]).check(row(40, 0.0, 2.1))) == 1


def test_a_first_row_that_is_not_finite_or_constant_is_no_reference():
    alarm = LatentAlarm()
    assert len(alarm.check(row(1, math.nan, 1.0))) == 1
    assert alarm.check(row(2, 0.0, 0.0)) == []
    assert alarm.check(row(3, 0.0, 1.0)) == []
    assert alarm.check(row(4, 0.0, 2.5)) == []
    assert len(alarm.check(row(5, 0.0, 2.5))) == 1


def test_other_metrics_and_a_std_without_its_mean_are_left_alone():
    alarm = LatentAlarm()
    for value in (1.0, 100.0):
        assert alarm.check(Row("train", 1, 0.0, {"critic/loss": value, "latents/std.stop0": value})) == []

"""Rows of metrics: what is averaged, what is kept, and that collecting them never waits for the device."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fewstep.observe.metrics import MetricBuffer, Row, TrainingClock, fetched


class Hands:
    """A clock that is set by hand, in seconds."""

    def __init__(self):
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


def flushed(buffer: MetricBuffer) -> Row:
    row = buffer.flush()
    assert row is not None
    return row


def test_a_row_holds_means_over_the_iterations_that_a_name_was_in_and_the_last_of_counters():
    buffer = MetricBuffer(TrainingClock())
    buffer.add(4, {"critic/loss": torch.tensor(1.0), "latents/std.stop0": torch.tensor(0.5), "student/updates": 4})
    buffer.add(5, {"critic/loss": torch.tensor(4.0), "student/lr": torch.tensor(3e-4), "student/updates": 5})
    buffer.add(6, {"critic/loss": torch.tensor(2.5), "latents/std.stop0": torch.tensor(0.75), "student/lr": 1e-4})
    row = flushed(buffer)
    assert (row.kind, row.iteration) == ("train", 6)
    assert row.values == {
        "critic/loss": 2.5,
        "latents/std.stop0": 0.625,
        "student/updates": 5.0,
        "student/lr": 1e-4,
    }


def test_a_flush_begins_anew_and_an_empty_buffer_gives_no_row():
    buffer = MetricBuffer(TrainingClock())
    assert buffer.flush() is None
    buffer.add(1, {"critic/loss": 1.0})
    flushed(buffer)
    assert buffer.flush() is None
    buffer.add(2, {"critic/loss": 5.0})
    assert flushed(buffer).values["critic/loss"] == 5.0


def test_one_value_that_is_not_finite_shows_in_the_mean():
    buffer = MetricBuffer(TrainingClock())
    for value in (1.0, math.nan, 2.0):
        buffer.add(1, {"critic/loss": torch.tensor(value)})
    assert math.isnan(flushed(buffer).values["critic/loss"])


def test_a_tensor_may_change_after_it_was_added():
    buffer = MetricBuffer(TrainingClock())
    counter = torch.tensor(3)
    buffer.add(1, {"student/updates": counter, "student/loss": counter})
    counter += 10
    assert flushed(buffer).values == {"student/updates": 3.0, "student/loss": 3.0}


def test_values_of_every_type_arrive_exactly():
    values = [
        torch.tensor(2**40 + 1),
        0.1,
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([0.5]),
        torch.tensor(True),
    ]
    assert fetched([value.reshape(()) if isinstance(value, torch.Tensor) else value for value in values]) == [
        2**40 + 1,
        0.1,
        0.1,
        0.5,
        1.0,
    ]


def test_a_metric_that_is_no_single_number_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'critic/loss' has shape \(5,\)"):
        MetricBuffer(TrainingClock()).add(1, {"critic/loss": torch.ones(5)})


def test_a_metric_cannot_take_a_name_of_the_row_itself():
    with pytest.raises(ValueError, match="'iteration'"):
        Row("train", 1, 0.0, {"iteration": 1.0})


class ReadsCounted(TorchFunctionMode):
    """Counts the calls that bring values to the host."""

    READS = ("item", "tolist", "cpu", "numpy", "to", "__float__", "__int__", "__bool__", "__index__")
    num_reads = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        to_the_host = func.__name__ != "to" or "cpu" in map(str, args)
        self.num_reads += func.__name__ in self.READS and to_the_host
        return func(*args, **(kwargs or {}))


def test_collecting_metrics_reads_nothing_and_a_row_reads_once():
    buffer = MetricBuffer(TrainingClock())
    with ReadsCounted() as reads:
        for iteration in range(1, 8):
            buffer.add(iteration, {"critic/loss": torch.ones(()), "student/lr": torch.ones(())}, num_samples=5)
        assert reads.num_reads == 0
        buffer.flush()
        assert reads.num_reads == 1
        float(torch.ones(()))
        assert reads.num_reads == 2, "the counter must see a read"


@pytest.mark.gpu
def test_a_row_waits_for_the_gpu_once(recwarn):
    buffer = MetricBuffer(TrainingClock())
    values = {f"critic/loss.{place}": torch.tensor(float(place), device="cuda") for place in range(5)}
    values |= {"student/updates": torch.tensor(7, device="cuda"), "student/lr": torch.tensor(0.5)}
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for iteration in range(1, 4):
            buffer.add(iteration, values, num_samples=5)
        torch.cuda.set_sync_debug_mode("warn")
        recwarn.clear()
        row = flushed(buffer)
        waits = [warning for warning in recwarn if "synchroniz" in str(warning.message)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(waits) == 1
    assert {name: row.values[name] for name in values} == {name: float(value) for name, value in values.items()}


def test_samples_per_second_count_the_samples_since_the_last_row():
    hands = Hands()
    buffer = MetricBuffer(TrainingClock(now=hands))
    for iteration, (step_s, expected) in enumerate([(2.0, 32.0), (0.5, 128.0)], start=1):
        hands.time_s += step_s
        buffer.add(iteration, {"critic/loss": 1.0}, num_samples=64)
        assert flushed(buffer).values["samples_per_s"] == pytest.approx(expected)


def test_training_time_goes_on_from_earlier_processes_and_leaves_out_pauses():
    hands = Hands()
    clock = TrainingClock(elapsed_s=50.0, now=hands)
    hands.time_s += 3
    with clock.paused():
        hands.time_s += 1000
        with clock.paused():
            hands.time_s += 1000
        hands.time_s += 1000
        assert clock.elapsed_s == pytest.approx(53.0)
    hands.time_s += 4
    assert clock.elapsed_s == pytest.approx(57.0)


def test_a_pause_that_ends_with_an_error_ends():
    hands = Hands()
    clock = TrainingClock(now=hands)
    with pytest.raises(RuntimeError), clock.paused():
        raise RuntimeError
    hands.time_s += 2
    assert clock.elapsed_s == pytest.approx(2.0)

"""The observer: one call an iteration, and everything is recorded."""

import io
import time

import pytest
import torch
from rich.console import Console

from fewstep.observe.observer import Observer
from fewstep.observe.sinks import ObserveSection, read_rows


def observer(folder, *, every: int = 3, **options) -> tuple[Observer, io.StringIO]:
    file = io.StringIO()
    section = ObserveSection(every=every, tensorboard=False, report=options.pop("report", True))
    console = Console(file=file, force_terminal=False)
    return Observer(section, folder, name="nano", iterations=10, recipe={}, console=console, **options), file


def metrics(iteration: int, std: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "critic/loss": torch.tensor(float(iteration)),
        "latents/mean.stop0": torch.tensor(0.0),
        "latents/std.stop0": torch.tensor(std),
    }


def train_rows(folder) -> dict[int, float]:
    rows = read_rows(folder / "metrics.jsonl")
    return {row.iteration: row.values["critic/loss"] for row in rows if row.kind == "train"}


def test_a_row_is_written_every_few_iterations_and_the_rest_at_the_end(tmp_path):
    watcher, file = observer(tmp_path)
    for iteration in range(1, 8):
        watcher.train(iteration, metrics(iteration), num_samples=5)
    assert train_rows(tmp_path) == {3: 2.0, 6: 5.0}
    watcher.close("Next: resume.")
    assert train_rows(tmp_path) == {3: 2.0, 6: 5.0, 7: 7.0}
    assert (tmp_path / "report.html").exists()
    assert file.getvalue().splitlines()[-1] == "Next: resume."


def test_a_phase_writes_what_was_collected_and_stops_the_clock(tmp_path):
    watcher, file = observer(tmp_path)
    watcher.train(1, metrics(1))
    with watcher.phase("checkpoint"):
        assert train_rows(tmp_path) == {1: 1.0}
        before = watcher.clock.elapsed_s
        time.sleep(0.01)
        assert watcher.clock.elapsed_s == before
    time.sleep(0.01)
    assert watcher.clock.elapsed_s > before
    assert "checkpoint" in file.getvalue()


def test_a_resumed_run_supersedes_what_came_after_its_checkpoint_and_keeps_its_time(tmp_path):
    first, _ = observer(tmp_path)
    for iteration in range(1, 10):
        first.train(iteration, metrics(iteration))
    first.close()
    second, _ = observer(tmp_path, iteration=4, time_s=100.0)
    second.train(5, metrics(5))
    second.train(6, metrics(60))
    second.close()
    assert train_rows(tmp_path) == {3: 2.0, 6: 32.5}
    last = read_rows(tmp_path / "metrics.jsonl")[-1]
    assert 100.0 < last.time_s < 110.0


def test_drifting_latents_are_a_warning_in_the_run_and_on_the_screen(tmp_path):
    watcher, file = observer(tmp_path, every=1)
    watcher.train(1, metrics(1, std=1.0))
    watcher.train(2, metrics(2, std=2.5))
    watcher.train(3, metrics(3, std=2.6))
    watcher.close()
    (warning,) = [row for row in read_rows(tmp_path / "metrics.jsonl") if row.kind == "warning"]
    assert warning.iteration == 3
    assert "more than twice" in warning.message
    assert f"Warning: {warning.message}" in file.getvalue()


def test_the_alarm_remembers_the_first_latents_over_a_resume(tmp_path):
    first, _ = observer(tmp_path, every=1)
    first.train(1, metrics(1, std=1.0))
    first.train(2, metrics(2, std=0.3))
    first.close()
    second, file = observer(tmp_path, every=1, iteration=2)
    second.train(3, metrics(3, std=0.3))
    second.close()
    assert "less than half" in file.getvalue()


def test_validation_values_get_a_row_of_their_own_and_a_report(tmp_path):
    watcher, _ = observer(tmp_path)
    watcher.train(1, metrics(1))
    watcher.validation(1, {"validation/frechet.steps4": 2.5, "validation/num_samples": 200})
    (row,) = [row for row in read_rows(tmp_path / "metrics.jsonl") if row.kind == "validation"]
    assert row.values == {"validation/frechet.steps4": 2.5, "validation/num_samples": 200.0}
    assert "Frechet distance" in (tmp_path / "report.html").read_text()
    watcher.close()


def test_without_a_report_none_is_written(tmp_path):
    watcher, _ = observer(tmp_path, report=False)
    watcher.train(1, metrics(1))
    watcher.validation(1, {"validation/frechet.steps4": 2.5})
    watcher.close()
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "report.html").mkdir()
    watcher, file = observer(tmp_path)
    watcher.train(3, metrics(3))
    watcher.close()
    assert train_rows(tmp_path) == {3: 3.0}
    assert "report.html could not be written" in file.getvalue()


def test_an_error_at_the_end_still_closes_the_file_and_the_line(tmp_path):
    watcher, file = observer(tmp_path, report=False)
    watcher.train(1, metrics(1))
    watcher._buffer._values["critic/loss"].append(torch.zeros(2))
    with pytest.raises(RuntimeError, match="equal size"):
        watcher.close()
    assert "stopped after 1 of 10" in file.getvalue()


def test_observing_draws_no_random_number(tmp_path):
    """PITFALLS "validation": training is bit-equal with it on or off; the same holds for logging."""
    before = torch.random.get_rng_state()
    watcher, _ = observer(tmp_path)
    for iteration in range(1, 5):
        watcher.train(iteration, metrics(iteration))
    watcher.validation(4, {"validation/frechet.steps4": 2.5})
    watcher.close()
    assert torch.equal(torch.random.get_rng_state(), before)

"""The processes of a bench: what is begun when, and how it stops."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from bench.workers import Task, work


def note(folder: Path, name: str) -> bool:
    """Writes the task and the process that does it into the file "order"."""
    with (folder / "order").open("a") as order:
        order.write(f"{name} {os.getpid()}\n")
    print(f"{name} says so")
    return True


def fail(folder: Path, name: str) -> bool:
    note(folder, name)
    raise ValueError("no such thing")


def die(folder: Path, name: str) -> bool:
    note(folder, name)
    os._exit(3)


def wait(folder: Path, name: str) -> bool:
    """Until it is asked to stop, as training does."""
    asked = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    note(folder, name)
    end = time.monotonic() + 60
    while not asked and time.monotonic() < end:
        time.sleep(0.02)
    signal.signal(signal.SIGINT, before)
    return False


def sleep(folder: Path, name: str) -> bool:
    """As something that knows nothing of stopping."""
    note(folder, name)
    time.sleep(60)
    return True


def together(folder: Path, name: str) -> bool:
    """Done when two of its kind run at once."""
    note(folder, name)
    end = time.monotonic() + 30
    while len(begun(folder)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    return len(begun(folder)) == 2


def task(folder: Path, name: str, do=note, needs: tuple[str, ...] = ()) -> Task:
    paths = tuple(folder / f"{other}.done" for other in needs)
    return Task(name, partial(do, folder, name), paths, folder / f"{name}.done", folder / f"{name}.log")


def lines(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "order").read_text().splitlines()]


def begun(folder: Path) -> list[str]:
    return [name for name, _ in lines(folder)]


def processes(folder: Path) -> set[str]:
    return {process for _, process in lines(folder)}


def test_one_process_does_every_task_when_what_it_needs_is_there(tmp_path: Path):
    tasks = [
        task(tmp_path, "student", needs=("teacher", "few")),
        task(tmp_path, "few", needs=("teacher",)),
        task(tmp_path, "teacher"),
        task(tmp_path, "another"),
    ]
    assert work(tasks, ["cpu"])
    assert begun(tmp_path) == ["teacher", "few", "student", "another"]
    assert len(processes(tmp_path)) == 1
    assert str(os.getpid()) not in processes(tmp_path)
    assert (tmp_path / "few.log").read_text() == "few says so\n"


def test_every_device_has_a_worker(tmp_path: Path):
    assert work([task(tmp_path, "a", together), task(tmp_path, "b", together)], ["cpu", "cpu"])
    assert len(processes(tmp_path)) == 2


def test_a_failure_is_told_and_leaves_only_what_needs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tasks = [
        task(tmp_path, "bad", fail),
        task(tmp_path, "child", needs=("bad",)),
        task(tmp_path, "dead", die),
        task(tmp_path, "other"),
    ]
    assert not work(tasks, ["cpu"])
    assert begun(tmp_path) == ["bad", "dead", "other"]
    assert [(tmp_path / f"{name}.done").exists() for name in ("bad", "dead", "other")] == [False, False, True]
    told = capsys.readouterr().out
    assert "bad: FAILED" in told
    assert "ValueError: no such thing" in told
    assert "dead: FAILED (its process ended: 3)" in told
    (_, first), (_, second), (_, third) = lines(tmp_path)
    assert first == second != third, "the worker goes on after an error, and is replaced where its process has died"


def test_after_ctrl_c_what_runs_is_asked_to_stop_and_nothing_else_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def press() -> None:
        while not (tmp_path / "order").exists() or len(begun(tmp_path)) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    tasks = [task(tmp_path, "training", wait), task(tmp_path, "judging", sleep), task(tmp_path, "later")]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=press, daemon=True).start()
    assert not work(tasks, ["cpu", "cpu"])
    signal.signal(signal.SIGINT, before)
    assert sorted(begun(tmp_path)) == ["judging", "training"]
    assert not list(tmp_path.glob("*.done"))
    told = capsys.readouterr().out
    assert "training: stopped" in told
    assert "judging: stopped" in told


def test_nothing_begins_after_the_time_limit(tmp_path: Path):
    start = time.monotonic()
    assert not work([task(tmp_path, "training", wait), task(tmp_path, "later")], ["cpu"], limit_s=0.5)
    assert time.monotonic() - start < 30
    assert not (tmp_path / "later.log").exists()


def see(folder: Path, name: str) -> bool:
    """Writes which GPUs there are for the process."""
    (folder / "order").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    return True


@pytest.mark.parametrize(
    ("device", "here", "seen"), [("cuda:3", None, "3"), ("cuda:1", "5,7", "7"), ("cpu", "5,7", "")]
)
def test_a_worker_has_its_own_device_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, here: str | None, seen: str
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if here is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", here)
    assert work([task(tmp_path, "see", see)], [device])
    assert (tmp_path / "order").read_text() == seen
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == here


def be_killed(folder: Path, name: str) -> bool:
    """As a bench that is killed while its task runs."""
    threading.Thread(target=kill_when_begun, args=(folder,), daemon=True).start()
    return work([task(folder, "training", tell)], ["cpu"])


def kill_when_begun(folder: Path) -> None:
    while not (folder / "order").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def tell(folder: Path, name: str) -> bool:
    """Says that it was asked to stop."""
    wait(folder, name)
    (folder / "asked").touch()
    return False


def test_a_task_stops_when_its_bench_is_killed(tmp_path: Path):
    assert not work([task(tmp_path, "bench", be_killed)], ["cpu"])
    end = time.monotonic() + 20
    while not (tmp_path / "asked").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert (tmp_path / "asked").exists()

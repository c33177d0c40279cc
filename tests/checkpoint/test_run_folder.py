"""The folder of a run: begun once, trained into by one process at a time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fewstep.checkpoint.run_folder import RunFolder
from fewstep.errors import UserError
from tests.checkpoint.runs import write_run


def test_a_new_run_gets_an_empty_folder_and_its_places(tmp_path: Path):
    run = RunFolder.create(tmp_path / "runs" / "new")
    places = (run.recipe, run.metrics, run.checkpoints, run.samples, run.report, run.evaluation, run.environment)
    assert [place.name for place in places] == [
        "recipe.yaml",
        "metrics.jsonl",
        "checkpoints",
        "samples",
        "report.html",
        "evaluation.json",
        "environment.json",
    ]
    assert run.path.is_dir()
    assert not any(place.exists() for place in places)


def test_a_folder_that_holds_a_run_is_refused_and_the_ways_on_are_named(tmp_path: Path):
    run = write_run(tmp_path / "old", 3)
    with pytest.raises(
        UserError, match=r"iteration-000003\); go on with it by 'fewstep train --resume .*old'.*name="
    ) as e:
        RunFolder.create(run.path)
    assert str(run.path) in str(e.value)


def test_a_run_that_ended_before_its_first_checkpoint_is_not_overwritten_either(tmp_path: Path):
    RunFolder.create(tmp_path / "old").metrics.write_text("{}\n")
    with pytest.raises(UserError, match="without a complete checkpoint"):
        RunFolder.create(tmp_path / "old")


def test_a_folder_with_other_things_is_refused(tmp_path: Path):
    (tmp_path / "holiday.png").write_bytes(b"")
    with pytest.raises(UserError, match="is not the folder of a run"):
        RunFolder.create(tmp_path)
    with pytest.raises(UserError, match="is not the folder of a run"):
        RunFolder.create(tmp_path / "holiday.png")


def test_a_run_that_was_only_locked_can_begin(tmp_path: Path):
    run = RunFolder.create(tmp_path / "new")
    with run.lock():
        pass
    assert RunFolder.create(run.path) == run


@pytest.mark.parametrize("left", [".seen-0123", ".partial-recipe.yaml-4567"])
def test_a_run_whose_process_was_killed_before_it_began_can_begin(tmp_path: Path, left: str):
    run = RunFolder.create(tmp_path / "new")
    (run.path / left).write_text("")
    assert RunFolder.create(run.path) == run


def test_a_run_whose_workers_were_killed_before_it_began_can_begin(tmp_path: Path):
    run = RunFolder.create(tmp_path / "new")
    run.workers.mkdir()
    assert RunFolder.create(run.path) == run
    (run.path / "workers of another kind").mkdir()
    with pytest.raises(UserError, match="is not the folder of a run"):
        RunFolder.create(run.path)


def test_only_a_run_can_be_resumed(tmp_path: Path):
    with pytest.raises(UserError, match="holds no run that could be resumed"):
        RunFolder.existing(tmp_path / "absent")
    run = write_run(tmp_path / "run", 1)
    assert RunFolder.existing(run.path) == run


def test_two_cannot_train_into_one_folder(tmp_path: Path):
    run = RunFolder(tmp_path)
    with run.lock():
        with pytest.raises(UserError, match=r'another process trains into this run \({"pid": \d+.*name='), run.lock():
            pass
        with pytest.raises(UserError, match="another process"), RunFolder(tmp_path / ".").lock():
            pass
    with run.lock():
        pass


def test_the_lock_is_given_back_when_training_raises(tmp_path: Path):
    with pytest.raises(RuntimeError), RunFolder(tmp_path).lock():
        raise RuntimeError
    with RunFolder(tmp_path).lock():
        pass


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path):
    run = RunFolder(tmp_path)
    with run.lock():
        pass
    (lock,) = tmp_path.iterdir()
    command = [sys.executable, "-c", HOLDER, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match="another process"), run.lock():
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with run.lock():
            pass

"""The runs of a bench: what is begun when, and how it stops."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.runs import Judging, Run, Task, in_order, training, work

JUDGING = Judging(samples=70, batch=35, long_samples=66)


def task(folder: Path, name: str, code: str = "", needs: tuple[str, ...] = ()) -> Task:
    """A process that writes ``name`` into the file "order" and then runs ``code``."""
    code = f"open({str(folder / 'order')!r}, 'a').write('{name} ')\n{code}"
    run = Run(name, "no recipe", (), 0, folder / name)
    run.folder.mkdir(parents=True, exist_ok=True)
    command = (sys.executable, "-c", code)
    return Task(run, command, tuple(folder / other / "trained" for other in needs), run.trained, folder / f"{name}.log")


def begun(folder: Path) -> list[str]:
    return (folder / "order").read_text().split()


def test_a_task_begins_when_what_it_needs_is_there(tmp_path: Path):
    tasks = [
        task(tmp_path, "student", needs=("teacher", "few")),
        task(tmp_path, "few", needs=("teacher",)),
        task(tmp_path, "teacher"),
    ]
    assert work(tasks, jobs=3)
    assert begun(tmp_path) == ["teacher", "few", "student"]


def test_of_the_tasks_that_are_ready_the_first_begins(tmp_path: Path):
    tasks = [task(tmp_path, name) for name in ("c", "a", "b")]
    assert work(tasks, jobs=1)
    assert begun(tmp_path) == ["c", "a", "b"]


def test_no_more_tasks_run_at_once_than_there_are_jobs(tmp_path: Path):
    code = (
        "import pathlib, time\n"
        f"here = pathlib.Path({str(tmp_path)!r}); mine = here / f'running-{{time.time_ns()}}'; mine.touch()\n"
        "time.sleep(0.3); count = len(list(here.glob('running-*'))); mine.unlink()\n"
        "open(here / 'counts', 'a').write(f'{count} ')\n"
    )
    assert work([task(tmp_path, f"t{number}", code) for number in range(5)], jobs=2)
    assert max(map(int, (tmp_path / "counts").read_text().split())) == 2


def test_a_failure_is_told_and_leaves_only_what_needs_it(tmp_path: Path, capsys):
    tasks = [
        task(tmp_path, "bad", "raise SystemExit('no such thing')"),
        task(tmp_path, "child", needs=("bad",)),
        task(tmp_path, "other"),
    ]
    assert not work(tasks, jobs=1)
    assert begun(tmp_path) == ["bad", "other"]
    assert "no such thing" in capsys.readouterr().out
    assert not (tmp_path / "bad" / "trained").exists()


def test_the_time_limit_asks_every_process_to_stop_and_begins_no_other(tmp_path: Path):
    code = (
        "import pathlib, signal, time\n"
        "def stop(*_): pathlib.Path({!r}).touch(); raise SystemExit(130)\n"
        "signal.signal(signal.SIGINT, stop)\n"
        "time.sleep(60)\n"
    )
    names = ("a", "b")
    tasks = [task(tmp_path, name, code.format(str(tmp_path / f"{name}-stopped"))) for name in names]
    start = time.monotonic()
    assert not work([*tasks, task(tmp_path, "c")], jobs=2, limit_s=1.5)
    assert time.monotonic() - start < 10
    assert all((tmp_path / f"{name}-stopped").exists() for name in names)
    assert sorted(begun(tmp_path)) == ["a", "b"]


def test_runs_come_in_their_order_and_are_judged_a_while_later(tmp_path: Path):
    runs = [Run(name, "r", (), 0, tmp_path / name) for name in ("one", "two", "three")]
    told = [one.told for one in in_order(runs, JUDGING, delay=1)]
    assert [text.removeprefix("seed 0: ") for text in told] == [
        "one is trained",
        "two is trained",
        "one is judged",
        "three is trained",
        "two is judged",
        "three is judged",
    ]


def test_what_is_done_is_left_and_what_was_begun_goes_on(tmp_path: Path):
    done, begun = (Run(name, "r", (), 0, tmp_path / name) for name in ("done", "begun"))
    for path in (done.trained, done.evaluation, begun.folder / "recipe.yaml"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    tasks = in_order([done, begun], JUDGING)
    assert [one.run for one in tasks] == [begun, begun]
    assert tasks[0].command[-1] == "--resume"


def test_a_run_starts_its_roles_from_the_folders_of_others(tmp_path: Path):
    starts = (("teacher", tmp_path / "t"), ("student", tmp_path / "s"))
    one = training(Run("dmd", "r", ("iterations=7",), 5, tmp_path / "dmd", starts))
    words = ["seed=5", f"teacher.init={tmp_path / 't'}", f"student.init={tmp_path / 's'}", "iterations=7"]
    assert [word for word in one.command if "=" in word and "import" not in word] == words
    assert one.needs == (tmp_path / "t" / "trained", tmp_path / "s" / "trained")

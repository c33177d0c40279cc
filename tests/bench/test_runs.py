"""The runs of a bench: what is left to do, and in which order."""

from __future__ import annotations

from pathlib import Path

from bench.runs import Judging, Run, in_order, unfinished

JUDGING = Judging(samples=70, batch=35, long_samples=66)


def run(folder: Path, name: str, starts: str = "", have: tuple[str, ...] = ()) -> Run:
    """Starts from the runs named; ``have`` are the files that are in its folder."""
    (folder / name).mkdir()
    for file in have:
        (folder / name / file).touch()
    return Run(name, "r", (), 0, folder / name, tuple((f"role{other}", folder / other) for other in starts))


def left(runs: list[Run]) -> list[str]:
    return [task.told.removeprefix("seed 0, ") for task in in_order(runs, JUDGING)]


def test_runs_come_in_their_order_each_judged_when_it_is_trained(tmp_path: Path):
    tasks = in_order([run(tmp_path, "a"), run(tmp_path, "b", "a")], JUDGING)
    told = [task.told for task in tasks]
    assert told == [f"seed 0, {text}" for text in ("a trained", "a judged", "b trained", "b judged")]
    trained = [tmp_path / name / "trained" for name in "ab"]
    assert [task.needs for task in tasks] == [(), (trained[0],), (trained[0],), (trained[1],)]


def test_what_is_done_is_left(tmp_path: Path):
    both = ("trained", "evaluation.json")
    runs = [run(tmp_path, "a", have=both), run(tmp_path, "b", "a", have=("trained",)), run(tmp_path, "c", "b")]
    assert left(runs) == ["b judged", "c trained", "c judged"]


def test_a_judged_run_without_weights_is_trained_only_for_what_starts_from_it(tmp_path: Path):
    judged = ("evaluation.json",)
    runs = [run(tmp_path, "a", have=judged), run(tmp_path, "b", "a", have=judged), run(tmp_path, "c", "a")]
    assert left(runs) == ["a trained", "c trained", "c judged"]
    to_train, needed = unfinished(runs)
    assert ([one.name for one in to_train], needed) == (["a", "c"], {tmp_path / "a"})


def test_a_run_starts_its_roles_from_the_folders_of_others(tmp_path: Path):
    starts = (("teacher", tmp_path / "t"), ("student", tmp_path / "s"))
    words = Run("dmd", "r", ("iterations=7",), 5, tmp_path / "dmd", starts).words
    assert words == ["seed=5", f"teacher.init={tmp_path / 't'}", f"student.init={tmp_path / 's'}", "iterations=7"]

"""``fewstep train`` with ``engine.name=ray``: the run folder, resuming on other engines, a stop, workers that fail."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.save import newest_complete
from fewstep.cli.shipped import shipped_recipes
from fewstep.engines.ray.placement import RaySection
from fewstep.observe.sinks import read_rows
from fewstep.prepare import prepare
from fewstep.train import train
from tests.engines.test_ranks import started
from tests.faults.launchers import DMD2 as WATCHED
from tests.faults.sessions import assert_each_item_once, noted
from tests.recipes.tiny_runs import World, tensors, values

pytest.importorskip("ray")
WHOLE_RUNS = True
PROCESS = re.compile(r"process (\d+) on")
"""Of the first line that a worker says."""
SFT, DMD2 = "wan_nano/sft", "wan_nano/dmd2"
EXACT = ("data.batch=4", "engine.precision=float64", "engine.device=cpu")
SHARED = ("engine.name=ray", "engine.groups.all={workers: 2}")
SIZES = "critic: {workers: 1}, student: {workers: 1}, rollout: {workers: 1}"
SPLIT = ("engine.name=ray", "engine.layout=split", f"engine.groups={{{SIZES}}}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    """Where a teacher was trained, and where Ray runs, whose workers note which items they see."""
    import ray

    from fewstep.engines.ray.cluster import start

    made = World.make(tmp_path_factory.mktemp("ray") / "world")
    made.train(SFT, *EXACT, "validation=null", iterations=2, into=SFT)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FAULT_ROWS", str(tmp_path_factory.mktemp("rows")))
        start(RaySection(), [{"CPU": 4.0}])
        yield made
        ray.shutdown()


def assert_equal_runs(world: World, into: str, whole: str, iteration: int) -> None:
    """Weights, moments and averages of both runs, and what their validations found."""
    found, expected = tensors(world.run(into), iteration), tensors(world.run(whole), iteration)
    assert found.keys() == expected.keys()
    for group, named in expected.items():
        assert found[group].keys() == named.keys()
        for name, tensor in named.items():
            assert (found[group][name].double() - tensor.double()).abs().max() < 1e-9, f"{group}: {name}"
    for key, row in values(world.run(whole)).items():
        if key[0] == "validation":
            assert values(world.run(into))[key] == {name: pytest.approx(v, rel=1e-4) for name, v in row.items()}


@pytest.mark.thorough
def test_a_run_goes_from_two_ranks_to_groups_of_workers_to_one_process_and_back(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """PITFALLS, resume: each engine goes on from what another one saved, the order of the data too; of the groups
    one makes rollouts alone."""
    more = (*EXACT, *WATCHED.settings, "checkpoint.every=2", "validation.every=2")
    run = world.run("mixed")
    two_ranks("train", str(shipped_recipes()[DMD2]), *world.overrides(DMD2, 2), *more, "--run", str(run.path))
    world.train(DMD2, *more, *SPLIT, iterations=4, into="mixed", resume=True)
    world.train(DMD2, *more, iterations=7, into="mixed", resume=True)
    two_ranks("train", "--resume", str(run.path), "iterations=9")
    assert_each_item_once([noted(Path(os.environ["FAULT_ROWS"]))], 9, WATCHED.rows)
    monkeypatch.delenv("FAULT_ROWS")
    world.train(DMD2, *more, iterations=9, into="whole")
    assert_equal_runs(world, "mixed", "whole", 9)
    rows = [row.values for row in read_rows(run.metrics) if row.kind == "train"]
    assert any({"critic/waiting_s", "student/waiting_s", "critic/loss", "student/loss"} <= row.keys() for row in rows)
    of_groups = {"rollout/waiting_s", "rollout/weights_mib", "phase/time_s.rollout", "phase/time_s.sync"}
    found = next(row for row in rows if of_groups <= row.keys())
    assert found["rollout/weights_mib"] == found["student/weights_mib"]


def two_ranks(*arguments: str) -> None:
    ranks = started("fewstep", arguments)
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said


@pytest.mark.faults
@pytest.mark.parametrize(("name", "groups", "victim"), [(SFT, SHARED, "all/1"), (DMD2, SPLIT, "rollout/0")])
def test_a_run_whose_worker_is_killed_goes_on_by_itself(
    world: World, capsys: pytest.CaptureFixture[str], name: str, groups: tuple[str, ...], victim: str
):
    """``engine.max_restarts``: what it ends with is what an undisturbed run ends with."""
    more = (*EXACT, "checkpoint.every=5", "validation=null", "student.schedule={}")
    more = more if name == SFT else (*more, "critic.schedule={}")
    into = f"killed-{victim.partition('/')[0]}"
    recipe = world.recipe(name, *more, *groups, "engine.max_restarts=1", f"name={into}", iterations=20)
    run = world.run(into)
    killer = threading.Thread(
        target=kill_after, args=(run.workers / f"{victim.replace('/', '-')}.log", run.checkpoints)
    )
    killer.start()
    assert train(prepare(recipe), run)
    killer.join()
    assert_all_gone(run)
    said = capsys.readouterr().err
    assert f"worker {victim} (process" in said
    assert "died: killed, or crashed" in said
    assert "restarts left: 0" in said
    world.train(name, *more, iterations=20, into=f"un{into}")
    assert_equal_runs(world, into, f"un{into}", 20)


def kill_after(log: Path, checkpoints: Path) -> None:
    """Kills the worker of the log as soon as there is a checkpoint."""
    wait_for(lambda: newest_complete(checkpoints) is not None)
    os.kill(int(PROCESS.findall(log.read_text())[-1]), signal.SIGKILL)


def wait_for(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def assert_all_gone(run: RunFolder) -> None:
    """No worker that ever wrote into the run's folder is left."""
    from fewstep.engines.ray.group import lives

    numbers = [int(number) for log in run.workers.iterdir() for number in PROCESS.findall(log.read_text())]
    assert len(numbers) >= 2
    wait_for(lambda: not any(lives(number) for number in numbers), 10.0)

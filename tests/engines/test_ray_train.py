"""``fewstep train`` with ``engine.name=ray``: the run folder, and resuming on other engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fewstep.cli.shipped import shipped_recipes
from fewstep.engines.ray.placement import RaySection
from fewstep.observe.sinks import read_rows
from tests.engines.test_ranks import started
from tests.faults.launchers import DMD2 as WATCHED
from tests.faults.sessions import assert_each_item_once, noted
from tests.recipes.tiny_runs import World, tensors, values

pytest.importorskip("ray")
WHOLE_RUNS = True
SFT, DMD2 = "wan_nano/sft", "wan_nano/dmd2"
EXACT = ("data.batch=4", "engine.precision=float64", "engine.device=cpu")
SPLIT = ("engine.name=ray", "engine.layout=split", "engine.groups={critic: {workers: 1}, student: {workers: 1}}")


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


def test_a_run_goes_from_two_ranks_to_groups_of_workers_to_one_process_and_back(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """PITFALLS, resume: each engine goes on from what another one saved, the order of the data too."""
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


def two_ranks(*arguments: str) -> None:
    ranks = started("fewstep", arguments)
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said

"""From a recipe to trajectories on the disk, and from there to training, with a causal teacher and its student."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from fewstep import trajectories as trajectories_module
from fewstep.assemble import assemble
from fewstep.checkpoint.run_folder import RunFolder
from fewstep.cli import app
from fewstep.config import Recipe, dump_recipe
from fewstep.data.trajectories import Chosen
from fewstep.errors import UserError, UserErrors
from fewstep.flow.sigmas import grid
from fewstep.models.families import build
from fewstep.plan import Plan
from fewstep.prepare import prepare
from fewstep.rng import Draw
from fewstep.train import train
from fewstep.trajectories import folder_of, generate, teacher_weights
from tests.models.tiny import randomise, relative
from tests.recipes.tiny_runs import MODEL, write_clothes

WHOLE_RUNS = True

FRAMES, COUNT, SHARD = 4, 11, 4
OPTIMIZER = {"lr": 1e-3}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and a causal teacher of two iterations, all of its weights large enough to be seen."""
    path = tmp_path_factory.mktemp("trajectories")
    write_clothes(path / "data")
    model = {"family": "wan", "size": "nano", "conditioner": {"name": "class_label", "classes": 20}, **MODEL}
    student = {"init": "random", "model": model, "causal": {"block_frames": 2}, "optimizer": OPTIMIZER}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fewstep.models.wan.model.Wan.initialise", lambda network, _: randomise(network))
        for seed in (0, 1):
            method = {"name": "teacher_forcing"}
            recipe = values(path, method=method, student=student, teacher=None, iterations=2, seed=seed)
            assert train(prepare(Recipe.model_validate(recipe)), RunFolder.create(path / f"teacher-{seed}"))
    return path


def values(world: Path, **sections: Any) -> dict[str, Any]:
    """A recipe of ODE initialisation, in float64."""
    method = {"name": "ode_init", "nodes": 8, "guidance_scale": 3.0}
    return {
        "name": "nano-ode",
        "iterations": 3,
        "method": {**method, "trajectories": {"count": COUNT, "shard": SHARD, "path": str(world / "kept")}},
        "teacher": {"init": str(world / "teacher-0")},
        "student": {"init": "teacher", "optimizer": OPTIMIZER},
        "data": {"name": "moving_fashion_mnist", "frames": FRAMES, "batch": 3, "path": str(world / "data")},
        "sampling": {"steps": 4, "shift": 5.0},
        "checkpoint": {"every": 3},
        "observe": {"tensorboard": False},
        "engine": {"precision": "float64"},
    } | sections


def plan(world: Path, kept: Path | None, **changes: Any) -> Plan:
    """``kept``: the folder of the trajectories. Other changes are of the method, but ``trajectories``' own."""
    recipe = values(world)
    own = {name: changes.pop(name) for name in ("count", "dtype", "shard") if name in changes}
    sections = {name: changes.pop(name) for name in ("teacher", "engine", "seed", "student", "data") if name in changes}
    place = None if kept is None else str(kept)
    trajectories = {**recipe["method"]["trajectories"], "path": place, **own}
    method = {**recipe["method"], **changes, "trajectories": trajectories}
    return prepare(Recipe.model_validate({**recipe, **sections, "method": method}))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=400)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().split())


def kept(made: Plan, numbers: range = range(COUNT)) -> tuple[Tensor, Tensor]:
    found = folder_of(made).read(torch.tensor(numbers))
    return found.states, found.endpoint


@torch.no_grad()
def test_what_is_kept_is_the_teachers_path_from_the_noise_of_the_trajectorys_number(world: Path, tmp_path: Path):
    """By [clean | noisy] sequences, one row after the other; the items are those of a batch that trains."""
    made = plan(world, tmp_path / "t")
    generate(made, console=quiet())
    states, endpoint = kept(made)
    assert made.roles["teacher"].model is not None
    teacher: Any = build(made.roles["teacher"].model)
    teacher.load_state_dict(teacher_weights(made))
    teacher.double()
    items = Chosen(made.dataset, folder_of(made).manifest).items(range(COUNT))
    x0, cond = made.codec.encode(items.pixels).double(), teacher.conditioner.condition(items.label)
    x_t = Draw(0, "trajectories", 0, torch.arange(COUNT)).normal("noise", made.shape, torch.float64)
    path = [x_t]
    for sigma, following in pairwise((*grid(8, 5.0), 0.0)):
        level = torch.full((COUNT, FRAMES), sigma, dtype=torch.float64)
        null = teacher.conditioner.null(COUNT)
        with_cond, without = (teacher.velocity(path[-1], level, c, clean=x0) for c in (cond, null))
        path.append(path[-1] + (following - sigma) * (without + 3.0 * (with_cond - without)))
    assert relative(states, torch.stack([path[n] for n in (0, 2, 4, 6)], 1)) < 1e-6  # stored in float32
    assert relative(endpoint, path[-1]) < 1e-6
    assert relative(endpoint, x0) > 0.1


def test_a_killed_generation_goes_on_and_ends_as_if_nothing_had_been(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Ctrl-C between and inside shards: the finished ones are kept and not made again; the last line says so."""
    whole, cut = plan(world, tmp_path / "whole"), plan(world, tmp_path / "cut")
    generate(whole, console=quiet())
    plain, asked = trajectories_module.make, []

    def interrupted(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        if arguments[-1] == 1:
            raise KeyboardInterrupt
        return plain(*arguments)

    monkeypatch.setattr(trajectories_module, "make", interrupted)
    console = quiet()
    with pytest.raises(KeyboardInterrupt):
        generate(cut, console=console)
    assert said(console).endswith(
        f"Stopped: 4 of 11 trajectories are in {tmp_path / 'cut'}; the same command makes the rest."
    )
    assert asked == [0, 1]
    written = (tmp_path / "cut" / "shard-00000.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(trajectories_module, "make", plain)
    generate(cut, console=console)
    assert said(console).endswith(f"11 trajectories are in {tmp_path / 'cut'}")
    assert (tmp_path / "cut" / "shard-00000.safetensors").stat().st_mtime_ns == written
    for found, expected in zip(kept(cut), kept(whole), strict=True):
        assert torch.equal(found, expected)


def test_processes_share_the_work_and_micro_batches_change_nothing(world: Path, tmp_path: Path):
    """Shards 0, 2, 4 and 1, 3, 5; what they make is what one process makes."""
    whole, shared = plan(world, tmp_path / "whole"), plan(world, tmp_path / "shared", shard=2)
    small = plan(world, tmp_path / "shared", shard=2, engine={"precision": "float64", "micro_batch": 1})
    generate(whole, console=quiet())
    console = quiet()
    generate(shared, rank=1, world=2, console=console)
    assert said(console).endswith(f"5 of 11 trajectories are in {tmp_path / 'shared'}")
    assert folder_of(shared).missing() == [0, 2, 4]
    generate(small, rank=0, world=2, console=console)
    assert folder_of(shared).missing() == []
    for found, expected in zip(kept(shared), kept(whole), strict=True):
        torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)


def test_processes_that_train_together_wait_for_each_other_outside_of_collectives(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """However unequal their shares: two shards and one. PITFALLS, hangs: a collective's time would be up."""
    made, console, waits = plan(world, tmp_path / "t"), quiet(), []

    def other(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            generate(made, rank=1, world=2, console=quiet())

    monkeypatch.setattr(trajectories_module.time, "sleep", other)
    generate(made, rank=0, world=2, console=console, together=True)
    assert len(waits) == 2
    assert folder_of(made).missing() == []
    assert "waiting for 1 shard(s) of other processes" in said(console)

    monkeypatch.setattr(trajectories_module.time, "sleep", waits.append)
    monkeypatch.setattr(trajectories_module, "STALE_S", 0.01)
    with pytest.raises(UserError, match=r"2 shard\(s\) of other processes did not come"):
        generate(plan(world, tmp_path / "alone"), rank=1, world=2, console=console, together=True)


def test_more_trajectories_than_items_get_a_noise_of_their_own(world: Path, tmp_path: Path):
    """67 items: trajectory 67 begins the second round."""
    made = plan(world, tmp_path / "t", count=70, shard=70, nodes=4)
    generate(made, console=quiet())
    ids = Chosen(made.dataset, folder_of(made).manifest)._ids
    again = (ids[:67] == ids[68]).nonzero().item()
    states, _ = kept(made, range(70))
    assert not torch.equal(states[68, 0], states[int(again), 0])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"nodes": 16}, "nodes = 16: the folder's are of 8"),
        ({"guidance_scale": 1.0}, "guidance_scale = 1.0: the folder's are of 3.0"),
        ({"seed": 5}, "seed = 5: the folder's are of 0"),
        ({"teacher": {"init": "teacher-1"}}, "teacher = {world}/teacher-1, ema weights, iteration 2 ("),
        (
            {"teacher": {"init": "teacher-0", "weights": "raw"}},
            "teacher = {world}/teacher-0, raw weights",
        ),
    ],
)
def test_trajectories_of_another_recipe_are_refused_with_the_values_that_differ(world: Path, changes, line):
    generate(plan(world, world / "kept"), console=quiet())
    changes = dict(changes)
    if "teacher" in changes:
        changes["teacher"] = {**changes["teacher"], "init": str(world / changes["teacher"]["init"])}
    with pytest.raises(UserErrors) as refused:
        generate(plan(world, world / "kept", **changes), console=quiet())
    (told,) = refused.value.errors[1:]
    assert told.startswith(line.format(world=world))


def test_without_a_path_every_collection_has_a_folder_of_its_own_in_the_cache(world: Path):
    one, other = plan(world, None), plan(world, None, guidance_scale=1.0)
    assert folder_of(one).path.parent == Path("~/.cache/fewstep/trajectories").expanduser()
    assert folder_of(one).path != folder_of(other).path
    assert folder_of(plan(world, None, count=5)).path == folder_of(one).path


def test_too_few_trajectories_or_a_full_disk_are_told_before_anything_is_made(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(UserError, match=r"count = 2: a batch has 3 rows"):
        generate(plan(world, tmp_path / "t", count=2), console=quiet())
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10 * 2**10}))
    with pytest.raises(UserError, match=r"need 0\.00021 GiB, 9\.54e-06 GiB are free; write another method\.traj"):
        generate(plan(world, tmp_path / "t"), console=quiet())
    assert not (tmp_path / "t").exists()


def test_training_makes_what_is_missing_then_runs_without_the_teacher(world: Path, tmp_path: Path):
    made = plan(world, tmp_path / "t")
    assert train(made, RunFolder.create(tmp_path / "run"))
    assert folder_of(made).missing() == []
    engine = assemble(made)
    assert set(engine.roles) == {"student"}
    assert engine.roles["student"].causal is not None
    batch = engine.batches.batch(0)
    assert batch.trajectory is not None
    assert torch.equal(batch.trajectory.endpoint, kept(made)[1][batch.trajectory.key].double())
    meta = json.loads((tmp_path / "run" / "checkpoints" / "iteration-000003" / "meta.json").read_text())
    assert (meta["stage"], meta["counters"]) == ("student", {"student": 3})
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("values", row).get("student/loss", 0) > 0 for row in rows)


def test_a_resumed_run_is_the_uninterrupted_one(world: Path, tmp_path: Path):
    first = Recipe.model_validate(values(world, iterations=2))
    assert train(prepare(first), RunFolder.create(tmp_path / "run"))
    whole, half = assemble(prepare(first)), assemble(prepare(first))
    for iteration in range(4):
        whole.run(iteration)
    for iteration in range(2):
        half.run(iteration)
    again = assemble(prepare(first))
    again.load(half.state())
    for iteration in range(2, 4):
        again.run(iteration)
    for name, tensor in whole.state()["student"].items():
        assert torch.equal(again.state()["student"][name], tensor), name


def test_the_command_makes_trajectories_and_refuses_methods_without_them(world: Path, tmp_path: Path):
    recipe = tmp_path / "ode.yaml"
    recipe.write_text(dump_recipe(Recipe.model_validate(values(world))))
    path = f"method.trajectories.path={tmp_path / 't'}"

    def call(*arguments: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["trajectories", *map(str, arguments)])
        assert result.exit_code == code, result.output
        return " ".join(result.output.split())

    assert call(recipe, path, "--rank", 1, "--world", 2).endswith(f"4 of 11 trajectories are in {tmp_path / 't'}")
    assert call(recipe, path).endswith(f"11 trajectories are in {tmp_path / 't'}")
    assert "write 0 to 1" in call(recipe, "--rank", 2, "--world", 2, code=2)
    assert "method.nodes: 8" in call(recipe, "method.nodes=9", code=2)
    assert "trains on no trajectories" in call(world / "teacher-0", code=2)


@pytest.mark.parametrize(
    ("causal", "stop_per"),
    [(None, "sample"), ({"block_frames": 2}, "block"), ({"block_frames": 1, "first_frame_alone": True}, "block")],
    ids=["KD", "CausVid", "CausVid, first frame alone"],
)
def test_a_bidirectional_teacher_trains_a_bidirectional_student_and_a_causal_one(
    bidirectional: Path, tmp_path: Path, causal: dict[str, Any] | None, stop_per: str
):
    student = {"init": "teacher", "optimizer": OPTIMIZER, "causal": causal}
    forms = {"student": student, "teacher": {"init": str(bidirectional / "teacher")}}
    made = plan(bidirectional, tmp_path / "t", stop_per=stop_per, **forms)
    assert train(made, RunFolder.create(tmp_path / "run"))
    other = {"sample": "block", "block": "sample"}[stop_per]
    with pytest.raises(UserErrors, match=rf"method\.stop_per = {other}: .*write {stop_per}"):
        plan(bidirectional, tmp_path / "t", stop_per=other, **forms)


def test_a_causal_teacher_trains_no_bidirectional_student_and_none_of_other_blocks(world: Path, bidirectional: Path):
    student = {"init": str(bidirectional / "teacher"), "optimizer": OPTIMIZER}
    with pytest.raises(UserErrors, match=r"write student\.causal like the teacher's"):
        plan(world, world / "kept", student=student)
    with pytest.raises(UserErrors, match="it makes blocks of 1 frames, the teacher of 2 frames"):
        plan(world, world / "kept", student={**student, "causal": {"block_frames": 1}})


@pytest.fixture(scope="module")
def bidirectional(world: Path) -> Path:
    """The same data, and a teacher that sees whole clips."""
    model = {"family": "wan", "size": "nano", "conditioner": {"name": "class_label", "classes": 20}, **MODEL}
    student = {"init": "random", "model": model, "optimizer": OPTIMIZER}
    recipe = values(world, method={"name": "sft"}, student=student, teacher=None, iterations=2)
    assert train(prepare(Recipe.model_validate(recipe)), RunFolder.create(world / "teacher"))
    return world

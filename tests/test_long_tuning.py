"""Streaming long tuning from a recipe to a checkpoint, and what a recipe may not ask of it."""

from __future__ import annotations

import shutil

import pytest
import torch

from fewstep.assemble import assemble
from fewstep.checkpoint.export import export
from fewstep.checkpoint.source import open_source
from fewstep.describe import carried_gib, describe
from fewstep.errors import UserError, UserErrors
from fewstep.prepare import prepare
from tests.recipes.tiny_runs import World, tensors, values
from tests.test_cli import call
from tests.test_train import assert_same_bits

WHOLE_RUNS = True

SFT, LONG, IMAGES = "wan_nano_video/sft", "wan_nano_video/long_tuning", "wan_nano/sft"
TF = "wan_nano_video/teacher_forcing"
CAUSAL = "student.causal={block_frames: 3, window: 6, positions: reindexed}"
STREAMS = ("sampling.stream_chunks=4", "validation=null")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A video teacher, and six iterations of long tuning of the same network made causal: one stream and a half."""
    made = World.make(tmp_path_factory.mktemp("long") / "world")
    made.train(SFT, "validation=null", iterations=1)
    made.train(LONG, *begins(made), *STREAMS, iterations=6)
    return made


def begins(world: World) -> tuple[str, str]:
    return f"student.init={world.run(SFT).path}", CAUSAL


def test_six_iterations_are_three_a_crash_inside_a_stream_and_three_more(world: World):
    """PITFALLS, resume: every tensor of the checkpoint, carries too, and every row of metrics, bit for bit."""
    whole, crashed = world.run(LONG), world.run("crashed")
    shutil.copytree(whole.path, crashed.path)
    shutil.rmtree(crashed.checkpoints / "iteration-000006")
    world.train(LONG, *begins(world), *STREAMS, iterations=6, into="crashed", resume=True)
    assert_same_bits(tensors(crashed, 6), tensors(whole, 6))
    assert values(crashed) == values(whole)
    assert values(whole)["train", 6]["student/updates"] == 5, "one iteration warms up the critic"


def test_a_checkpoint_inside_a_stream_holds_where_every_batch_stands(world: World):
    """Three chunks of 9, 6 and 6 frames are done at iteration 3; at iteration 6 two chunks of the second stream."""
    for iteration, num_frames in ((3, 21), (6, 15)):
        groups = tensors(world.run(LONG), iteration)
        roles = {"student", "student.optimizer", "critic", "critic.optimizer", "ema"}
        assert set(groups) == {*roles, "carry.0", "carry.1"}
        for slot in (0, 1):
            carry = groups[f"carry.{slot}"]
            assert carry["history"].tolist() == [2, num_frames, 16], "layers, frames, tokens of a frame"
            assert carry["history.0.keys"].shape == (5, 3 * 16, 3, 16), "window less block, of 3 heads of 16"
            assert carry["x0"].shape == (5, 3, 1, 16, 16)
            assert carry["key"].tolist() == [5 * slot + row for row in range(5)]


@pytest.mark.parametrize("causal", ["{block_frames: 3, window: 7, sink: 1}", "{block_frames: 3}"])
def test_a_dry_run_counts_the_memory_of_what_is_carried(world: World, causal: str):
    """Of 2 batches of 5 rows, in two iterations: what a carry holds at its largest, before the last chunk."""
    plan = prepare(world.recipe(LONG, begins(world)[0], f"student.causal={causal}", "sampling.stream_chunks=3"))
    running = assemble(plan)
    for iteration in range(2):
        running.run(iteration)
    layers = [tensor for carry in running.carries.values() for layer in carry.history.layers for tensor in layer]
    gib = 2 * sum(tensor.nbytes for tensor in layers) / 2**30
    assert carried_gib(plan) == pytest.approx(gib, rel=1e-12)
    assert f"carried histories {gib:>18.3f} GiB" in describe(plan)
    assert carried_gib(prepare(world.recipe(SFT))) == 0


def test_exports_and_samples_know_nothing_of_carries(world: World, tmp_path):
    run = world.run(LONG)
    source = open_source(run.path)
    assert source.weights("raw").keys() == source.weights("ema").keys() == tensors(run, 6)["student"].keys()
    export(source, tmp_path / "export")
    assert not list((tmp_path / "export").rglob("*carry*"))
    one, other = (open_source(path) for path in (run.path, tmp_path / "export"))
    assert all(torch.equal(tensor, other.weights()[name]) for name, tensor in one.weights().items())
    for model in (run.path, tmp_path / "export"):
        call("sample", model, "--num", 1, "--frames", 3, "--out", tmp_path / f"{model.name}.gif")
    made = [(tmp_path / f"{name}.gif").read_bytes() for name in (run.path.name, "export")]
    assert made[0] == made[1]


def test_the_rows_of_a_stream_are_those_of_its_first_iteration(world: World):
    running = assemble(prepare(world.recipe(LONG, *begins(world), "sampling.stream_chunks=3")))
    for slot in (0, 1):
        labels = [running.batches.batch(iteration, slot).cond.label.tolist() for iteration in range(4)]
        assert labels[0] == labels[1] == labels[2] != labels[3]


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        (
            LONG,
            ["student.causal=null"],
            ["sampling.stream_chunks = 6", "sees the whole clip at once", "few steps (student.init)"],
        ),
        (LONG, ["sampling.overlap_frames=4"], ["overlap_frames 4", "5 new frames", "blocks of 3", "write 3 or 6"]),
        (LONG, ["sampling.stream_chunks=1"], ["overlap_frames 3", "stream_chunks 1"]),
        (LONG, ["sampling.rolling_blocks=3"], ["stream_chunks 6", "rolling_blocks 3"]),
        (
            "wan_nano_video/teacher_forcing",
            ["sampling.rolling_blocks=3"],
            ["rolling_blocks", "'teacher_forcing'", "write 1"],
        ),
        (IMAGES, ["sampling.stream_chunks=2"], ["sampling.stream_chunks", "method 'sft'", "write 1"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_a_stream_cannot_be_is_refused_by_its_name(
    world: World, name: str, overrides: list[str], words: list[str]
):
    start = begins(world) if name == LONG else ()
    with pytest.raises(UserError) as caught:
        prepare(world.recipe(name, *start, *overrides))
    errors = list(caught.value.errors) if isinstance(caught.value, UserErrors) else [str(caught.value)]
    assert any(all(word in error for word in words) for error in errors), errors


def test_the_adversarial_term_goes_with_streams(world: World):
    settings = ("method.gan={student_weight: 1.0}", "method.critic_warmup_updates=0")
    running = assemble(prepare(world.recipe(LONG, *begins(world), *settings)))
    for iteration in range(2):
        metrics = running.run(iteration)
        assert all(value.isfinite() for value in metrics.values())
        assert metrics["student/gan"] > 0
    assert running.carries[1].history.num_frames == 15
    assert running.optimizers["student"].updates == 2

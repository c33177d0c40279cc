"""Ranks that share the tokens of a row equal one process: gloo on the CPU, six heads, twelve tokens a frame."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fewstep.checkpoint.save import load_checkpoint, save_checkpoint
from fewstep.errors import UserErrors
from fewstep.prepare import prepare
from tests.engines.rank_worker import CPU, ITERATIONS, KEEP, made
from tests.engines.test_ranks import Ended, assert_close, ended_workers
from tests.engines.worlds import copied
from tests.recipes.tiny_runs import World

METHODS = ("sft", "dmd2_fresh_gan", "sid_gan_on_teacher", "teacher_forcing", "consistency", "self_forcing", "streams")
HEADS = 6
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two ranks that share all rows; the streams go on from what one process left in the middle of them."""
    folder = tmp_path_factory.mktemp("divided")
    one = made("streams", heads=HEADS)
    for iteration in range(2):
        one.run(iteration)
    save_checkpoint(folder / "streams" / "begun", 2, one.state(), {}, KEEP)
    return ended_workers(folder, [*METHODS, "compiled", "--sequence", "2"])


def assert_equals_one_process(
    ended: Ended, method: str, heads: int, world: int = 2, device: torch.device = CPU
) -> None:
    assert not any(ended.status), ended.said
    one = made(method, device=device, heads=heads)
    rows = [one.run(iteration) for iteration in range(ITERATIONS)]
    assert_close(ended.state(method), copied(one.state()))
    for rank in range(world):
        seen = ended.seen(method, rank)["rows"]
        for row, expected in zip(seen, rows[-len(seen) :], strict=True):
            assert row == {name: pytest.approx(float(value), rel=1e-9, abs=1e-9) for name, value in expected.items()}
        assert ended.seen(method, rank)["unmoved"] == [name for name in one.roles if name == "teacher"]


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_that_share_the_tokens_of_all_rows_equal_one_process(divided: Ended, method: str):
    """Losses, weights, moments, averages, carries; bidirectional and teacher forcing, histories, features."""
    assert_equals_one_process(divided, method, HEADS)


def test_histories_of_streams_come_back_to_the_last_bit_from_ranks_that_hold_a_part_of_the_heads(divided: Ended):
    begun, again = (
        load_checkpoint(divided.folder / "streams" / name / "iteration-000002") for name in ("begun", "again")
    )
    assert set(begun.groups) == set(again.groups) >= {"carry.0", "carry.1"}
    for group in ("carry.0", "carry.1"):
        found, expected = again.tensors(group), begun.tensors(group)
        assert {name: tensor.tolist() for name, tensor in found.items()} == {
            name: tensor.tolist() for name, tensor in expected.items()
        }


def test_blocks_that_exchange_tokens_compile_into_one_graph_and_equal_the_eager_ones(divided: Ended):
    for rank in (0, 1):
        assert json.loads((divided.folder / "compiled" / f"said-{rank}.json").read_text()) == [1, True]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_that_share_the_tokens_of_all_rows_equal_one(tmp_path: Path):
    """NCCL in place of gloo."""
    ended = ended_workers(tmp_path, ["sft", "dmd2_fresh_gan", "consistency", "--sequence", "2"], device="cuda")
    for method in ("sft", "dmd2_fresh_gan", "consistency"):
        assert_equals_one_process(ended, method, HEADS, device=torch.device("cuda", 0))


@pytest.mark.thorough
def test_four_ranks_two_for_each_row_equal_one_process(tmp_path: Path):
    """Weights are cut over all four, or over two that another two copy."""
    ended = ended_workers(tmp_path, ["dmd2_fresh_gan", "streams", "--sequence", "2", "--replicas", "2"], 4)
    for method in ("dmd2_fresh_gan", "streams"):
        assert_equals_one_process(ended, method, HEADS, 4)


@pytest.mark.thorough
def test_two_groups_of_two_ranks_that_each_hold_all_weights_equal_one_process(tmp_path: Path):
    """``engine.replicas``: gathered and reduced inside a group, reduced once more between the groups."""
    ended = ended_workers(tmp_path, ["sft", "self_forcing", "--replicas", "2"], 4)
    for method in ("sft", "self_forcing"):
        assert_equals_one_process(ended, method, 3, 4)
    parts = [ended.seen("sft", rank)["parts"] for rank in range(4)]
    assert parts[0] == parts[2] != parts[1] == parts[3]


@pytest.mark.parametrize(
    ("world", "overrides", "words"),
    [
        (3, ["engine.sequence=2", "data.batch=6"], ["engine.sequence = 2", "number of processes, 3"]),
        (1, ["engine.sequence=2"], ["engine.sequence = 2", "number of processes, 1"]),
        (4, ["engine.sequence=2", "data.batch=5"], ["data.batch = 5", "multiple of 2", "2 groups of 2 processes"]),
        (2, ["engine.sequence=2"], ["engine.sequence = 2", "divide the 3 heads of student"]),
        (3, ["engine.sequence=3"], ["engine.sequence = 3", "divide the 16 tokens in a frame of student"]),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, overrides: list[str], words: list[str]
):
    for key, value in (("WORLD_SIZE", str(world)), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(key, value)
    with pytest.raises(UserErrors) as caught:
        prepare(World.make(tmp_path / "world").recipe("wan_nano/sft", *overrides))
    assert any(all(word in error for word in words) for error in caught.value.errors), caught.value.errors

"""Two ranks equal one process: gloo on the CPU, FSDP2, real networks whose weights do not divide by two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import torch

from fewstep.checkpoint.save import load_checkpoint, save_checkpoint
from fewstep.models.attention import MASKED_KERNEL
from fewstep.models.wan.causal import CausalWan
from fewstep.models.wan.model import Wan
from fewstep.models.wan.parallelize import METHODS as REGISTERED
from tests.engines.rank_worker import ITERATIONS, KEEP, METHODS, OFFLOADED, made
from tests.engines.worlds import copied

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def started(module: str, arguments: Sequence[str], world: int = 2, **environment: str) -> list[subprocess.Popen[str]]:
    """A process for each rank, told what it is as torchrun tells it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    told |= {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **told, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(world)
    ]


@dataclass(frozen=True)
class Ended:
    """What became of the two workers."""

    folder: Path
    status: list[int]
    said: list[str]

    def seen(self, job: str, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / job / f"seen-{rank}.json").read_text())

    def state(self, job: str, iteration: int = ITERATIONS) -> dict[str, dict[str, torch.Tensor]]:
        checkpoint = load_checkpoint(self.folder / job / f"iteration-{iteration:06d}")
        return {group: checkpoint.tensors(group) for group in checkpoint.groups}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Every method on two ranks, the streams from what one process left in the middle of them; the last job of all is
    one in which rank 1 fails."""
    folder = tmp_path_factory.mktemp("ranks")
    one = made("streams")
    for iteration in range(2):
        one.run(iteration)
    save_checkpoint(folder / "streams" / "begun", 2, one.state(), {}, KEEP)
    return ended_workers(folder, [*METHODS, "copies", "toggled", "first_calls", "raises"])


def ended_workers(folder: Path, jobs: Iterable[str], world: int = 2, device: str = "cpu") -> Ended:
    """Runs the jobs on so many ranks."""
    workers = started("tests.engines.rank_worker", [device, str(folder), *jobs], world)
    try:
        said = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return Ended(folder, [worker.returncode for worker in workers], said)


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for group, named in expected.items():
        assert found[group].keys() == named.keys(), group
        for name, tensor in named.items():
            assert found[group][name].dtype == tensor.dtype
            where = f"{group}: {name}: "
            torch.testing.assert_close(found[group][name], tensor.cpu(), rtol=1e-9, atol=1e-9, msg=where.__add__)


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_equal_one_process(ended: Ended, method: str):
    """Invariants 36, 43, 50 and 51; PITFALLS, ranks."""
    one = made(method)
    start = copied({"ema": one.ema.state()})["ema"]
    rows = [one.run(iteration) for iteration in range(ITERATIONS)]
    found = ended.state(method)
    assert_close(found, copied(one.state()))
    seen = ended.seen(method)["rows"]
    for row, expected in zip(seen, rows[-len(seen) :], strict=True):
        assert row == {name: pytest.approx(float(value), rel=1e-9, abs=1e-9) for name, value in expected.items()}
    assert seen == ended.seen(method, 1)["rows"], "both ranks say the same"
    assert found["student.optimizer"]["exp_avg/blocks.0.self_attention.q.weight"].abs().max() > 1e-9
    assert any(not torch.equal(tensor, start[name]) for name, tensor in found["ema"].items())
    for rank in (0, 1):
        assert ended.seen(method, rank)["unmoved"] == [name for name in one.roles if name == "teacher"]


@pytest.mark.parametrize("method", METHODS)
def test_after_an_iteration_every_weight_is_a_part_again_and_stands_where_the_optimizer_has_it(ended, method):
    for rank in (0, 1):
        seen = ended.seen(method, rank)
        assert seen["gathered"] == []
        assert seen["moved_away"] == []
        assert bool(seen["asleep"]) == (method in OFFLOADED)


def test_ranks_that_each_hold_all_weights_equal_ranks_that_share_them(ended):
    """``engine.replicas``."""
    assert_close(ended.state("copies"), ended.state("sft"))
    for row, expected in zip(ended.seen("copies")["rows"], ended.seen("sft")["rows"], strict=True):
        assert row == {name: pytest.approx(value, rel=1e-9, abs=1e-9) for name, value in expected.items()}
    assert ended.seen("copies", 1)["parts"]["blocks.0.modulation"] == [1, 6, 48]


def test_each_rank_holds_its_part_of_weights_that_do_not_divide(ended):
    parts = [ended.seen("sft", rank)["parts"] for rank in (0, 1)]
    whole = {name: tensor.shape for name, tensor in ended.state("sft")["student"].items()}
    for name, shape in whole.items():
        assert parts[0][name][0] + parts[1][name][0] == shape[0]
        assert parts[0][name][0] == -(-shape[0] // 2)
    assert parts[1]["blocks.0.modulation"] == [0, 6, 48], "one row, which rank 0 has"


def test_what_one_process_saved_comes_back_to_the_last_bit_from_two_ranks(ended):
    """PITFALLS, resume: the carries of streams too, whose rows are on different ranks."""
    begun = load_checkpoint(ended.folder / "streams" / "begun" / "iteration-000002")
    again = load_checkpoint(ended.folder / "streams" / "again" / "iteration-000002")
    assert set(begun.groups) == set(again.groups) >= {"carry.0", "carry.1", "ema", "critic.optimizer"}
    for group in begun.groups:
        found, expected = again.tensors(group), begun.tensors(group)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), f"{group}: {name}"


@pytest.mark.parametrize("method", ["dmd2_fresh_gan", "consistency"])
def test_one_process_goes_on_from_what_two_ranks_saved(ended, method):
    whole, resumed = made(method), made(method)
    for iteration in range(ITERATIONS + 1):
        whole.run(iteration)
    resumed.load(ended.state(method))
    resumed.run(ITERATIONS)
    assert_close(copied(resumed.state()), copied(whole.state()))


def test_a_network_that_ran_frozen_and_is_trained_later_gets_no_wrong_gradient(ended):
    """FSDP2 decides at the first call what is trained, and older versions raise here: roles are frozen or trained for
    ever."""
    for rank in (0, 1):
        said = (ended.folder / "toggled" / f"said-{rank}.txt").read_text()
        assert said == "right" or "Error" in said


def test_every_public_method_may_be_the_first_that_a_network_cut_over_ranks_runs(ended):
    """FSDP2 gathers weights for the methods that it was told of alone; one that it does not know fails as the first
    call, and works after any other."""
    of_causal = {name for kind in (Wan, CausalWan) for name, made in vars(kind).items() if isfunction(made)}
    public = {name for name in of_causal if not name.startswith("_")} - {"initialise", "drawn"}
    assert public == set(REGISTERED)
    for rank in (0, 1):
        said = json.loads((ended.folder / "first_calls" / f"said-{rank}.json").read_text())
        assert said == dict.fromkeys(REGISTERED, "right")


@pytest.mark.parametrize("method", METHODS)
def test_a_role_is_trainable_or_frozen_for_ever(ended, method):
    """So that none is trained after it ran frozen."""
    for rank in (0, 1):
        assert ended.seen(method, rank)["trainable"] == list(METHODS[method]().trained)


def test_a_rank_that_fails_ends_the_other_which_names_it(ended):
    assert all(ended.status)
    assert "ValueError: no more rows" in ended.said[1]
    last = ended.said[0].strip().splitlines()[-1]
    assert "RankError: rank 0 of 2 on" in last
    assert "stops: rank 1 of 2 on" in last
    assert "failed: ValueError: no more rows" in last


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_equal_one(tmp_path: Path, monkeypatch):
    """NCCL in place of gloo."""
    monkeypatch.setitem(MASKED_KERNEL, "cuda", "dense")
    ended = ended_workers(tmp_path, METHODS, device="cuda")
    assert not any(ended.status), ended.said
    for method in METHODS:
        one = made(method, device=torch.device("cuda", 0))
        for iteration in range(ITERATIONS):
            one.run(iteration)
        assert_close(ended.state(method), copied(one.state()))

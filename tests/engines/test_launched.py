"""``fewstep train`` on two ranks: the run folder, a stop, resuming on one process, and what is refused."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from fewstep.checkpoint.save import load_checkpoint, newest_complete
from fewstep.engines.mesh import Ranks, join
from fewstep.errors import UserError, UserErrors
from fewstep.observe.sinks import read_rows
from fewstep.prepare import prepare
from tests.engines.test_ranks import started
from tests.recipes.tiny_runs import World, tensors, values

SFT, DMD2 = "wan_nano/sft", "wan_nano/dmd2"
EXACT = ("data.batch=4", "engine.precision=float64", "checkpoint.every=1000")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path / "world")


@pytest.mark.usefixtures("unchecked_shapes")
def test_two_ranks_go_on_from_one_process_stop_together_and_one_process_goes_on(world: World):
    """PITFALLS, hangs: a stop asked of rank 1 stops both at the same iteration, and they save. The weights are those of
    one process to 1e-9, and so are the samples of validations, which all ranks made and the first one judged."""
    more = (*EXACT, "validation.every=2", "name=two", "student.schedule={}")
    run = world.train(SFT, *more, iterations=1, into="two")
    ranks = started("fewstep", ["train", "--resume", str(run.path), "iterations=1000000"])
    try:
        wait_for_validation(run.metrics, 2, ranks)
        ranks[1].send_signal(signal.SIGTERM)
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [130, 130], said
    assert "Checkpoint saved. Go on with: torchrun --nproc-per-node 2 -m fewstep train --resume" in said[0]
    assert "Checkpoint saved" not in said[1]
    newest = newest_complete(run.checkpoints)
    assert newest is not None
    done = load_checkpoint(newest).iteration
    assert max(row.iteration for row in read_rows(run.metrics)) == done
    world.train(SFT, *more, iterations=done + 1, into="two", resume=True)
    whole = world.train(SFT, *more, iterations=done + 1, into="whole")
    found, expected = tensors(run, done + 1), tensors(whole, done + 1)
    for group in ("student", "ema"):
        for name, tensor in expected[group].items():
            torch.testing.assert_close(found[group][name], tensor, rtol=1e-9, atol=1e-9)
    judged = {key: row for key, row in values(whole).items() if key[0] == "validation"}
    assert {("validation", 2), ("validation", done + 1)} <= judged.keys()
    for key, row in judged.items():
        assert values(run)[key] == {name: pytest.approx(value, rel=1e-4) for name, value in row.items()}


def wait_for_validation(metrics: Path, iteration: int, ranks: list[subprocess.Popen[str]]) -> None:
    until = time.monotonic() + 90
    while not any(row.kind == "validation" and row.iteration == iteration for row in read_rows(metrics)):
        assert time.monotonic() < until, f"no validation at {iteration}"
        assert all(rank.poll() is None for rank in ranks), [rank.communicate()[0] for rank in ranks]
        time.sleep(0.1)


@pytest.mark.faults
def test_a_rank_that_stalls_is_named_when_the_time_is_up():
    """PITFALLS, hangs: a timeout that names the rank."""
    ranks = started("tests.engines.stalled", [])
    try:
        said = ranks[0].communicate(timeout=60)[0]
        assert ranks[0].returncode
        assert "RankError: rank 0 of 2" in said
        assert "rank 1 no longer answers" in said
    finally:
        ranks[1].kill()
        ranks[1].communicate()


def test_a_rank_whose_process_is_stopped_is_found_by_its_silence_long_before_the_time_is_up():
    """PITFALLS, hangs: what waits in a collective is ended with a word, and need not wait for its end."""
    ranks = started("tests.engines.stalled", ["stopped"])
    try:
        said = ranks[0].communicate(timeout=90)[0]
        assert ranks[0].returncode == 1
        assert "rank 0 of 2" in said
        assert "rank 1 gives no sign of life: its process is stopped, or its machine gone\nStart again." in said
    finally:
        ranks[1].kill()
        ranks[1].communicate()


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        (SFT, ["data.batch=5"], ["data.batch = 5", "multiple of 3", "3 processes"]),
        (SFT, ["data.batch=6", "engine.replicas=2"], ["engine.replicas = 2", "processes, 3"]),
    ],
)
def test_what_cannot_be_cut_over_the_ranks_is_refused(world: World, monkeypatch, name, overrides, words):
    for key, value in (("WORLD_SIZE", "3"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(key, value)
    with pytest.raises(UserErrors) as caught:
        prepare(world.recipe(name, *overrides))
    assert any(all(word in error for word in words) for error in caught.value.errors)


def test_a_launcher_that_says_half_is_refused(monkeypatch):
    assert Ranks.launched() == Ranks(0, 1, 0)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Ranks.launched() == Ranks(0, 1, 0), "by whatever else sets it"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="RANK or LOCAL_RANK is not"):
        Ranks.launched()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert Ranks.launched() == Ranks(1, 2, 0)
    for world, rank in (("0", "0"), ("-2", "0"), ("2", "2"), ("2", "-1")):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(UserError, match=f"RANK = {rank}, WORLD_SIZE = {world}"):
            Ranks.launched()


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, ["MASTER_ADDR:MASTER_PORT = (unset):(unset)", "start all ranks by torchrun"]),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "abc"}, ["localhost:abc"]),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}, ["rank 0 of 2", "within 1 s"]),
    ],
)
def test_ranks_that_do_not_find_each_other_say_where_they_looked(monkeypatch, told, words):
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in {**told, "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    with (
        pytest.raises(UserError) as caught,
        join(Ranks.launched(), torch.device("cpu"), timeout_s=1.0),
    ):
        pass
    assert all(word in str(caught.value) for word in words)

"""Bytes of weights, moments and average against the tensors of a real engine; what a rank keeps, and how long phases
take, as a run logs them."""

from __future__ import annotations

import time

import pytest
import torch

from fewstep.costs.states import counts_of, state_of
from fewstep.engines.stopwatch import MIB, Stopwatch, memory, memory_of_roles
from tests.costs.test_work import sizes
from tests.engines.worlds import dmd2, engine


def test_the_states_of_roles_are_those_of_the_assembled_engine():
    """To the byte, but for the counters of steps, which the count leaves out."""
    method = dmd2()
    world, found = engine(method), sizes(method)
    world.run(0)
    for name, count in counts_of(found).items():
        state = state_of(name, count.all, found[name].trained, torch.float32)
        role = world.roles[name]
        assert state.weights == sum(p.nbytes for p in role.network.parameters())
        if found[name].trained:
            moments = {key: t for key, t in world.optimizers[name].state().items() if t.ndim}
            assert state.optimizer == sum(t.nbytes for t in moments.values())
            assert state.gradients == state.weights
    assert state_of("student", 7, True, torch.bfloat16).ema == 28
    average = sum(t.nbytes for t in world.ema.state().values())
    assert state_of("student", counts_of(found)["student"].all, True, torch.float32).ema == average


def test_a_rank_keeps_its_part():
    state = state_of("student", 8, True, torch.bfloat16).cut(4)
    assert (state.weights, state.gradients, state.optimizer, state.ema) == (8, 8, 16, 8)
    assert state.kept == 32


def test_a_frozen_role_is_kept_in_the_precision_that_it_computes_in():
    assert state_of("teacher", 5, False, torch.bfloat16).kept == 10
    assert state_of("teacher", 5, False, torch.float32).kept == 20


def test_gauges_name_every_phase_and_the_memory_of_every_role():
    method = dmd2()
    world = engine(method)
    for iteration in range(2):
        world.run(iteration)
    found = world.gauges()
    kinds = {name.removeprefix("phase/time_s.") for name in found if name.startswith("phase/")}
    assert kinds == {"data", "rollout", "critic", "scores", "student"}
    assert all(found[f"phase/time_s.{kind}"] > 0 for kind in kinds)
    assert found["memory/peak_mib"] > 1
    weights = sum(p.nbytes for p in world.roles["teacher"].network.parameters())
    assert found["teacher/weights_mib"] == weights / MIB
    assert "teacher/optimizer_mib" not in found
    assert found["student/ema_mib"] == found["student/weights_mib"]
    assert found["critic/optimizer_mib"] == pytest.approx(2 * found["critic/weights_mib"], rel=1e-2)


def test_laps_are_means_over_iterations_and_are_read_once():
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        watch.lap("rollout")
        time.sleep(0.02)
        watch.lap("critic")
        watch.lap(None)
        watch.iterations += 1
        time.sleep(0.03)
    found = watch.read()
    assert found.keys() == {"rollout", "critic"}
    assert 0.02 <= found["rollout"] < 0.03 + 0.5
    assert found["critic"] < found["rollout"]
    assert watch.read() == {}


def test_a_role_that_is_another_one_seen_differently_has_no_memory_of_its_own():
    world = engine(dmd2())
    roles = {"student": world.roles["student"], "ema": world.roles["student"]}
    assert set(memory_of_roles(roles, {})) == {"student/weights_mib"}


@pytest.mark.gpu
def test_a_gpu_says_what_it_holds():
    device = torch.device("cuda")
    kept = torch.empty(3 * MIB, dtype=torch.uint8, device=device)
    found = memory(device)
    assert found["memory/peak_mib"] >= found["memory/allocated_mib"] >= kept.nbytes / MIB

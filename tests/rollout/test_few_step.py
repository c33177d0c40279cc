"""The rollout: one loop for the sampler and for training, walked step by step with a real network."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fewstep.errors import UserError
from fewstep.flow.sigmas import ladder
from fewstep.models.wan.conditioner import LabelCond
from fewstep.models.wan.model import Wan
from fewstep.records import Batch, Rollout
from fewstep.rng import Draw
from fewstep.rollout.few_step import FewStep, SamplingSection
from fewstep.rollout.sampler import sampler_of
from tests.methods.gaussian import AffineModel, new_affine_model
from tests.models.tiny import LABELS, randomise, tiny_section

SHAPE = (1, 4, 6, 8)
SIGMAS = (1.0, 0.9, 0.6)
COND, UNCOND = LabelCond(torch.tensor([3, 0, 4, 1, 2])), LabelCond(torch.full((5,), 5))


class CountingWan(Wan):
    """Keeps the number of rows and the noise levels of every call."""

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        self.asked.append((len(x_t), sigma.unique().tolist()))
        return super().velocity(x_t, sigma, cond)


class CountingAffine(AffineModel):
    calls = 0

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: object) -> Tensor:
        self.calls += 1
        return super().velocity(x_t, sigma, cond)


def wan(dtype: torch.dtype = torch.float64) -> CountingWan:
    network = CountingWan(tiny_section(LABELS, layers=2))
    network.asked = []  # type: ignore[assignment]
    return randomise(network, 1).to(dtype)  # type: ignore[return-value]


def draw(iteration: int = 0, rows: int = 5) -> Draw:
    return Draw(seed=3, phase="rollout.0", iteration=iteration, key=torch.arange(rows))


def batch(rows: int = 5) -> Batch:
    return Batch(torch.arange(rows), None, COND, UNCOND)


def sampler(solver: Any = "renoise", dtype: torch.dtype = torch.float64, **settings: Any) -> FewStep:
    return FewStep(SIGMAS, solver, SHAPE, dtype=dtype, **settings)


def iteration_that_stops_at(stop: int) -> int:
    return next(i for i in itertools.count() if draw(i).shared_index("stop", len(SIGMAS)) == stop)


@pytest.mark.parametrize("solver", ["renoise", "ode"])
@torch.no_grad()
def test_samples_walk_the_ladder_by_the_solvers_formula(solver):
    model, found = wan(), None
    found = sampler(solver).sample(model, COND, None, draw())
    x = draw().normal("noise", SHAPE, dtype=torch.float64)
    for step, (sigma, following) in enumerate(itertools.pairwise((*SIGMAS, 0.0))):
        velocity = model.velocity(x, torch.full((5, 1), sigma, dtype=torch.float64), COND)
        before, x0 = x, x - sigma * velocity
        if solver == "ode":
            x = x + (following - sigma) * velocity
        elif following:
            fresh = draw().normal(f"renoise.{step}", SHAPE, dtype=torch.float64)
            x = (1 - following) * x0 + following * fresh
    torch.testing.assert_close(found.x0, x0, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.x_stop, before, rtol=1e-12, atol=1e-12)
    assert found.stop == 2
    assert torch.equal(found.sigma_stop, torch.full((5, 1), 0.6, dtype=torch.float64))


@torch.no_grad()
def test_every_step_adds_fresh_noise():
    noises = [draw().normal(name, SHAPE) for name in ("noise", "renoise.0", "renoise.1")]
    for one, other in itertools.combinations(noises, 2):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 0.15


@torch.no_grad()
def test_a_ladder_of_one_step_is_one_call_at_pure_noise():
    model = wan()
    found = FewStep((1.0,), "renoise", SHAPE, dtype=torch.float64).sample(model, COND, None, draw())
    noise = draw().normal("noise", SHAPE, dtype=torch.float64)
    assert torch.equal(found.x_stop, noise)
    assert model.asked == [(5, [1.0])]
    torch.testing.assert_close(found.x0, noise - model.velocity(noise, torch.ones(5, 1, dtype=torch.float64), COND))


@torch.no_grad()
def test_a_training_rollout_that_stops_at_the_last_step_is_the_sampler_to_the_last_bit():
    """Invariant 37; PITFALLS, sampling differs from training: one loop, one ladder, one solver."""
    model, iteration = wan(torch.float32), iteration_that_stops_at(2)
    trained = sampler(dtype=torch.float32)(model, batch(), draw(iteration))
    sampled = sampler(dtype=torch.float32).sample(model, COND, UNCOND, draw(iteration))
    assert trained.stop == sampled.stop == 2
    assert torch.equal(trained.x0, sampled.x0)
    assert torch.equal(trained.x_stop, sampled.x_stop)


@pytest.mark.parametrize("stop", [0, 1, 2])
@torch.no_grad()
def test_a_training_rollout_never_runs_past_its_stop(stop):
    """Invariant 35: stop + 1 calls, at the ladder's noise levels down to that of the stop."""
    model = wan(torch.float32)
    found = sampler(dtype=torch.float32)(model, batch(), draw(iteration_that_stops_at(stop)))
    assert found.stop == stop
    levels = [[torch.tensor(sigma, dtype=torch.float32).item()] for sigma in SIGMAS]
    assert model.asked == [(5, level) for level in levels[: stop + 1]]
    assert found.sigma_stop.dtype == torch.float32
    assert found.sigma_stop.tolist() == [levels[stop]] * 5


@torch.no_grad()
def test_all_stops_are_alike_over_many_iterations_and_each_costs_its_own_calls():
    model = CountingAffine()
    rollout = FewStep(ladder(4, 5.0), "renoise", (1, 1, 2, 2))
    stops: Counter[int] = Counter()
    for iteration in range(200):
        model.calls = 0
        found = rollout(model, Batch(torch.arange(3), None, None, None), draw(iteration, rows=3))
        assert model.calls == found.stop + 1
        stops[found.stop] += 1
    assert sorted(stops) == [0, 1, 2, 3]
    statistic = sum((count - 50) ** 2 / 50 for count in stops.values())
    assert statistic < 11.3, stops  # chi squared with 3 degrees of freedom, 99 %


def test_the_stop_is_the_same_for_every_piece_of_the_batch():
    """Invariant 36: it does not depend on the rows, so ranks and micro-batches agree."""
    model, rollout = new_affine_model(0), FewStep(ladder(4, 1.0), "renoise", (1, 1, 2, 2))
    for iteration in range(20):
        whole = draw(iteration)
        pieces = [whole.rows(slice(0, 2)), whole.rows(slice(2, 5)), dataclasses.replace(whole, key=torch.tensor([77]))]
        stops = {rollout(model, Batch(piece.key, None, None, None), piece).stop for piece in (whole, *pieces)}
        assert len(stops) == 1


@torch.no_grad()
def test_a_sample_is_a_function_of_its_key_alone():
    """PITFALLS, ranks: no row's noise depends on its batch mates, and no two rows share one."""
    model = wan()
    whole = sampler().sample(model, COND, None, draw()).x0
    index = torch.tensor([4, 1])
    some = sampler().sample(model, LabelCond(COND.label[index]), None, draw().rows(index)).x0
    torch.testing.assert_close(some, whole[index], rtol=1e-12, atol=1e-12)
    assert not torch.isclose(whole[:1], whole[1:], atol=1e-3).flatten(1).all(1).any()


@torch.no_grad()
def test_the_training_rollout_is_unguided_whatever_the_samplers_guidance():
    iteration = iteration_that_stops_at(1)
    plain, guided = sampler(), sampler(guidance_scale=3.0)
    model = wan()
    found = guided(model, batch(), draw(iteration))
    assert [rows for rows, _ in model.asked] == [5, 5]
    assert torch.equal(found.x0, plain(model, batch(), draw(iteration)).x0)


@torch.no_grad()
def test_a_guided_sample_follows_the_guided_velocity_in_one_call_a_step():
    model = wan()
    found = sampler("ode", guidance_scale=3.0).sample(model, COND, UNCOND, draw())
    assert [rows for rows, _ in model.asked] == [10, 10, 10]
    x = draw().normal("noise", SHAPE, dtype=torch.float64)
    for sigma, following in itertools.pairwise((*SIGMAS, 0.0)):
        level = torch.full((5, 1), sigma, dtype=torch.float64)
        cond, uncond = model.velocity(x, level, COND), model.velocity(x, level, UNCOND)
        x = x + (following - sigma) * (uncond + 3.0 * (cond - uncond))
    torch.testing.assert_close(found.x0, x, rtol=1e-11, atol=1e-11)


def test_x0_can_be_computed_again_with_a_gradient_that_reaches_the_first_block():
    model, rollout = wan(), sampler()
    with torch.no_grad():
        found = rollout(model, batch(), draw(iteration_that_stops_at(1)))
    again = rollout.again(model, found, batch())
    torch.testing.assert_close(again, found.x0, rtol=1e-12, atol=1e-12)
    again.square().mean().backward()
    gradient = model.blocks[0].self_attention.q.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 1e-6


# --- rollouts from elsewhere ------------------------------------------------------------------------------------------


def foreign(stop: int = 1, sigma: float = 0.9) -> Rollout:
    latents = torch.zeros(5, *SHAPE)
    return Rollout(torch.arange(5), stop, latents, torch.full((5, 1), sigma), latents)


def test_a_rollout_that_stands_where_it_says_is_accepted():
    for stop, sigma in enumerate(SIGMAS):
        rollout = foreign(stop, sigma)
        assert sampler(dtype=torch.float32).accept(rollout) is rollout


@pytest.mark.parametrize(
    "rollout",
    [foreign(1, 0.6), foreign(0, 0.9), foreign(1, 0.8999), foreign(3, 0.3), foreign(-1, 0.6), foreign(1, torch.nan)],
    ids=["past its stop", "past step 0", "another ladder", "no such step", "counted from the end", "no sigma"],
)
def test_a_rollout_that_stands_elsewhere_is_refused(rollout):
    with pytest.raises(ValueError, match=rf"stopped at step {rollout.stop} .*\[1\.0, 0\.9, 0\.6\]"):
        sampler(dtype=torch.float32).accept(rollout)


def test_one_row_that_stands_elsewhere_is_enough():
    rollout = foreign()
    rollout.sigma_stop[3] = 0.6
    with pytest.raises(ValueError, match="stands at"):
        sampler(dtype=torch.float32).accept(rollout)


# --- the recipe section -----------------------------------------------------------------------------------------------


def test_steps_and_shift_give_the_published_ladder():
    assert SamplingSection(steps=4, shift=5.0).resolved() == pytest.approx((1, 0.9375, 0.83333, 0.625), abs=5e-6)
    assert SamplingSection(steps=2, shift=5.0).resolved() == pytest.approx((1, 0.83333), abs=5e-6)
    assert SamplingSection(steps=1, shift=5.0).resolved() == (1.0,)


def test_given_sigmas_are_never_shifted_again():
    """PITFALLS, shift: applied once."""
    section = SamplingSection(sigmas=SIGMAS, shift=5.0)
    assert section.resolved() == SIGMAS
    assert FewStep.of(section, SHAPE).sigmas == SIGMAS


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"steps": 4, "sigmas": SIGMAS},
        {"sigmas": ()},
        {"sigmas": (0.9, 0.5)},
        {"sigmas": (1.0, 0.5, 0.5)},
        {"sigmas": (1.0, 0.5, 0.7)},
        {"sigmas": (1.0, 0.5, 0.0)},
        {"steps": 0},
        {"steps": 4, "shift": 0.0},
        {"steps": 4, "solver": "euler"},
        {"steps": 4, "guidance_scale": -1.0},
    ],
)
def test_a_ladder_that_cannot_be_walked_is_refused(values):
    with pytest.raises(ValidationError):
        SamplingSection(**values)


def test_another_number_of_steps_is_from_1_to_1000():
    section = SamplingSection(steps=4, shift=2.0)
    assert len(section.with_steps(1000).resolved()) == 1000
    for steps in (0, 1001):
        with pytest.raises(UserError, match=f"^steps = {steps}: write a number from 1 to 1000$"):
            section.with_steps(steps)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"first_block_steps": 3}, "first_block_steps = 3: .* write null, or give the network a causal section"),
        ({"given_frames": 2}, "given_frames = 2: .* write 0, or"),
        ({"stop": "block"}, "stop = block: .* write shared, or"),
    ],
)
def test_what_only_causal_networks_follow_is_refused_with_what_a_recipe_writes_instead(setting, message):
    with pytest.raises(UserError, match="sampling." + message):
        sampler_of(SamplingSection(steps=4, **setting), (4, 3, 2, 2), None)


def test_the_trained_number_of_steps_is_the_trained_sampler():
    section = SamplingSection(sigmas=SIGMAS, shift=2.0, solver="ode", guidance_scale=2.5)
    assert section.with_steps(3) is section
    other = section.with_steps(2)
    assert other.resolved() == ladder(2, 2.0)
    assert (other.solver, other.guidance_scale) == ("ode", 2.5)

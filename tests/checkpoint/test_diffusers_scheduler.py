"""The exported scheduler against diffusers' own class."""

from __future__ import annotations

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from fewstep.checkpoint.diffusers_scheduler import scheduler_config
from fewstep.flow.sigmas import ladder
from fewstep.flow.solvers import ode, renoise


def scheduler_of(sigmas: tuple[float, ...], solver: str) -> tuple[FlowMatchEulerDiscreteScheduler, bool]:
    config, by_itself = scheduler_config(sigmas, solver)
    return FlowMatchEulerDiscreteScheduler.from_config(config), by_itself


@pytest.mark.parametrize("shift", [0.4, 1.0, 3.0, 5.0, 12.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 8, 20, 50])
def test_the_number_of_steps_gives_the_trained_ladder(steps: int, shift: float):
    """PITFALLS: shift. Every call sees t = 1000 sigma, and sigma is the trained one to 1e-6."""
    sigmas = ladder(steps, shift)
    scheduler, by_itself = scheduler_of(sigmas, "ode")
    assert by_itself
    scheduler.set_timesteps(steps)
    torch.testing.assert_close(scheduler.sigmas.double(), torch.tensor([*sigmas, 0.0]).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(scheduler.timesteps.double(), 1000 * torch.tensor(sigmas).double(), rtol=0, atol=1e-3)


@settings(max_examples=50)
@given(st.integers(1, 60), st.floats(0.05, 20))
def test_settings_that_are_claimed_to_give_the_ladder_do(steps: int, shift: float):
    sigmas = ladder(steps, shift)
    scheduler, by_itself = scheduler_of(sigmas, "renoise")
    if by_itself:
        scheduler.set_timesteps(steps)
    else:
        scheduler.set_timesteps(sigmas=list(sigmas))
    torch.testing.assert_close(scheduler.sigmas.double(), torch.tensor([*sigmas, 0.0]).double(), rtol=0, atol=1.2e-6)


def test_noise_levels_of_no_ladder_are_passed_and_then_run_as_they_are():
    sigmas = (1.0, 0.9, 0.4, 0.2)
    scheduler, by_itself = scheduler_of(sigmas, "ode")
    assert not by_itself
    scheduler.set_timesteps(sigmas=list(sigmas))
    torch.testing.assert_close(scheduler.sigmas, torch.tensor([*sigmas, 0.0]), rtol=0, atol=1e-7)
    assert torch.equal(scheduler.timesteps, 1000 * scheduler.sigmas[:-1])


@pytest.mark.parametrize("solver", ["ode", "renoise"])
def test_its_steps_are_the_steps_of_the_solver(solver: str):
    """The whole walk, with a velocity that depends on state and noise level, and the scheduler's own noise."""
    sigmas = ladder(4, 5.0)
    scheduler, _ = scheduler_of(sigmas, solver)
    scheduler.set_timesteps(4)
    theirs = ours = torch.randn(2, 3, 1, 5, 4)
    drawing, drawn = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)

    def velocity(x_t: torch.Tensor, sigma: float) -> torch.Tensor:
        return torch.sin(3 * x_t) + sigma * x_t

    for timestep, sigma, sigma_next in zip(scheduler.timesteps, sigmas, (*sigmas[1:], 0.0), strict=True):
        theirs = scheduler.step(velocity(theirs, sigma), timestep, theirs, generator=drawing).prev_sample
        level, level_next = (torch.full((2, 3), value) for value in (sigma, sigma_next))
        if solver == "ode":
            ours = ode(ours, velocity(ours, sigma), level, level_next)
        else:
            ours = renoise(ours, velocity(ours, sigma), level, level_next, torch.randn(ours.shape, generator=drawn))
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)

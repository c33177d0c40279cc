"""The two solvers: exact ends, closed forms, and frames that do not meet."""

import math
from itertools import pairwise

import pytest
import torch

from fewstep.flow.path import add_noise, x0_from_velocity
from fewstep.flow.sigmas import grid, ladder
from fewstep.flow.solvers import ode, renoise

SHAPE = (3, 5, 2, 3, 4)


def latents(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def level(value: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full(like.shape[:2], value, dtype=like.dtype)


def descending(seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Another pair sigma > sigma_next for every frame."""
    pairs = torch.rand(2, *SHAPE[:2], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return pairs.amax(0), pairs.amin(0)


def test_one_step_follows_the_formulas():
    x_t, v, noise, (sigma, sigma_next) = latents(0), latents(1), latents(2), descending()
    wide, wide_next = sigma[..., None, None, None], sigma_next[..., None, None, None]
    expected = (1 - wide_next) * (x_t - wide * v) + wide_next * noise
    torch.testing.assert_close(renoise(x_t, v, sigma, sigma_next, noise), expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(ode(x_t, v, sigma, sigma_next), x_t + (wide_next - wide) * v, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_last_step_returns_x0(dtype: torch.dtype):
    """Both solvers, to the last bit, whatever the noise."""
    x_t, v, noise = latents(0, dtype), latents(1, dtype), latents(2, dtype)
    sigma = descending()[0].to(torch.promote_types(dtype, torch.float32))
    x0 = x0_from_velocity(x_t, v, sigma)
    assert torch.equal(renoise(x_t, v, sigma, torch.zeros_like(sigma), noise), x0)
    assert torch.equal(ode(x_t, v, sigma, torch.zeros_like(sigma)), x0)


def test_a_step_of_no_length_stays_where_it_is():
    x_t, v, (sigma, _) = latents(0), latents(1), descending()
    assert torch.equal(ode(x_t, v, sigma, sigma), x_t)


def test_mixed_levels_equal_separate_calls():
    """Invariant 6: a step is per element, to the last bit."""
    x_t, v, noise, (sigma, sigma_next) = latents(0), latents(1), latents(2), descending()
    euler, renoised = ode(x_t, v, sigma, sigma_next), renoise(x_t, v, sigma, sigma_next, noise)
    for b in range(SHAPE[0]):
        for f in range(SHAPE[1]):
            here = (slice(b, b + 1), slice(f, f + 1))
            assert torch.equal(ode(x_t[here], v[here], sigma[here], sigma_next[here]), euler[here])
            alone = renoise(x_t[here], v[here], sigma[here], sigma_next[here], noise[here])
            assert torch.equal(alone, renoised[here])


@pytest.mark.parametrize(("num_nodes", "s"), [(48, 5.0), (7, 1.0), (1, 3.0)])
def test_euler_over_the_grid_with_a_constant_velocity_subtracts_it_once(num_nodes: int, s: float):
    """Invariant 5."""
    start, v = latents(0), latents(1)
    x_t, nodes = start, [*grid(num_nodes, s), 0.0]
    for sigma, sigma_next in pairwise(nodes):
        x_t = ode(x_t, v, level(sigma, x_t), level(sigma_next, x_t))
    torch.testing.assert_close(x_t, start - v, rtol=0, atol=1e-13)


def test_one_data_point_is_reached_exactly_from_any_noise():
    """Invariant 40, the sampler: one data point c gives v = (x - c) / sigma, and states on the straight path."""
    c, noise = latents(3), latents(4)
    nodes = [*grid(48, 5.0), 0.0]
    x_t = noise
    for sigma, sigma_next in pairwise(nodes):
        torch.testing.assert_close(x_t, add_noise(c, noise, level(sigma, c)), rtol=0, atol=1e-12)
        x_t = ode(x_t, (x_t - c) / sigma, level(sigma, c), level(sigma_next, c))
    torch.testing.assert_close(x_t, c, rtol=0, atol=1e-12)


def gaussian_velocity(x_t: torch.Tensor, sigma: float, std: float = 1.0) -> torch.Tensor:
    """E[noise - x0 | x_t] for x0 ~ N(0, std^2): a multiple of x_t."""
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    return (sigma - (1 - sigma) * std**2) / variance * x_t


def gaussian_endpoint(num_nodes: int, std: float = 1.0) -> float:
    """Where Euler over the grid at shift 5, with the last step to 0, takes noise of value 1."""
    x_t = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)
    nodes = [*grid(num_nodes, 5.0), 0.0]
    for sigma, sigma_next in pairwise(nodes):
        x_t = ode(x_t, gaussian_velocity(x_t, sigma, std), level(sigma, x_t), level(sigma_next, x_t))
    return x_t.item()


def test_euler_on_gaussian_data_ends_at_the_known_deviations():
    """Invariant 42: data N(0, 1), shift 5: .9484 after 48 steps and .9868 after 192, of the exact 1."""
    assert gaussian_endpoint(48) == pytest.approx(0.9484, abs=5e-5)
    assert gaussian_endpoint(192) == pytest.approx(0.9868, abs=5e-5)


@pytest.mark.parametrize("std", [0.5, 1.0, 2.0])
def test_euler_on_gaussian_data_converges_to_the_data_at_first_order(std: float):
    """The exact flow takes 1 to std; the error of Euler halves with the step."""
    errors = [abs(gaussian_endpoint(num_nodes, std) - std) for num_nodes in (200, 400, 800)]
    assert errors[-1] < 0.02 * std
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.05)


def test_renoising_gaussian_data_ends_at_the_closed_form():
    """Every fresh noise is a basis vector of its own, so the deviation of the endpoint is the length of the result."""
    sigmas = ladder(4, 5.0)
    basis = torch.eye(len(sigmas), dtype=torch.float64).view(len(sigmas), 1, 1, len(sigmas), 1, 1)
    x_t, variance = basis[0], 1.0
    for step, sigma in enumerate(sigmas):
        sigma_next = sigmas[step + 1] if step + 1 < len(sigmas) else 0.0
        fresh = basis[(step + 1) % len(sigmas)]
        x_t = renoise(x_t, gaussian_velocity(x_t, sigma), level(sigma, x_t), level(sigma_next, x_t), fresh)
        regression = (1 - sigma) / ((1 - sigma) ** 2 + sigma**2)
        variance = (1 - sigma_next) ** 2 * regression**2 * variance + sigma_next**2
    assert x_t.norm().item() == pytest.approx(math.sqrt(variance), rel=1e-12)

"""The path between data and noise, in float64 against its formulas."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewstep.flow.path import add_noise, noise_from_velocity, velocity, velocity_from_x0, x0_from_velocity

SHAPE = (3, 5, 2, 3, 4)


def latents(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def mixed_sigma(seed: int = 7, low: float = 0.0) -> torch.Tensor:
    """Another noise level for every frame of every sample, both ends among them."""
    sigma = torch.rand(SHAPE[:2], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sigma = low + (1 - low) * sigma
    sigma[0, 1], sigma[2, 4] = low, 1.0
    return sigma


def test_noised_latents_follow_the_formula_frame_by_frame():
    x0, noise, sigma = latents(0), latents(1), mixed_sigma()
    x_t = add_noise(x0, noise, sigma)
    for b in range(SHAPE[0]):
        for f in range(SHAPE[1]):
            s = sigma[b, f].item()
            torch.testing.assert_close(x_t[b, f], (1 - s) * x0[b, f] + s * noise[b, f], rtol=0, atol=1e-15)


def test_x0_and_noise_come_back_from_the_noised_latents_and_the_velocity():
    """Invariant 3: the round trip with another sigma for every frame."""
    x0, noise, sigma = latents(0), latents(1), mixed_sigma()
    x_t, v = add_noise(x0, noise, sigma), velocity(x0, noise)
    assert torch.equal(v, noise - x0)
    torch.testing.assert_close(x0_from_velocity(x_t, v, sigma), x0, rtol=0, atol=1e-14)
    torch.testing.assert_close(noise_from_velocity(x_t, v, sigma), noise, rtol=0, atol=1e-14)


def test_the_velocity_comes_back_from_x0():
    x0, noise, sigma = latents(0), latents(1), mixed_sigma(low=0.05)
    x_t = add_noise(x0, noise, sigma)
    torch.testing.assert_close(velocity_from_x0(x_t, x0, sigma), noise - x0, rtol=0, atol=1e-12)
    v = latents(2)
    torch.testing.assert_close(velocity_from_x0(x_t, x0_from_velocity(x_t, v, sigma), sigma), v, rtol=0, atol=1e-12)


@given(seed=st.integers(0, 2**31), sigma=st.floats(1e-3, 1), scale=st.floats(1e-3, 1e3))
def test_the_inverse_pairs_hold_at_every_level_and_scale(seed: int, sigma: float, scale: float):
    """Invariant 3 over random levels and scales."""
    x0, noise = scale * latents(seed), latents(seed + 1)
    level = torch.full(SHAPE[:2], sigma, dtype=torch.float64)
    x_t, v = add_noise(x0, noise, level), velocity(x0, noise)
    tolerance = 1e-14 * (1 + scale) * 8
    torch.testing.assert_close(x0_from_velocity(x_t, v, level), x0, rtol=0, atol=tolerance)
    torch.testing.assert_close(noise_from_velocity(x_t, v, level), noise, rtol=0, atol=tolerance)
    torch.testing.assert_close(velocity_from_x0(x_t, x0, level), v, rtol=0, atol=tolerance / sigma)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_path_are_exact(dtype: torch.dtype):
    """Invariant 4: to add noise at sigma 0 is the identity, to the last bit; at sigma 1 nothing but noise is left."""
    x0, noise, v = latents(0, dtype), latents(1, dtype), latents(2, dtype)
    clean, pure = torch.zeros(SHAPE[:2], dtype=dtype), torch.ones(SHAPE[:2], dtype=dtype)
    assert torch.equal(add_noise(x0, noise, clean), x0)
    assert torch.equal(add_noise(x0, noise, pure), noise)
    assert torch.equal(x0_from_velocity(x0, v, clean), x0)
    assert torch.equal(noise_from_velocity(x0, v, pure), x0)


def test_sigma_0_of_one_frame_leaves_its_neighbours_noised():
    """Invariant 4, per frame: clean frames pass untouched among noised ones."""
    x0, noise, sigma = latents(0), latents(1), mixed_sigma()
    x_t = add_noise(x0, noise, sigma)
    assert torch.equal(x_t[0, 1], x0[0, 1])
    assert not torch.isclose(x_t[0, 0], x0[0, 0]).any()


def test_the_velocity_at_sigma_0_is_not_a_number_whatever_x0_is():
    x0, noise, sigma = latents(0), latents(1), mixed_sigma()
    x_t = add_noise(x0, noise, sigma)
    for guess in (x0, x0 + 1):
        v = velocity_from_x0(x_t, guess, sigma)
        assert v[0, 1].isnan().all()
        v[0, 1] = 0
        assert v.isfinite().all()


@pytest.mark.parametrize("function", [add_noise, x0_from_velocity, noise_from_velocity, velocity_from_x0])
def test_bfloat16_is_widened_before_the_arithmetic_and_float64_stays(function):
    sigma = mixed_sigma(low=0.1)
    narrow = function(latents(0, torch.bfloat16), latents(1, torch.bfloat16), sigma.float())
    wide = function(latents(0, torch.bfloat16).float(), latents(1, torch.bfloat16).float(), sigma.float())
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow, wide)
    assert function(latents(0), latents(1), sigma.float()).dtype == torch.float64


def test_the_velocity_of_bfloat16_latents_is_taken_in_float32():
    x0, noise = latents(0, torch.bfloat16), latents(1, torch.bfloat16)
    assert torch.equal(velocity(x0, noise), noise.float() - x0.float())


def test_gradients_follow_the_formulas():
    x_t, v, sigma = latents(0), latents(1).requires_grad_(), mixed_sigma()
    (gradient,) = torch.autograd.grad(x0_from_velocity(x_t, v, sigma).sum(), v)
    torch.testing.assert_close(gradient, -sigma[..., None, None, None].expand(SHAPE), rtol=0, atol=0)

"""The norm over all gradients of a role, and its limit."""

from __future__ import annotations

import pytest
import torch

from fewstep.optim.clip import clip_, total_norm


def gradients(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 5), (7,), (), (2, 1, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def test_the_norm_is_that_of_all_elements_together():
    found = total_norm(gradients())
    flat = torch.cat([gradient.flatten() for gradient in gradients()])
    assert found.shape == ()
    torch.testing.assert_close(found, flat.square().sum().sqrt(), rtol=1e-12, atol=0)


def test_the_norm_of_bfloat16_gradients_is_taken_in_float32():
    small = [torch.full((10_000,), 1e-3, dtype=torch.bfloat16) for _ in range(3)]
    found = total_norm(small)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(small[0][0]) * 30_000**0.5, rel=1e-5)


def test_gradients_above_the_limit_are_scaled_to_it_and_keep_their_direction():
    found = gradients()
    norm = total_norm(found)
    clip_(found, norm, 0.5)
    for clipped, original in zip(found, gradients(), strict=True):
        torch.testing.assert_close(clipped, original * 0.5 / norm, rtol=1e-12, atol=0)
    assert float(total_norm(found)) == pytest.approx(0.5, rel=1e-12)


def test_gradients_below_the_limit_stay_as_they_are_bit_for_bit():
    found = gradients(torch.float32)
    clip_(found, total_norm(found), 100.0)
    assert all(torch.equal(kept, original) for kept, original in zip(found, gradients(torch.float32), strict=True))


def test_gradients_of_zero_stay_zero():
    zeros = [torch.zeros(3), torch.zeros(2, 2)]
    clip_(zeros, total_norm(zeros), 1.0)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in zeros)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_element_that_is_not_finite_shows_in_the_norm(value):
    found = gradients()
    found[0][1, 2] = value
    assert not total_norm(found).isfinite()

"""The bell-shaped weight against its definition in timesteps."""

import numpy as np
import pytest
import torch

from fewstep.flow.sigmas import grid
from fewstep.flow.weighting import bsmntw


def definition(s: float) -> np.ndarray:
    """The weights of the 1000 shifted nodes, step by step as the definition says."""
    u = np.linspace(1, 0, 1001)[:-1]
    timestep = 1000 * (s * u / (1 + (s - 1) * u))
    y = np.exp(-2 * ((timestep - 500) / 1000) ** 2)
    above = y - y.min()
    return 1000 * above / above.sum()


@pytest.mark.parametrize("s", [0.5, 1.0, 3.0, 5.0, 12.0])
def test_the_weights_of_the_nodes_are_the_definition(s: float):
    weights = bsmntw(torch.tensor(grid(1000, s), dtype=torch.float64), s)
    np.testing.assert_allclose(weights.numpy(), definition(s), rtol=1e-9, atol=1e-12)
    assert weights.mean().item() == pytest.approx(1, abs=1e-12)


def test_the_known_weights_at_shift_5():
    nodes = torch.tensor(grid(1000, 5.0))[[250, 500, 750]]
    torch.testing.assert_close(bsmntw(nodes, 5.0), torch.tensor([0.398, 1.025, 1.914]), rtol=0, atol=6e-4)


def test_a_level_between_two_nodes_weighs_between_them():
    nodes = torch.tensor(grid(1000, 5.0), dtype=torch.float64)
    weights = bsmntw(nodes, 5.0)
    between = bsmntw((nodes[:-1] + nodes[1:]) / 2, 5.0)
    torch.testing.assert_close(between, (weights[:-1] + weights[1:]) / 2, rtol=0, atol=2e-5)


def test_the_weight_is_a_bell_about_the_middle_and_0_at_both_ends():
    sigma = torch.linspace(0, 1, 201, dtype=torch.float64)
    weights = bsmntw(sigma, 5.0)
    assert weights.min().item() == 0
    assert weights[0].item() == weights[-1].item() == 0
    assert weights.argmax().item() == 100
    torch.testing.assert_close(weights, weights.flip(0), rtol=0, atol=1e-12)


def test_the_weight_keeps_the_shape_of_sigma_and_is_float32_at_least():
    sigma = torch.rand(3, 5)
    assert bsmntw(sigma, 5.0).shape == (3, 5)
    assert bsmntw(sigma, 5.0).dtype == bsmntw(sigma.bfloat16(), 5.0).dtype == torch.float32
    assert bsmntw(sigma.double(), 5.0).dtype == torch.float64
    torch.testing.assert_close(bsmntw(sigma, 5.0), bsmntw(sigma.double(), 5.0).float(), rtol=0, atol=0)

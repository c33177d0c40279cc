"""A world in which everything is known: data N(mean, std^2) in every element, and networks that can be exactly right.

The optimal velocity of such data is affine in x_t: with x_t = (1 - s) x0 + s e, the expectation of e - x0 given x_t is
(s - (1 - s) std^2) / v (x_t - (1 - s) mean) - mean, where v = (1 - s)^2 std^2 + s^2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewstep.models.api import Geometry


class GaussianTeacher(nn.Module):
    """The exact velocity of N(mean, std^2) data."""

    geometry = Geometry(channels=1, patch=(1, 1, 1))
    num_layers, width = 1, 1

    def __init__(self, mean: float, std: float):
        super().__init__()
        self.mean, self.std = mean, std
        self.anchor = nn.Parameter(torch.zeros(1), requires_grad=False)

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: object) -> Tensor:
        s = sigma[:, :, None, None, None]
        variance = (1 - s) ** 2 * self.std**2 + s**2
        return (s - (1 - s) * self.std**2) / variance * (x_t - (1 - s) * self.mean) - self.mean

    def features(self, x_t: Tensor, sigma: Tensor, cond: object, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(x_t.reshape(len(x_t), -1, 1) for _ in layers)


class AffineModel(nn.Module):
    """velocity = a(sigma) x_t + b(sigma) with small networks a and b; features are token-wise functions of x_t."""

    geometry = Geometry(channels=1, patch=(1, 1, 1))
    num_layers = 2

    def __init__(self, width: int = 8):
        super().__init__()
        self.width = width
        self.coefficients = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2))
        self.token = nn.Linear(2, width)

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: object) -> Tensor:
        s = sigma.to(x_t.dtype)
        coefficients = self.coefficients(torch.stack([s, s.square(), torch.sin(3 * s)], dim=-1))
        scale, offset = coefficients[..., None, None, None].unbind(2)
        return scale * x_t + offset

    def features(self, x_t: Tensor, sigma: Tensor, cond: object, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        tokens = x_t.reshape(len(x_t), -1, 1)
        inputs = torch.cat([tokens, sigma.to(x_t.dtype)[:, :1, None].expand_as(tokens)], dim=-1)
        return tuple(torch.tanh(self.token(inputs)) for _ in layers)


def new_affine_model(seed: int, width: int = 8) -> AffineModel:
    """Its weights drawn by ``seed``, whatever other tests drew before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AffineModel(width)

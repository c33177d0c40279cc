"""Weights of the flow-matching loss by noise level."""

from __future__ import annotations

from functools import cache
from math import exp

import torch
from jaxtyping import Float
from torch import Tensor

from fewstep.flow.sigmas import grid

_NODES = 1000
_LOWEST = exp(-0.5)
"""The bell at sigma 1, its least value: every grid begins there."""


def bsmntw(sigma: Float[Tensor, "*axes"], s: float) -> Float[Tensor, "*axes"]:
    """The bell-shaped, mean-normalised weight of a noise level: 0 at both ends, of mean 1 over ``grid(1000, s)``.

    The weight is ``1000 (y - min y) / sum (y - min y)`` with ``y = exp(-2 (sigma - 1/2)^2)``, minimum and sum over the
    nodes (ai-toolkit's scheme on the shifted nodes, as in the training of Self-Forcing, arXiv:2506.08009). It is a
    function of sigma, so levels between the nodes have their own weight. Computed in float64; returned in the type of
    sigma, float32 at least.
    """
    bell = torch.exp(-2 * (sigma.double() - 0.5) ** 2) - _LOWEST
    weight = bell.clamp_min(0) * _normaliser(s)
    return weight.to(torch.promote_types(sigma.dtype, torch.float32))


@cache
def _normaliser(s: float) -> float:
    return _NODES / sum(exp(-2 * (node - 0.5) ** 2) - _LOWEST for node in grid(_NODES, s))

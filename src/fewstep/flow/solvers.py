"""One step of a sampler from the noise level ``sigma`` down to ``sigma_next``, frame by frame.

The solver is a part of a trained few-step student: it samples with the one that it was trained with. Both solvers
return the clean latents exactly where ``sigma_next`` is 0.
"""

from __future__ import annotations

from typing import Literal

from fewstep.flow.path import add_noise, x0_from_velocity
from fewstep.shapes import Latents, Sigma

Solver = Literal["renoise", "ode"]
"""``renoise`` predicts x0 and noises it anew; ``ode`` is an Euler step along the velocity."""


def renoise(x_t: Latents, velocity: Latents, sigma: Sigma, sigma_next: Sigma, noise: Latents) -> Latents:
    """``(1 - sigma_next) x0 + sigma_next noise`` with ``x0 = x_t - sigma velocity`` and fresh noise (consistency
    sampling, arXiv:2303.01469, algorithm 1)."""
    return add_noise(x0_from_velocity(x_t, velocity, sigma), noise, sigma_next)


def ode(x_t: Latents, velocity: Latents, sigma: Sigma, sigma_next: Sigma) -> Latents:
    """The Euler step ``x_t + (sigma_next - sigma) velocity``: the clean latents of a path shortened by sigma_next."""
    return x0_from_velocity(x_t, velocity, sigma - sigma_next)

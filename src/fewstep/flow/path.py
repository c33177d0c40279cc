"""The straight path between data and noise: ``x_t = (1 - sigma) x0 + sigma noise`` (rectified flow, arXiv:2209.03003).

Every function takes one noise level per frame and works frame by frame. Results are float32 at least: a bfloat16 input
is widened before the arithmetic, a float64 input stays float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fewstep.shapes import Latents, Sigma


def add_noise(x0: Latents, noise: Latents, sigma: Sigma) -> Latents:
    """The noised latents ``(1 - sigma) x0 + sigma noise``; exactly x0 at sigma 0 and exactly the noise at sigma 1."""
    x0, noise, level = _widened(x0, noise, sigma)
    return (1 - level) * x0 + level * noise


def velocity(x0: Latents, noise: Latents) -> Latents:
    """The velocity ``noise - x0``, the same at every noise level of the path."""
    x0, noise = _widened(x0, noise)
    return noise - x0


def x0_from_velocity(x_t: Latents, velocity: Latents, sigma: Sigma) -> Latents:
    """The clean latents ``x_t - sigma velocity``; exactly x_t at sigma 0."""
    x_t, velocity, level = _widened(x_t, velocity, sigma)
    return x_t - level * velocity


def noise_from_velocity(x_t: Latents, velocity: Latents, sigma: Sigma) -> Latents:
    """The noise ``x_t + (1 - sigma) velocity``; exactly x_t at sigma 1."""
    x_t, velocity, level = _widened(x_t, velocity, sigma)
    return x_t + (1 - level) * velocity


def velocity_from_x0(x_t: Latents, x0: Latents, sigma: Sigma) -> Latents:
    """The velocity ``(x_t - x0) / sigma``.

    At sigma 0 the noised latents say nothing about the noise, so the velocity is not determined: the frames at sigma 0
    come back as NaN, all of them, whatever x0 is. No error is raised, because to look at sigma would synchronise the
    device; select such frames away with ``torch.where`` before they reach a loss.
    """
    x_t, x0, level = _widened(x_t, x0, sigma)
    return (x_t - x0) / level.masked_fill(level == 0, torch.nan)


def _widened(*tensors: Tensor) -> Iterator[Tensor]:
    """The tensors in their common type, float32 at least; a noise level [b f] gets the axes to meet latents."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return (t.to(dtype) if t.ndim == 5 else t.to(dtype)[..., None, None, None] for t in tensors)

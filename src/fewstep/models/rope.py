"""Rotary positions of a clip: every head is split among frame, row and column (Wan, arXiv:2503.20314).

Angles are computed in float64 and rounded once, so that a position far along a stream is as exact as the first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

THETA = 10000.0
"""Base of the frequencies: pair i of an axis with m components turns by THETA^(-2i/m) per position."""


class Rotation(NamedTuple):
    """Cosine and sine of every token and every pair of components of a head."""

    cos: Float[Tensor, "n pairs"]
    sin: Float[Tensor, "n pairs"]


def split_head(head_dim: int) -> tuple[int, int, int]:
    """Components of a head that turn with frame, row and column: a third each, in whole pairs, the rest to the frame.

    Raises ValueError for an odd ``head_dim``.
    """
    if head_dim % 2:
        raise ValueError(f"rotary positions turn pairs of components; a head of {head_dim} components is odd")
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


@lru_cache(maxsize=64)
def rotation(
    head_dim: int, grid: tuple[int, int, int], start: int, device: torch.device, dtype: torch.dtype
) -> Rotation:
    """The rotation of the tokens of a clip, in the order frame, row, column; the first frame stands at ``start``.

    grid: frames, rows and columns of tokens. The result is shared between calls: never change it in place.
    """
    first = (start, 0, 0)
    with torch.inference_mode(False), torch.device("cpu"):
        angles = []
        for axis, (size, components) in enumerate(zip(grid, split_head(head_dim), strict=True)):
            positions = torch.arange(first[axis], first[axis] + size, dtype=torch.float64)
            exponents = torch.arange(0, components, 2, dtype=torch.float64) / max(components, 1)
            shape = [1, 1, 1, -1]
            shape[axis] = size
            angles.append(torch.outer(positions, THETA**-exponents).view(shape).expand(*grid, -1))
        angle = torch.cat(angles, dim=-1).flatten(0, 2)
        return Rotation(angle.cos().to(device, dtype), angle.sin().to(device, dtype))


def rotate(x: Float[Tensor, "b n h e"], rotation: Rotation) -> Float[Tensor, "b n h e"]:
    """Turns every pair of neighbouring components (2i, 2i + 1) of every head by the angle of its token."""
    cos, sin = (table.unsqueeze(1) for table in rotation)
    pairs = x.unflatten(-1, (-1, 2))
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        # One pass over the memory; compilers fuse the real form instead and do not know complex numbers.
        turned = torch.view_as_complex(pairs) * torch.complex(cos, sin)
        return torch.view_as_real(turned).flatten(-2)
    left, right = pairs.unbind(-1)
    return torch.stack((left * cos - right * sin, left * sin + right * cos), dim=-1).flatten(-2)

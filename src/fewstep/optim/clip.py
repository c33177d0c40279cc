"""The norm of a role's gradients, and its limit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm over all elements of all gradients: 0-dim, on their device, float32 or wider. NaN and inf survive."""
    norms = torch._foreach_norm([gradient.float() if gradient.itemsize < 4 else gradient for gradient in gradients])
    return torch.linalg.vector_norm(torch.stack(list(norms)))


def clip_(gradients: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scales the gradients in place so that their norm is at most ``limit``; their direction stays."""
    torch._foreach_mul_(list(gradients), (limit / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp(max=1.0))

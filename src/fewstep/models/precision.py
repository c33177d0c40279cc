"""Layers that compute in float32 at least, whatever their parameters are kept in and whatever autocast would do.

A noise level of 937.5 is 936 in bfloat16, and a residual gate of 1e-3 loses half of its digits: time embeddings,
modulation, normalisation and the output projection of every family are therefore made of these layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if it is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class WideLinear(nn.Linear):
    """``nn.Linear`` in float32 or wider."""

    def forward(self, input: Tensor) -> Tensor:
        weight = wide(self.weight)
        bias = None if self.bias is None else wide(self.bias)
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.to(weight.dtype), weight, bias)


class WideLayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` in float32 or wider; the result keeps that precision."""

    def forward(self, input: Tensor) -> Tensor:
        weight = None if self.weight is None else wide(self.weight)
        bias = None if self.bias is None else wide(self.bias)
        return F.layer_norm(wide(input), self.normalized_shape, weight, bias, self.eps)


class WideRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` in float32 or wider; the result keeps that precision."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else wide(self.weight)
        return F.rms_norm(wide(x), self.normalized_shape, weight, self.eps)

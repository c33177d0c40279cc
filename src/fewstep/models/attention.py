"""The one attention function of all networks, and the choice of the kernel behind it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Heads = Float[Tensor, "b n h e"]
"""n tokens of h heads with e components each."""


def attention(q: Heads, k: Float[Tensor, "b m h e"], v: Float[Tensor, "b m h e"], mask: None = None) -> Heads:
    """softmax(q k^T / sqrt(e)) v for every head; without a mask every query sees every key."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)

"""Bytes that a block of a network keeps for its backward pass, and needs while it runs; counted from its operations.

For one token: so many times the network's width, and so many times the width of its feed-forward layer. A trained
block computes in bfloat16 under autocast, with norms, positions and residual sums in float32; the same in float32 has
no copies. ``tests/costs/test_kept.py`` compares with what torch saves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fewstep.models.wan.sizes import Architecture

KEPT = {
    (torch.bfloat16, True): (54, 4),
    (torch.bfloat16, False): (32, 2),
    (torch.float32, True): (68, 8),
    (torch.float32, False): (40, 4),
}
"""By precision, and by whether the weights are trained: without their gradients, the inputs of linear layers are not
kept. Keys and values of the tokens themselves come on top."""
COMPILED = {True: (28, 4), False: (20, 2)}
"""Of compiled blocks in bfloat16, which make what is in float32 again instead of keeping it; by whether they are
trained."""
FORWARD = ((18, 0), (4, 4))
"""While a block runs, beside what is kept: in its attention, and in its feed-forward layer; the larger counts."""
BACKWARD = (8, 4)
"""While its gradients are made, beside what was kept."""


@dataclass(frozen=True)
class Inside:
    """How blocks of one role run."""

    shape: Architecture
    precision: torch.dtype
    trained: bool
    recompute: bool
    compiled: bool = False

    @property
    def part(self) -> str:
        """The part of what is held (``ledger.Held``) to which it belongs."""
        return "joined" if self.compiled else "activations"

    def kept(self, tokens: int) -> float:
        """For the backward pass."""
        wide = torch.bfloat16 if self.precision == torch.bfloat16 else torch.float32
        eager = KEPT[wide, self.trained]
        return self._bytes(COMPILED[self.trained] if self.compiled and wide == torch.bfloat16 else eager, tokens)

    def forward(self, tokens: int, past: int) -> float:
        """While it runs; the past is copied to stand before the tokens' own keys and values."""
        return max(self._bytes(stage, tokens) for stage in FORWARD) + self._past(tokens, past)

    def backward(self, tokens: int, past: int) -> float:
        """While its gradients are made, those of past keys and values too."""
        return self._bytes(BACKWARD, tokens) + 2 * self._past(tokens, past)

    def _bytes(self, per_token: tuple[int, int], tokens: int) -> float:
        wide, hidden = per_token
        return float(tokens * (wide * self.shape.dim + hidden * self.shape.ffn_dim))

    def _past(self, tokens: int, past: int) -> float:
        return 2.0 * self.precision.itemsize * self.shape.dim * (tokens + past) if past else 0.0

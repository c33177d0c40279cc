"""Ranks that share the tokens of a row: the ``Division`` of a network over them, by all-to-all exchanges.

PyTorch's own context parallelism (``torch.distributed.tensor.experimental.context_parallel``) rotates keys around a
ring inside ``scaled_dot_product_attention``, which it replaces for the length of a context: it knows neither block
masks nor histories. An exchange of heads leaves the attention function, its masks and the histories as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


class DividedTokens:
    """The division over the ranks of ``group``; heads and tokens of a frame must be multiples of their number."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.ranks, self.rank = group, group.size(), group.rank()

    def part(self, x: Tensor, axis: int) -> Tensor:
        if x.shape[axis] % self.ranks:
            raise ValueError(f"{x.shape[axis]} tokens cannot be divided over {self.ranks} ranks (engine.sequence)")
        return _Part.apply(x, axis, self)  # type: ignore[return-value]

    def whole(self, x: Tensor, axis: int) -> Tensor:
        return _Whole.apply(x, axis, self)  # type: ignore[return-value]

    def heads(self, x: Tensor, frames: int) -> Tensor:
        """Sent to a rank: its heads of the own tokens; received from a rank: the own heads of its tokens."""
        sent = x.unflatten(2, (self.ranks, -1)).unflatten(1, (frames, -1)).movedim(3, 0)
        return self._exchanged(sent).movedim(0, 2).flatten(1, 3)

    def tokens(self, x: Tensor, frames: int) -> Tensor:
        sent = x.unflatten(1, (frames, self.ranks, -1)).movedim(2, 0)
        return self._exchanged(sent).movedim(0, 3).flatten(3, 4).flatten(1, 2)

    def _exchanged(self, sent: Tensor) -> Tensor:
        """What this rank is sent by each, one after the other along the first axis; ``sent``: what each is sent."""
        return all_to_all_single_autograd(sent.contiguous(), None, None, self.group)

    def gathered(self, x: Tensor, axis: int) -> Tensor:
        """The parts of all ranks, without gradient."""
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, axis)

    def own(self, x: Tensor, axis: int) -> Tensor:
        """The part of this rank, without gradient."""
        return x.chunk(self.ranks, axis)[self.rank]


class _Part(torch.autograd.Function):
    """Each rank has the gradient of its part, multiplied by their number; together they are the whole one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, division: DividedTokens) -> Tensor:
        ctx.axis, ctx.division = axis, division
        return division.own(x, axis).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.division.gathered(gradients[0], ctx.axis) / ctx.division.ranks, None, None


class _Whole(torch.autograd.Function):
    """All ranks have the same gradient of the whole, since they go on with the same rows to the same loss; so nothing
    is exchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, division: DividedTokens) -> Tensor:
        ctx.axis, ctx.division = axis, division
        return division.gathered(x, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.division.own(gradients[0], ctx.axis) * ctx.division.ranks, None, None

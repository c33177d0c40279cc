"""How ranks divide the tokens of a row among them (Ulysses, arXiv:2309.14509).

Between a network's input and its output each rank has a part of every frame's tokens, and all weights work on that part
alone. Attention is where tokens meet: there the parts are exchanged for all tokens of a part of the heads, and back. A
history holds what attention reads, all tokens of those heads.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

PerHead = Float[Tensor, "b n h e"]
"""n tokens of h heads with e components each."""


@runtime_checkable
class Division(Protocol):
    """Fixed when a network is put on its ranks; all ranks of a division hold the same rows.

    What all of them hold alike has, on each, the whole gradient of a loss; of what they have parts of, the gradient is
    multiplied by the number of ranks. So the mean over ranks of a weight's gradients is that of one process.
    """

    ranks: int

    def part(self, x: Tensor, axis: int) -> Tensor:
        """This rank's part, along ``axis``, of what all of them hold."""
        ...

    def whole(self, x: Tensor, axis: int) -> Tensor:
        """The inverse of :meth:`part`."""
        ...

    def heads(self, x: PerHead, frames: int) -> Float[Tensor, "b all_n some_h e"]:
        """From a part of the tokens of each of ``frames`` frames to all tokens, of a part of the heads."""
        ...

    def tokens(self, x: PerHead, frames: int) -> Float[Tensor, "b some_n all_h e"]:
        """The inverse of :meth:`heads`."""
        ...


class Undivided:
    """One rank, which has all tokens."""

    ranks = 1

    def part(self, x: Tensor, axis: int) -> Tensor:
        return x

    def whole(self, x: Tensor, axis: int) -> Tensor:
        return x

    def heads(self, x: PerHead, frames: int) -> PerHead:
        return x

    def tokens(self, x: PerHead, frames: int) -> PerHead:
        return x


UNDIVIDED: Division = Undivided()

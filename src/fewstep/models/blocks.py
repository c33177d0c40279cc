"""Blocks of frames: how a clip is cut, and how far back a block sees. One partition for masks, rollouts, training and
streams."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Shaped
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor

from fewstep.errors import UserError
from fewstep.section import Section


class CausalSection(Section):
    """What makes a video network causal: its blocks of frames see the blocks before them and none after."""

    block_frames: PositiveInt
    """Latent frames that are made together; 1 is frame by frame."""
    first_frame_alone: bool = False
    """Whether the first frame is a block by itself, so that it can be given (image to video)."""
    window: PositiveInt | None = None
    """Latent frames that a block sees, its own and the sink's among them; left out, it sees all before it."""
    sink: int = Field(default=0, ge=0)
    """Frames at the beginning of the clip that stay in sight of every block."""
    positions: Literal["absolute", "reindexed"] = "absolute"
    """``absolute``: a frame keeps the position at which it was made. ``reindexed``: what a block sees is numbered from
    0 on, sink first, so that positions stay small in a stream without end; without a sink both are the same."""

    @model_validator(mode="after")
    def _window_holds_a_block(self) -> CausalSection:
        if self.window is None and self.sink:
            raise ValueError(f"sink {self.sink} means nothing without a window; write one, or sink: 0")
        if self.window is not None and self.window - self.sink < self.block_frames:
            raise ValueError(
                f"window {self.window} less sink {self.sink} leaves {self.window - self.sink} frames, and a block has "
                f"{self.block_frames}: write a window of {self.sink + self.block_frames} or more"
            )
        return self

    def partition(self, num_frames: int, first_block: int = 0) -> tuple[int, ...]:
        """Frames of each block of ``num_frames`` frames that begin with block number ``first_block``.

        Raises UserError where they do not divide, with both numbers.
        """
        alone = int(self.first_frame_alone and first_block == 0)
        if num_frames < alone + (not alone) or (num_frames - alone) % self.block_frames:
            after = " after the first, which is alone," if alone else ""
            below = num_frames - (num_frames - alone) % self.block_frames
            possible = [str(n) for n in (below, below + self.block_frames) if n > 0]
            raise UserError(
                f"{num_frames} latent frames cannot be cut into blocks of {self.block_frames} frames{after} without a "
                f"rest; {' or '.join(possible)} can"
            )
        return (1,) * alone + (self.block_frames,) * ((num_frames - alone) // self.block_frames)

    def start(self, block: int) -> int:
        """The first frame of block number ``block``."""
        return block * self.block_frames - (self.block_frames - 1) * (self.first_frame_alone and block > 0)

    def block_from(self, frame: int) -> int:
        """The number of the first block that begins at ``frame`` or after it; so many blocks hold the frames before."""
        alone = int(self.first_frame_alone and frame > 0)
        return alone + -(-(frame - alone) // self.block_frames)

    def recent(self, frames: int) -> int | None:
        """How many of the frames right before a block of ``frames`` frames it sees; None is all of them."""
        return None if self.window is None else max(self.window - self.sink - frames, 0)


def spread(per_block: Shaped[Tensor, "b blocks"], partition: tuple[int, ...]) -> Shaped[Tensor, "b f"]:
    """One value a block as one value a frame."""
    return torch.cat([per_block[:, i : i + 1].expand(-1, size) for i, size in enumerate(partition)], dim=1)

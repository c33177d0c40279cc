"""A clip in the making: what samplers of causal networks know of the frames that are finished."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fewstep.errors import UserError
from fewstep.flow.guidance import guide
from fewstep.models.api import CausalFlowModel
from fewstep.models.blocks import CausalSection
from fewstep.models.kv_cache import KVCache
from fewstep.records import concat
from fewstep.shapes import Latents, Sigma


class Clip:
    """The history of one clip, and the network and the conditioning that it is made with.

    A finished block enters the history when the next one asks for it, so that the last one never does. With guidance
    every call has twice the rows, those with the condition first, and so has the history.

    scale: of guidance; any but 1 needs ``uncond`` (ValueError). given: clean frames that the clip begins with, whole
    blocks (UserError). history: of an unguided clip that goes on, in place of them.
    """

    def __init__(
        self,
        model: CausalFlowModel,
        cond: Any,
        uncond: Any | None = None,
        *,
        scale: float = 1.0,
        given: Latents | None = None,
        history: KVCache | None = None,
    ):
        if scale != 1.0 and uncond is None:
            raise ValueError(f"guidance_scale {scale} needs the unconditional input, and there is none")
        self.model, self.causal, self.scale, self._uncond = model, model.causal, scale, uncond
        self.block = 0 if given is None else given_blocks(model.causal, given.shape[1])
        if history is not None:
            self.block = model.causal.block_from(history.num_frames)
        self._history = history
        self._finished: tuple[Latents, Sigma | None] | None = None
        self.tell(cond)
        if given is not None and self.block:
            self._history = model.prefill(self._rows(given), self._told)

    @property
    def next_frames(self) -> int:
        """Frames of the block that comes next."""
        return self.causal.start(self.block + 1) - self.causal.start(self.block)

    def history(self) -> KVCache | None:
        """What the next block sees; None before the first."""
        self._catch_up()
        return self._history

    def tell(self, cond: Any, recache: Iterable[tuple[Latents, Sigma | None]] | None = None) -> None:
        """The conditioning from the next block on; what is finished was made with the one before.

        recache: the finished blocks that are still in sight, from which the history is computed anew under ``cond``.
        """
        if recache is None:
            self._catch_up()
        both = cond if self.scale == 1.0 else concat([cond, self._uncond])
        self._told = self.model.tell(both)
        if recache is not None:
            self._rebuild(recache)

    def velocity(self, x_t: Latents, sigma: Sigma, *, together: bool = False) -> Latents:
        """The (guided) velocity of the next block, or of the next blocks ``together``."""
        self._catch_up()
        rows, level = self._rows(x_t), self._rows(sigma)
        found = self.model.velocity_given(rows, level, self._told, self._history, self.block, together=together)
        if self.scale == 1.0:
            return found
        with_cond, without_cond = found.chunk(2)
        return guide(with_cond, without_cond, self.scale)

    def append(self, x0: Latents, sigma: Sigma | None = None) -> None:
        """The next block is finished; ``sigma`` is the noise level at which later ones see it, 0 when left out."""
        self._catch_up()
        self._finished = (x0, sigma)
        self.block += 1

    def _catch_up(self) -> None:
        if self._finished is not None:
            self._append(*self._finished)
            self._finished = None

    def _rebuild(self, blocks: Iterable[tuple[Latents, Sigma | None]]) -> None:
        self._history, self._finished = None, None
        for x0, sigma in blocks:
            self._append(x0, sigma)
        if self._history is not None:
            self._history = replace(self._history, num_frames=self.causal.start(self.block))

    def _append(self, x0: Latents, sigma: Sigma | None) -> None:
        level = None if sigma is None else self._rows(sigma)
        self._history = self.model.append(self._history, self._rows(x0), self._told, level)

    def _rows(self, tensor: Tensor) -> Tensor:
        return tensor if self.scale == 1.0 else torch.cat([tensor, tensor])


def given_blocks(causal: CausalSection, frames: int) -> int:
    """How many blocks the first ``frames`` frames fill. Raises UserError where they are not whole blocks."""
    block = 0
    while causal.start(block) < frames:
        block += 1
    if causal.start(block) != frames:
        alone = ", the first frame alone" if causal.first_frame_alone else ""
        below = causal.start(block - 1)
        choices = f"{below} or {causal.start(block)}" if below else f"{causal.start(block)}"
        raise UserError(
            f"{frames} given frames are not whole blocks of {causal.block_frames} frames{alone}; give {choices}"
        )
    return block

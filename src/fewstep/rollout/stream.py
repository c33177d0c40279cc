"""A stream: the blocks of a clip as they are made, without end and in constant memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from time import perf_counter
from typing import Any, Literal

import torch

from fewstep.errors import UserError
from fewstep.models.api import CausalFlowModel
from fewstep.rng import Draw
from fewstep.rollout.clip import Clip, given_blocks
from fewstep.rollout.self_forcing import SelfForcing
from fewstep.shapes import Latents, Sigma


class Stream(Iterator[Latents]):
    """An iterator over x0 of one block after the other, ``[b n c h w]``: what ``SelfForcing.sample`` makes at once.

    sampler: its ``shape`` without the number of frames; a ``Rolling`` one tells its whole window what the block that
    leaves next is told. cond: a conditioning record for all blocks; or a function from
    the block's number to its record; or an iterator of records, at whose end the stream ends. A record that is another
    object than the one before is a prompt switch, which takes effect at its block. num_blocks: of the clip, given ones
    included; None is without end. given: clean frames that the clip begins with, whole blocks; they are not yielded.
    uncond: for guidance, the same for all blocks.

    history: at a prompt switch, ``keep`` what later blocks see as it was made, or ``recache``: compute it anew under
    the new prompt, from the frames that are still in sight.

    timed: waits for the device before it looks at the clock; else times are those of a host that may run ahead.

    Memory is constant where the network has a window. Raises UserError for frames that are not whole blocks, for
    ``recache`` with a window at absolute positions, and for as many given blocks as there are.
    """

    def __init__(
        self,
        sampler: SelfForcing,
        model: CausalFlowModel,
        cond: Any,
        draw: Draw,
        *,
        uncond: Any | None = None,
        num_blocks: int | None = None,
        given: Latents | None = None,
        history: Literal["keep", "recache"] = "keep",
        timed: bool = False,
    ):
        self.sampler, self.model, self.draw, self.num_blocks, self.timed = sampler, model, draw, num_blocks, timed
        self.block = given_blocks(model.causal, given.shape[1]) if given is not None else 0
        """The number of the block that comes next."""
        if num_blocks is not None and self.block >= num_blocks:
            raise UserError(f"{self.block} given blocks leave nothing to make of a stream of {num_blocks}")
        if history == "recache" and model.causal.window is not None and model.causal.positions == "absolute":
            raise UserError(
                "history: recache numbers the frames in sight anew, and the network has a window at absolute "
                "positions; write positions: reindexed (without a sink both are the same), or history: keep"
            )
        self._conds = _per_block(cond, self.block)
        self._uncond, self._given, self._recache = uncond, given, history == "recache"
        self._clip: Clip | None = None
        self._cond: Any = None
        self._in_sight: list[tuple[int, Latents, Sigma | None]] = []
        self.num_frames = 0
        """Frames that were made so far."""
        self.busy_s = 0.0
        """Seconds that it took to make them; what the caller does in between does not count."""
        self.first_frame_s: float | None = None
        """Seconds from the first request to the first block."""

    @property
    def frames_per_s(self) -> float:
        """Latent frames made per second so far; NaN before the first."""
        return self.num_frames / self.busy_s if self.busy_s else float("nan")

    @torch.no_grad()
    def __next__(self) -> Latents:
        if self.block == self.num_blocks:
            raise StopIteration
        start_s = self._now()
        self._tell(next(self._conds))
        stopped, seen = next(self._blocks)
        if self._recache:
            self._remember(self.block, seen, self._level(seen))
        self.block += 1
        self.num_frames += seen.shape[1]
        took_s = self._now() - start_s
        self.busy_s += took_s
        if self.first_frame_s is None:
            self.first_frame_s = took_s
        return stopped.x0

    def _tell(self, cond: Any) -> None:
        """The conditioning of the next block."""
        if self._clip is None:
            scale, given = self.sampler.guidance_scale, self._given
            self._clip = Clip(self.model, cond, self._uncond, scale=scale, given=given)
            if given is not None and self._recache:
                for block, part in enumerate(given.split(self.model.causal.partition(given.shape[1]), 1)):
                    self._remember(block, part, None)
            self._given = None
            self._blocks = self.sampler.blocks(self._clip, self.draw, self.num_blocks)
        elif cond is not self._cond:
            self._clip.tell(cond, [(x0, sigma) for _, x0, sigma in self._in_sight] if self._recache else None)
        self._cond = cond

    def _remember(self, block: int, seen: Latents, sigma: Sigma | None) -> None:
        """Keeps the blocks of which a later block sees a frame, and always the last one."""
        causal = self.model.causal
        recent, end = causal.recent(causal.block_frames), causal.start(block + 1)

        def in_sight(number: int) -> bool:
            return causal.start(number) < causal.sink or causal.start(number + 1) > end - max(recent or 0, 1)

        kept = self._in_sight if recent is None else [old for old in self._in_sight if in_sight(old[0])]
        self._in_sight = [*kept, (block, seen, sigma)]

    def _level(self, seen: Latents) -> Sigma | None:
        sigma = self.sampler.history_sigma
        return self.sampler.level(sigma, seen.shape[1], self.draw.key) if sigma else None

    def _now(self) -> float:
        if self.timed and self.draw.key.is_cuda:
            torch.cuda.synchronize(self.draw.key.device)
        return perf_counter()


def _per_block(cond: Any, first: int) -> Iterator[Any]:
    """The conditioning records of the blocks from number ``first`` on."""
    if isinstance(cond, Iterator):
        return cond
    if callable(cond):
        return map(cond, itertools.count(first))
    return itertools.repeat(cond)

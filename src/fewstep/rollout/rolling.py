"""Rolling forcing: a window of blocks, each noisier than the one before, denoised together (arXiv:2509.25161).

    for every joint forward of the window
        its blocks see each other, and the finished ones
        every block goes one step down the ladder
        once the front block is clean, it leaves to the history, and a block of pure noise enters behind

Errors of a block are mended by those that come after it, so that they do not pile up in long clips. The anchor of the
paper, the first block kept in sight and numbered anew, is the network's ``sink`` with re-indexed positions.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fewstep.errors import UserError
from fewstep.flow import solvers
from fewstep.flow.path import x0_from_velocity
from fewstep.models.api import CausalFlowModel
from fewstep.models.blocks import CausalSection
from fewstep.models.kv_cache import KVCache
from fewstep.records import Batch, Rollout
from fewstep.rng import Draw
from fewstep.rollout.clip import Clip
from fewstep.rollout.few_step import SamplingSection, Stopped
from fewstep.rollout.self_forcing import SelfForcing, predicted
from fewstep.shapes import Latents


@dataclass
class _Block:
    """A block on its way through the window."""

    number: int
    x_t: Latents
    step: int = 0


class _Joint(NamedTuple):
    """One forward of the window."""

    number: int
    """Forwards before it."""
    steps: tuple[int, ...]
    """The step of the ladder at which every block stood."""
    stood: tuple[Stopped, ...]
    """The blocks as they stood, and what was predicted of them."""
    left: tuple[Stopped, Latents] | None
    """The block that is finished, and as later ones see it."""


@dataclass(frozen=True)
class Rolling(SelfForcing):
    """A sampler that denoises ``rolling_blocks`` blocks together, one rung (or as many as divide evenly) apart.

    A block runs the ladder of ``sigmas`` from its entry to its leave, with the same noise as in ``SelfForcing``; a
    window of one block is ``SelfForcing``.
    """

    rolling_blocks: int = 1

    @classmethod
    def of(
        cls,
        section: SamplingSection,
        shape: tuple[int, int, int, int],
        causal: CausalSection,
        dtype: torch.dtype = torch.float32,
    ) -> Rolling:
        """The sampler that a recipe describes.

        Raises UserError where frames and blocks do not fit, and where a full window would show its blocks no finished
        one but the sink.
        """
        blocks = section.rolling_blocks
        frames = (blocks + 1) * causal.block_frames
        if blocks > 1 and causal.window is not None and causal.window - causal.sink < frames:
            left, each = causal.window - causal.sink, causal.block_frames
            raise UserError(
                f"student.causal.window = {causal.window}: less sink {causal.sink} it leaves {left} frames; the "
                f"{blocks} rolling_blocks of {each} and one finished block that they go on from need {frames}; write a "
                f"window of {causal.sink + frames} or more"
            )
        return dataclasses.replace(super().of(section, shape, causal, dtype), rolling_blocks=blocks)  # type: ignore[return-value]

    def __call__(self, student: CausalFlowModel, batch: Batch, draw: Draw) -> Rollout:
        """The training rollout: in half of the iterations that of ``SelfForcing``; else the windows whose forward's
        number is the stop, modulo the steps, so that every block is in one of them."""
        if self.rolling_blocks == 1 or draw.shared_index("rolling", 2) == 0:
            return super().__call__(student, batch, draw)
        steps = len(self.sigmas)
        stop, plain = draw.shared_index("stop", steps), dataclasses.replace(self, guidance_scale=1.0)
        inputs = (student, batch.cond, None, draw, self._given(batch))
        return plain._roll(*inputs, stop, lambda number, step: number % steps == stop, trains=True)

    def sample(
        self,
        model: CausalFlowModel,
        cond: Any,
        uncond: Any | None,
        draw: Draw,
        stop: int | None = None,
        given: Latents | None = None,
    ) -> Rollout:
        """Samples from pure noise; ``stop`` (an index into the ladder) gives the prediction of each block at that step.

        given: as in ``SelfForcing``. The record is what was made; only that of a training rollout can be made again.
        """
        at = len(self.sigmas) - 1 if stop is None else stop
        return self._roll(model, cond, uncond, draw, given, at, lambda number, step: step == at)

    def blocks(self, clip: Clip, draw: Draw, num_blocks: int | None = None) -> Iterator[tuple[Stopped, Latents]]:
        """The blocks of the clip as they leave the window, and each as later ones see it."""
        return (joint.left for joint in self._forwards(clip, draw, num_blocks) if joint.left is not None)

    def _predicted(
        self, student: CausalFlowModel, rollout: Rollout, cond: Any, history: KVCache | None, first_block: int
    ) -> Latents:
        """One forward a window; no gradient passes from window to window."""
        if not rollout.windows:
            return super()._predicted(student, rollout, cond, history, first_block)
        edges = list(itertools.accumulate(rollout.windows, initial=first_block))
        start = student.causal.start
        parts = [
            predicted(student, rollout, slice(start(a), start(b)), cond, history, a, together=True)
            for a, b in itertools.pairwise(edges)
        ]
        return torch.cat(parts, 1)

    def _roll(
        self,
        model: CausalFlowModel,
        cond: Any,
        uncond: Any | None,
        draw: Draw,
        given: Latents | None,
        stop: int,
        picks: Callable[[int, int], bool],
        trains: bool = False,
    ) -> Rollout:
        """Rolls until every block was picked once: by the number of a forward and the step at which a block stands."""
        clip, num_blocks = self._begin(model, cond, uncond, given)
        picked: list[Stopped] = []
        seen: list[Latents] = []
        windows: list[int] = []
        count = num_blocks - clip.block
        for joint in self._forwards(clip, draw, num_blocks):
            found = [at for step, at in zip(joint.steps, joint.stood, strict=True) if picks(joint.number, step)]
            picked += found
            windows += [len(found)] if found else []
            seen += [joint.left[1]] if joint.left is not None else []
            if len(picked) == count:
                break
        if not trains:
            return self._gather(draw, stop, given, picked, [])
        unseen = [at.x0 for at in picked[len(seen) :]]
        return self._gather(draw, stop, given, picked, [*seen, *unseen], tuple(windows))

    def _forwards(self, clip: Clip, draw: Draw, num_blocks: int | None) -> Iterator[_Joint]:
        """Every joint forward until the last block has left."""
        window: deque[_Block] = deque()
        entering, rungs = clip.block, len(self.sigmas) // self.rolling_blocks
        for number in itertools.count():
            if number % rungs == 0 and entering != num_blocks:
                window.append(_Block(entering, self._fresh("noise", entering, clip.causal, draw)))
                entering += 1
            if not window:
                return
            steps, stood = tuple(block.step for block in window), self._forward(clip, window, draw)
            left = None
            if window[0].step == len(self.sigmas):
                window.popleft()
                left = stood[0], self.finish(clip, stood[0].x0, draw)
            yield _Joint(number, steps, stood, left)

    def _forward(self, clip: Clip, window: deque[_Block], draw: Draw) -> tuple[Stopped, ...]:
        """Every block of the window goes one step down."""
        sizes = [block.x_t.shape[1] for block in window]
        levels = [self.level(self.sigmas[b.step], n, draw.key) for b, n in zip(window, sizes, strict=True)]
        joint = torch.cat([block.x_t for block in window], 1), torch.cat(levels, 1)
        velocities = clip.velocity(*joint, together=len(window) > 1).split(sizes, 1)
        stood = []
        for block, sigma, velocity in zip(window, levels, velocities, strict=True):
            stood.append(Stopped(block.x_t, sigma, x0_from_velocity(block.x_t, velocity, sigma)))
            self._advance(block, velocity, sigma, clip.causal, draw)
        return tuple(stood)

    def _advance(self, block: _Block, velocity: Latents, sigma: Any, causal: CausalSection, draw: Draw) -> None:
        block.step += 1
        if block.step == len(self.sigmas):
            return
        below = self.level(self.sigmas[block.step], velocity.shape[1], draw.key)
        if self.solver == "ode":
            block.x_t = solvers.ode(block.x_t, velocity, sigma, below)
        else:
            noise = self._fresh(f"renoise.{block.step - 1}", block.number, causal, draw)
            block.x_t = solvers.renoise(block.x_t, velocity, sigma, below, noise)

    def _fresh(self, name: str, block: int, causal: CausalSection, draw: Draw) -> Latents:
        frames = causal.start(block + 1) - causal.start(block)
        return draw.normal(f"block.{block}.{name}", (frames, *self.shape[1:]), dtype=self.dtype)

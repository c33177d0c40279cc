"""Self-forcing: the sampler of causal networks and, stopped on the way, their training rollout (arXiv:2506.08009).

    for every block of frames
        x_t <- noise
        x0  <- denoise x_t down the ladder, seeing the finished blocks alone     (in training: down to a random stop)
        the history goes on with x0

The student's update needs no second rollout: given the finished blocks, all blocks are computed again in one forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fewstep.errors import UserError
from fewstep.flow.path import add_noise, x0_from_velocity
from fewstep.flow.sigmas import ladder
from fewstep.flow.solvers import Solver
from fewstep.models.api import CausalFlowModel
from fewstep.models.blocks import CausalSection
from fewstep.models.kv_cache import KVCache
from fewstep.records import Batch, Rollout
from fewstep.rng import Draw
from fewstep.rollout.carry import Carry
from fewstep.rollout.clip import Clip, given_blocks
from fewstep.rollout.few_step import SamplingSection, Stopped, walk
from fewstep.shapes import Keys, Latents, Sigma


@dataclass(frozen=True)
class SelfForcing:
    """A sampler that makes a clip block by block, each from pure noise down ``sigmas`` against the finished ones.

    shape: of one sample, ``(f, c, h, w)``, given frames included. dtype: of the noise, hence of the states (float32;
    float64 in tests). The other fields are those of ``SamplingSection``, resolved; ``first_block_sigmas`` None is
    ``sigmas``. How a clip is cut into blocks is the network's to say (``causal``).

    The noise of a block is a function of the draw's keys and of the block's number, so a longer clip begins like a
    shorter one.
    """

    sigmas: tuple[float, ...]
    solver: Solver
    shape: tuple[int, int, int, int]
    guidance_scale: float = 1.0
    dtype: torch.dtype = torch.float32
    first_block_sigmas: tuple[float, ...] | None = None
    history_sigma: float = 0.0
    given_frames: int = 0
    stop: Literal["shared", "block"] = "shared"
    stream_chunks: int = 1
    overlap_frames: int = 0

    @classmethod
    def of(
        cls,
        section: SamplingSection,
        shape: tuple[int, int, int, int],
        causal: CausalSection,
        dtype: torch.dtype = torch.float32,
    ) -> SelfForcing:
        """The sampler that a recipe describes. Raises UserError where frames and blocks do not fit."""
        num_blocks = len(causal.partition(shape[0]))
        if given_blocks(causal, section.given_frames) >= num_blocks:
            raise UserError(f"{section.given_frames} given frames leave nothing to make of a clip of {shape[0]}")
        steps = section.first_block_steps
        return cls(
            section.resolved(),
            section.solver,
            shape,
            section.guidance_scale,
            dtype,
            first_block_sigmas=ladder(steps, section.shift) if steps else None,
            history_sigma=section.history_sigma,
            given_frames=section.given_frames,
            stop=section.stop,
            stream_chunks=section.stream_chunks,
            overlap_frames=section.overlap_frames,
        )

    def __call__(self, student: CausalFlowModel, batch: Batch, draw: Draw) -> Rollout:
        """The training rollout: unguided, never past its stops, which are the same for the whole job.

        All blocks stop at one random step (``stop`` shared) or each at its own; the first block draws one of its own
        where it has another ladder. Frames that are given come from ``batch.x0``.
        """
        return self._train(student, batch, draw, None)[0]

    def chunk(
        self, student: CausalFlowModel, batch: Batch, draw: Draw, carry: Carry | None
    ) -> tuple[Rollout, Carry | None]:
        """The training rollout of one iteration of streams that go on for ``stream_chunks`` iterations, and what the
        next one goes on from: None after the last chunk, as before the first.

        The iteration says which chunk it is. The first is a clip like any other. A later one is the clean
        ``overlap_frames`` of the one before, as given frames that teacher and critic see noised (they know clips whose
        frames all have one noise level), and new frames after them, which see the history that is carried; blocks are
        counted from the beginning of the stream. Raises ValueError if a later chunk has no carry,
        or the first one has.
        """
        number = draw.iteration % self.stream_chunks
        if (number == 0) != (carry is None):
            raise ValueError(
                f"iteration {draw.iteration} makes chunk {number} of {self.stream_chunks}: the first one goes on from "
                f"nothing, a later one from a carry, and it got {'none' if carry is None else 'one'}"
            )
        rollout, clip = self._train(student, batch, draw, carry)
        if carry is not None:
            rollout = dataclasses.replace(rollout, clean=0)
        if number + 1 == self.stream_chunks:
            return rollout, None
        history, overlap = clip.history(), rollout.x0[:, self.shape[0] - self.overlap_frames :]
        assert history is not None
        return rollout, Carry(draw.key, overlap, history)

    def again(self, student: CausalFlowModel, rollout: Rollout, batch: Batch, carry: Carry | None = None) -> Latents:
        """The rollout's ``x0`` once more, with gradient: a pass without gradient over the finished blocks, and one
        forward of all blocks at their stops, each against the blocks before it. No gradient passes from block to block.

        carry: what the rollout went on from. Valid while the student's weights are those that made the rollout. Given
        frames come back as they are.
        """
        history, causal = self.history(student, rollout, batch.cond, carry), student.causal
        block = given_blocks(causal, rollout.given) if carry is None else causal.block_from(carry.history.num_frames)
        x0 = self._predicted(student, rollout, batch.cond, history, block)
        return torch.cat([rollout.x0[:, : rollout.given], x0], 1) if rollout.given else x0

    def sample(
        self,
        model: CausalFlowModel,
        cond: Any,
        uncond: Any | None,
        draw: Draw,
        stop: int | None = None,
        given: Latents | None = None,
    ) -> Rollout:
        """Samples from pure noise; ``stop`` (an index into the ladder of every block, its last at most) ends each block
        early with the prediction at that step.

        given: the clean frames that the clip begins with, ``[b k c h w]``; they come back unchanged. Raises UserError
        where they are not ``given_frames`` (if that is not 0), not whole blocks, or the whole clip.
        """

        def at(block: int) -> int:
            last = len(self.ladder(block)) - 1
            return last if stop is None else min(stop, last)

        clip, num_blocks = self._begin(model, cond, uncond, given)
        return self._make(clip, num_blocks, draw, at, given)

    def blocks(self, clip: Clip, draw: Draw, num_blocks: int | None = None) -> Iterator[tuple[Stopped, Latents]]:
        """The blocks of the clip from its next one on, each also as later ones see it; num_blocks None: without end."""
        while clip.block != num_blocks:
            yield self.block(clip, draw)

    def block(self, clip: Clip, draw: Draw, stop: int | None = None) -> tuple[Stopped, Latents]:
        """The next block of the clip, which goes on with it; and the block as later ones see it."""
        number, sigmas = clip.block, self.ladder(clip.block)
        shape = (clip.next_frames, *self.shape[1:])
        last = len(sigmas) - 1 if stop is None else stop
        stopped = walk(
            clip.velocity,
            draw.normal(f"block.{number}.noise", shape, dtype=self.dtype),
            [self.level(sigma, shape[0], draw.key) for sigma in sigmas[: last + 1]],
            self.solver,
            lambda step: draw.normal(f"block.{number}.renoise.{step}", shape, dtype=self.dtype),
        )
        return stopped, self.finish(clip, stopped.x0, draw)

    def finish(self, clip: Clip, x0: Latents, draw: Draw) -> Latents:
        """The clip goes on with ``x0``, its next block, at ``history_sigma``; returned as later blocks see it."""
        if self.history_sigma == 0.0:
            clip.append(x0)
            return x0
        sigma = self.level(self.history_sigma, x0.shape[1], draw.key)
        noise = draw.normal(f"block.{clip.block}.history", tuple(x0.shape[1:]), dtype=self.dtype)
        seen = add_noise(x0, noise, sigma)
        clip.append(seen, sigma)
        return seen

    def ladder(self, block: int) -> tuple[float, ...]:
        """The noise levels of block number ``block``."""
        return self.sigmas if block or self.first_block_sigmas is None else self.first_block_sigmas

    def level(self, sigma: float, frames: int, key: Keys) -> Sigma:
        """One noise level for ``frames`` frames of every row."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.full((len(key), frames), sigma, dtype=wide, device=key.device)

    @torch.no_grad()
    def history(
        self, student: CausalFlowModel, rollout: Rollout, cond: Any, carry: Carry | None = None
    ) -> KVCache | None:
        """What the last block of a rollout sees, and the blocks before it saw; None where it sees nothing."""
        seen = rollout.x0 if rollout.history is None else rollout.history
        causal = student.causal
        past, entered = (None, 0) if carry is None else (carry.history, rollout.given)
        sizes = causal.partition(seen.shape[1] - entered, causal.block_from(past.num_frames) if past else 0)
        frames = entered + sum(sizes[:-1])
        if frames == entered:
            return past
        sigma = self.level(self.history_sigma, frames, rollout.key)
        sigma[:, : rollout.given] = 0.0
        return student.prefill(seen[:, entered:frames], cond, sigma[:, entered:], past)

    def _train(self, student: CausalFlowModel, batch: Batch, draw: Draw, carry: Carry | None) -> tuple[Rollout, Clip]:
        """An unguided clip down to random stops, from the start or from what is carried."""
        plain, given = dataclasses.replace(self, guidance_scale=1.0), self._given(batch)
        if carry is None:
            clip, num_blocks = plain._begin(student, batch.cond, None, given)
        else:
            clip, given = Clip(student, batch.cond, history=carry.history), carry.x0
            num_blocks = clip.block + len(clip.causal.partition(self.shape[0] - given.shape[1], clip.block))
        return plain._make(clip, num_blocks, draw, self._drawn(draw), given), clip

    def _make(
        self, clip: Clip, num_blocks: int, draw: Draw, stop_of: Callable[[int], int], given: Latents | None
    ) -> Rollout:
        """The blocks of the clip from its next one on, each down to its stop."""
        made = [self.block(clip, draw, stop_of(block)) for block in range(clip.block, num_blocks)]
        seen = [past for _, past in made] if self.history_sigma else []
        return self._gather(draw, stop_of(num_blocks - 1), given, [stopped for stopped, _ in made], seen)

    def _predicted(
        self, student: CausalFlowModel, rollout: Rollout, cond: Any, history: KVCache | None, first_block: int
    ) -> Latents:
        """x0 of all frames that are not given, which begin with block number ``first_block``."""
        return predicted(student, rollout, slice(rollout.given, None), cond, history, first_block)

    def _begin(self, model: CausalFlowModel, cond: Any, uncond: Any | None, given: Latents | None) -> tuple[Clip, int]:
        """The clip before its first block is made, and how many blocks it will have."""
        sizes, frames = model.causal.partition(self.shape[0]), 0 if given is None else given.shape[1]
        if self.given_frames and frames != self.given_frames:
            raise UserError(f"this sampler continues {self.given_frames} given frames, and got {frames}")
        if frames >= self.shape[0]:
            raise UserError(f"{frames} given frames leave nothing to make of a clip of {self.shape[0]}")
        return Clip(model, cond, uncond, scale=self.guidance_scale, given=given), len(sizes)

    def _gather(
        self,
        draw: Draw,
        stop: int,
        given: Latents | None,
        stopped: Sequence[Stopped],
        seen: Sequence[Tensor],
        windows: tuple[int, ...] = (),
    ) -> Rollout:
        """The blocks as one rollout; ``seen`` is empty where later blocks saw ``x0``."""
        start, frames = ((), 0) if given is None else ((given,), given.shape[1])
        x_t, sigma, x0 = (torch.cat(parts, 1) for parts in zip(*stopped, strict=True))
        return Rollout(
            draw.key,
            stop,
            torch.cat([*start, x_t], 1),
            torch.cat([self.level(0.0, frames, draw.key), sigma], 1),
            torch.cat([*start, x0], 1),
            given=frames,
            clean=frames,
            history=torch.cat([*start, *seen], 1) if seen else None,
            windows=windows,
        )

    def _drawn(self, draw: Draw) -> Callable[[int], int]:
        """The random stop of every block."""
        shared = draw.shared_index("stop", len(self.sigmas))

        def of(block: int) -> int:
            if self.stop == "shared" and self.ladder(block) == self.sigmas:
                return shared
            return draw.shared_index(f"stop.{block}", len(self.ladder(block)))

        return of

    def _given(self, batch: Batch) -> Latents | None:
        if not self.given_frames:
            return None
        if batch.x0 is None:
            raise UserError(f"given_frames {self.given_frames}: the data hold no latents that could be given")
        return batch.x0[:, : self.given_frames]


def predicted(
    student: CausalFlowModel,
    rollout: Rollout,
    frames: slice,
    cond: Any,
    history: KVCache | None,
    first_block: int,
    **how: Any,
) -> Latents:
    """x0 of some frames of a rollout from where they stopped, against the history; ``first_block`` is their first."""
    x_stop, sigma = rollout.x_stop[:, frames], rollout.sigma_stop[:, frames]
    return x0_from_velocity(x_stop, student.velocity_given(x_stop, sigma, cond, history, first_block, **how), sigma)

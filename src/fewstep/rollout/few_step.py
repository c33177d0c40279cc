"""The few-step rollout: the sampler of images and, stopped on the way, the training rollout of DMD2.

"Backward simulation" (DMD2, arXiv:2405.14867): the student sees in training the states that it will see when it
samples, since both come from this one loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator

from fewstep.errors import UserError
from fewstep.flow import solvers
from fewstep.flow.path import x0_from_velocity
from fewstep.flow.sigmas import ladder
from fewstep.flow.solvers import Solver
from fewstep.models.api import FlowModel
from fewstep.models.guided import guided_velocity
from fewstep.records import Batch, Rollout
from fewstep.rng import Draw
from fewstep.rollout.carry import Carry
from fewstep.section import Section
from fewstep.shapes import Keys, Latents, Sigma

MOST_STEPS = 1000


class SamplingSection(Section):
    """How the trained network is sampled; travels with its weights. Give ``steps`` (with ``shift``) or ``sigmas``."""

    steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Number of network steps; the noise levels are the ladder of that many steps at ``shift``."""
    shift: float = Field(default=1.0, gt=0)
    """Shift of the ladder, applied once."""
    sigmas: tuple[float, ...] | None = None
    """The noise levels themselves: descending, the first 1, without 0; never shifted again."""
    solver: Solver = "renoise"
    """``renoise`` predicts x0 and noises it afresh (few-step students), ``ode`` takes Euler steps (teachers)."""
    guidance_scale: float = Field(default=1.0, ge=0)
    """uncond + scale x (cond - uncond); 1 is off."""
    first_block_steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """Of causal networks: number of steps of the first block, whose noise levels are the ladder of so many steps at
    ``shift``, with a random stop of its own in training; left out, it is made like the others."""
    history_sigma: float = Field(default=0.0, ge=0, lt=1)
    """Of causal networks: noise level at which a finished block becomes the past of the next ones; 0 is clean."""
    given_frames: int = Field(default=0, ge=0)
    """Of causal networks: latent frames at the beginning that are given instead of made (image to video, continuation);
    whole blocks."""
    stop: Literal["shared", "block"] = "shared"
    """Of causal networks, in training: whether all blocks of a rollout stop at one random step, or each at its own."""
    rolling_blocks: int = Field(default=1, ge=1)
    """Of causal networks: blocks that are denoised together, each further up the ladder than the one before it (rolling
    forcing); their number divides that of the steps. 1 is block by block."""
    stream_chunks: int = Field(default=1, ge=1)
    """Of causal networks, in training: iterations for which a rollout goes on, each making the next chunk of one stream
    (streaming long tuning). 1 is a clip of its own in every iteration."""
    overlap_frames: int = Field(default=0, ge=0)
    """In training with ``stream_chunks``: last frames of a chunk that the scores of the next one see before its new
    ones, noised with them and out of the loss; what is left of a clip is whole blocks."""

    @model_validator(mode="after")
    def _one_ladder(self) -> SamplingSection:
        if (self.steps is None) == (self.sigmas is None):
            raise ValueError("write exactly one of 'steps' and 'sigmas'")
        levels = self.resolved()
        if levels[:1] != (1.0,) or levels[-1] <= 0.0 or any(a <= b for a, b in pairwise(levels)):
            raise ValueError(f"'sigmas' must descend from 1 and end above 0, got {list(levels)}")
        if self.given_frames and self.first_block_steps:
            raise ValueError(
                f"first_block_steps {self.first_block_steps} means nothing where the first block is given "
                f"(given_frames {self.given_frames}); leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _rolls_and_streams(self) -> SamplingSection:
        steps, blocks = len(self.resolved()), self.rolling_blocks
        if steps % blocks:
            raise ValueError(
                f"{steps} steps cannot be shared by {blocks} rolling_blocks; write a number that divides it"
            )
        if blocks > 1 and (self.first_block_steps or self.stop == "block"):
            raise ValueError(
                f"rolling_blocks {blocks} makes all blocks alike, in one walk: leave out first_block_steps and stop"
            )
        if blocks > 1 and self.stream_chunks > 1:
            raise ValueError(
                f"stream_chunks {self.stream_chunks}: between two chunks all blocks are finished, and rolling_blocks "
                f"{blocks} never has none on its way; leave one of them out"
            )
        if self.overlap_frames and self.stream_chunks == 1:
            raise ValueError(
                f"overlap_frames {self.overlap_frames} means nothing where no rollout goes on (stream_chunks 1); write "
                "stream_chunks: 2 or more, or leave it out"
            )
        return self

    def resolved(self) -> tuple[float, ...]:
        """The noise levels that are run."""
        return self.sigmas if self.sigmas is not None else ladder(self.steps or 1, self.shift)

    def with_steps(self, steps: int) -> SamplingSection:
        """The same sampler at another number of steps; at the trained number, the trained sampler itself.

        Raises UserError for more than 1000, and for a number that ``rolling_blocks`` does not divide.
        """
        if steps == len(self.resolved()):
            return self
        if not 1 <= steps <= MOST_STEPS:
            raise UserError(f"steps = {steps}: write a number from 1 to {MOST_STEPS}")
        if steps % self.rolling_blocks:
            raise UserError(
                f"{steps} steps cannot be shared by the {self.rolling_blocks} blocks that are denoised together; "
                f"take a multiple of {self.rolling_blocks}"
            )
        return SamplingSection.model_validate(self.model_dump() | {"steps": steps, "sigmas": None})


class Stopped(NamedTuple):
    """Where a walk down a ladder ended: the state, its noise level, and the clean latents that the network predicts."""

    x_t: Latents
    sigma: Sigma
    x0: Latents


def walk(
    velocity: Callable[[Latents, Sigma], Latents],
    x_t: Latents,
    levels: Sequence[Sigma],
    solver: Solver,
    fresh: Callable[[int], Latents],
) -> Stopped:
    """From ``x_t`` at the first of the noise levels to the last, and the prediction there: one network call a level.

    fresh: the noise that is added after step 0, 1, ... by the solver ``renoise``.
    """
    for step, (sigma, sigma_next) in enumerate(pairwise(levels)):
        found = velocity(x_t, sigma)
        if solver == "ode":
            x_t = solvers.ode(x_t, found, sigma, sigma_next)
        else:
            x_t = solvers.renoise(x_t, found, sigma, sigma_next, fresh(step))
    return Stopped(x_t, levels[-1], x0_from_velocity(x_t, velocity(x_t, levels[-1]), levels[-1]))


@dataclass(frozen=True)
class FewStep:
    """A sampler that walks ``sigmas`` down from pure noise.

    shape: of one sample, ``(f, c, h, w)``. dtype: of the noise, hence of the states (float32; float64 in tests).
    """

    stream_chunks: ClassVar[int] = 1
    """What is made at once goes on in no other iteration."""
    sigmas: tuple[float, ...]
    solver: Solver
    shape: tuple[int, int, int, int]
    guidance_scale: float = 1.0
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(
        cls, section: SamplingSection, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
    ) -> FewStep:
        """The sampler that a recipe describes."""
        return cls(section.resolved(), section.solver, shape, section.guidance_scale, dtype)

    def __call__(self, student: FlowModel, batch: Batch, draw: Draw) -> Rollout:
        """The training rollout: unguided, never past its stop, a random step that is the same for the whole job."""
        stop = draw.shared_index("stop", len(self.sigmas))
        return dataclasses.replace(self, guidance_scale=1.0).sample(student, batch.cond, None, draw, stop)

    def again(self, student: FlowModel, rollout: Rollout, batch: Batch, carry: Carry | None = None) -> Latents:
        """The rollout's ``x0`` once more, with gradient: one forward at the stop. Valid while the student's weights are
        those that made the rollout. A clip that is made at once goes on from no other: ``carry`` is None."""
        velocity = student.velocity(rollout.x_stop, rollout.sigma_stop, batch.cond)
        return x0_from_velocity(rollout.x_stop, velocity, rollout.sigma_stop)

    def sample(self, model: FlowModel, cond: Any, uncond: Any | None, draw: Draw, stop: int | None = None) -> Rollout:
        """Samples from pure noise; ``stop`` (an index into ``sigmas``) ends early with the prediction at that step.

        The noise is a function of the draw's keys alone. One network call a step (of twice the rows when guided).
        """
        last = len(self.sigmas) - 1 if stop is None else stop
        levels = [self._level(step, draw.key) for step in range(last + 1)]
        stopped = walk(
            lambda x_t, sigma: guided_velocity(model, x_t, sigma, cond, uncond, scale=self.guidance_scale),
            draw.normal("noise", self.shape, dtype=self.dtype),
            levels,
            self.solver,
            lambda step: draw.normal(f"renoise.{step}", self.shape, dtype=self.dtype),
        )
        return Rollout(draw.key, last, *stopped)

    def accept(self, rollout: Rollout) -> Rollout:
        """A rollout that somebody else made, if it stands where it says. Raises ValueError if its noise level is not
        that of its stop (it ran past the stop, or another ladder made it)."""
        known = 0 <= rollout.stop < len(self.sigmas)
        expected = self._level(rollout.stop if known else 0, rollout.key)
        if not known or not torch.equal(rollout.sigma_stop.to(expected), expected):
            raise ValueError(
                f"a rollout that stopped at step {rollout.stop} of the ladder {list(self.sigmas)} must stand at that "
                f"step's noise level, and this one stands at {rollout.sigma_stop.unique().tolist()}"
            )
        return rollout

    def _level(self, step: int, key: Keys) -> Sigma:
        wide = torch.promote_types(self.dtype, torch.float32)
        return torch.full((len(key), self.shape[0]), self.sigmas[step], dtype=wide, device=key.device)

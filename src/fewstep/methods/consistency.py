"""Consistency distillation (Song et al., arXiv:2303.01469); with teacher forcing, its causal form (Causal Forcing).

repeat
    x0, cond ~ data            noise ~ N(0, 1)            i ~ uniform(0, ..., N - 1), one a sample for all frames
    x_t    = (1 - sigma_i) x0 + sigma_i noise
    x_next = x_t + (sigma_{i+1} - sigma_i) v_teacher(x_t, sigma_i)              (one guided Euler step; sigma_N = 0)
    target = x0_ema(x_next, sigma_{i+1})                                        (x_next itself where sigma_{i+1} is 0)
    loss   = mean (x0_student(x_t, sigma_i) - target)^2
    step the student, then its average

Causal networks, all three, see the clean blocks of x0 before each block. Student and average start from the teacher.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from fewstep.flow.path import add_noise, x0_from_velocity
from fewstep.flow.sigmas import shift
from fewstep.methods.api import Phase, StudentRollout
from fewstep.methods.sft import draw_noise
from fewstep.models.api import FlowModel
from fewstep.models.blocks import CausalSection
from fewstep.models.guided import guided_velocity
from fewstep.records import Batch, Pair, Target
from fewstep.rng import Draw
from fewstep.section import Section
from fewstep.shapes import Latents, PerSample, Sigma


class ConsistencySection(Section):
    """Consistency distillation: the student agrees with its own average one step of the teacher further on."""

    name: Literal["consistency"] = "consistency"
    nodes: int = Field(default=48, ge=1, le=100_000)
    """Steps of the teacher's grid (N), from noise level 1 down to 0."""
    shift: float = Field(default=5.0, gt=0)
    """Shift of the grid; 1 is none."""
    guidance_scale: float = Field(default=3.0, ge=0)
    """Guidance of the teacher's step: uncond + scale x (cond - uncond); 1 is off."""
    last_interval: bool = True
    """Whether the step from the lowest node to noise level 0 is learnt too; its target is the teacher's x0."""

    @model_validator(mode="after")
    def _an_interval_remains(self) -> ConsistencySection:
        if self.num_intervals < 1:
            raise ValueError("a grid of 1 node has the last interval alone: write last_interval: true, or more nodes")
        return self

    @property
    def num_intervals(self) -> int:
        """Intervals that are learnt."""
        return self.nodes - (not self.last_interval)


class Consistency:
    """Three phases, one for each network that computes."""

    Section = ConsistencySection
    roles = ("student", "teacher", "ema")
    trained = ("student",)
    num_batches = 1
    row_parts = 1

    def __init__(self, section: ConsistencySection):
        self.section = section

    @classmethod
    def of(cls, section: ConsistencySection, rollout: StudentRollout) -> Consistency:
        """The method of a recipe; it has no rollout."""
        return cls(section)

    def phases(self, iteration: int) -> Iterator[Phase]:
        yield Phase("pair", self.pair, gives="pair")
        yield Phase("target", self.target, gives="target")
        yield Phase("student", self.student_losses, trains=("student",))

    def misfits(self, student: CausalSection | None, teacher: CausalSection | None) -> Iterator[str]:
        """What does not go together: the teacher's step depends on the blocks that it sees, and the student
        has the same blocks; windows may differ."""
        cuts = [c and (c.block_frames, c.first_frame_alone) for c in (student, teacher)]
        if cuts[0] != cuts[1]:
            said = ["whole clips" if c is None else f"blocks of {c.block_frames} frames" for c in (student, teacher)]
            yield (
                f"student.causal: the student sees {said[0]}, the teacher {said[1]}; give both the same blocks (a "
                "causal teacher is made by teacher_forcing), or neither any"
            )

    def pair(self, teacher: FlowModel, batch: Batch, draw: Draw) -> Pair:
        x0, section = batch.x0, self.section
        assert x0 is not None
        index = (draw.uniform("index").double() * section.num_intervals).floor()
        levels = interval(index, section.nodes, section.shift)
        sigma, sigma_next, dt = (level[:, None].expand(-1, x0.shape[1]) for level in levels)
        x_t = add_noise(x0, draw_noise(draw, "noise", x0), sigma)
        velocity = guided_velocity(
            teacher, x_t, sigma, batch.cond, batch.uncond, scale=section.guidance_scale, **history(teacher, batch)
        )
        return Pair(batch.key, x_t, sigma, euler_step(x_t, velocity, dt), sigma_next)

    def target(self, ema: FlowModel, pair: Pair, batch: Batch) -> Target:
        return Target(pair.key, predict(ema, pair.x_next, pair.sigma_next, batch))

    def student_losses(self, student: FlowModel, pair: Pair, target: Target, batch: Batch) -> dict[str, PerSample]:
        return {"student/loss": consistency_loss(predict(student, pair.x_t, pair.sigma, batch), target.x0)}


def predict(model: FlowModel, x_t: Latents, sigma: Sigma, batch: Batch) -> Latents:
    """The consistency function: x0 of the network at x_t, which is x_t itself at sigma 0."""
    return x0_from_velocity(x_t, model.velocity(x_t, sigma, batch.cond, **history(model, batch)), sigma)


def history(model: FlowModel, batch: Batch) -> dict[str, Any]:
    """What teacher-forces a causal network; networks that see the whole clip take nothing."""
    return {"clean": batch.x0} if getattr(model, "causal", None) else {}


def interval(
    index: Float[Tensor, "b"], nodes: int, s: float
) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"], Float[Tensor, "b"]]:
    """sigma, the next sigma and their difference dt < 0 at each ``index`` of the grid of ``nodes`` nodes and a final 0.

    The difference is taken in float64 and then stored: that of two stored levels would be off by the rounding of the
    levels, which is large beside a small step.
    """
    sigma, sigma_next = (shift((nodes - i) / nodes, s) for i in (index.double(), index.double() + 1))
    return sigma.float(), sigma_next.float(), (sigma_next - sigma).float()


def euler_step(x_t: Latents, velocity: Latents, dt: Sigma) -> Latents:
    """x_t + dt velocity, in float32 or wider; dt is below 0 on the way to the data."""
    return x0_from_velocity(x_t, velocity, -dt)


def consistency_loss(x0: Latents, target: Latents) -> PerSample:
    """mean (x0 - target)^2 of every sample."""
    return (x0 - target).square().flatten(1).mean(1)

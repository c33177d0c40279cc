"""Regression onto a teacher's ODE: causal initialisation of a student, and knowledge distillation (KD) on images.

CausVid (arXiv:2412.07772, section 4.3) with a bidirectional teacher; Causal Forcing with an autoregressive one.

once, before training
    x0, cond ~ data            noise ~ N(0, 1)
    states, endpoint <- guided teacher, Euler over 48 nodes from noise to 0     (against x0, block by block, if causal)
repeat
    stop ~ uniform             (one a sample; one a block in CausVid's form)
    x_t  = states[stop], at sigma = the student's ladder[stop]
    loss = mean (x0(x_t, sigma, cond | clean blocks of the ground truth) - endpoint)^2
    step the student
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int64
from pydantic import Field
from torch import Tensor

from fewstep.flow.path import x0_from_velocity
from fewstep.methods.api import Phase, StudentRollout
from fewstep.models.api import FlowModel
from fewstep.models.blocks import CausalSection, spread
from fewstep.records import Batch, Trajectory
from fewstep.rng import Draw
from fewstep.rollout.teacher_ode import TeacherODE
from fewstep.section import Section
from fewstep.shapes import Latents, PerSample, Sigma

FrameStops = Int64[Tensor, "b f"]


class TrajectoriesSection(Section):
    """The collection of a teacher's trajectories: made once, kept on the disk, and read at every iteration."""

    count: int = Field(default=1024, ge=1)
    """Trajectories to train on; each has a noise and an item of the data of its own, as far as there are items."""
    path: str | None = None
    """Folder to keep them in; left out, one in ``data.cache``, another for every teacher, grid, data and seed."""
    dtype: Literal["float32", "float16"] = "float32"
    """What they are stored in; ``float16`` halves the disk space and rounds latents to three digits."""
    shard: int = Field(default=64, ge=1)
    """Trajectories of one file: the most that an interruption can lose. They are made at once, or in pieces of
    ``engine.micro_batch``."""


class OdeInitSection(Section):
    """Regression of the student's x0 onto the endpoints of a teacher's trajectories."""

    name: Literal["ode_init"] = "ode_init"
    nodes: int = Field(default=48, ge=1, le=1000)
    """Steps of the teacher; their noise levels must contain the student's, so a multiple of its steps."""
    shift: float = Field(default=5.0, gt=0)
    """Shift of the teacher's grid: that of ``sampling``."""
    guidance_scale: float = Field(default=6.0, ge=0)
    """Guidance of the teacher: uncond + scale x (cond - uncond); 1 is off."""
    stop_per: Literal["sample", "block"] = "sample"
    """``sample``: one noise level a sample; a causal student sees the clean blocks of the ground truth, as its causal
    teacher did. ``block``: one a block, clean among them, and the student sees the trajectory's own blocks at their
    levels, for a causal student of a bidirectional teacher (CausVid)."""
    trajectories: TrajectoriesSection = TrajectoriesSection()
    """The collection of trajectories."""


class OdeInit:
    """One training phase an iteration, on trajectories that the teacher made before."""

    Section = OdeInitSection
    roles = ("student", "teacher")
    trained = ("student",)
    offline = ("teacher",)
    """Roles that are needed before the first iteration alone."""
    num_batches = 1
    row_parts = 1

    def __init__(self, section: OdeInitSection, sigmas: tuple[float, ...]):
        self.section, self.sigmas = section, sigmas
        self.ode = TeacherODE(section.nodes, section.shift, sigmas, section.guidance_scale)
        """What makes the trajectories."""

    @classmethod
    def of(cls, section: OdeInitSection, rollout: StudentRollout) -> OdeInit:
        """The method of a recipe, for the ladder of its rollout. Raises UserError if the grid does not contain it."""
        return cls(section, rollout.sigmas)

    def phases(self, iteration: int) -> Iterator[Phase]:
        yield Phase("student", self.student_losses, trains=("student",))

    def student_losses(self, student: FlowModel, batch: Batch, draw: Draw) -> dict[str, PerSample]:
        trajectory, causal = batch.trajectory, getattr(student, "causal", None)
        assert trajectory is not None
        if self.section.stop_per == "block":
            sigmas, stop = (*self.sigmas, 0.0), self._stop_per_block(causal, trajectory, draw)
        else:
            sigmas, stop = self.sigmas, self._stop_per_sample(trajectory, draw)
        x_t, sigma = stopped(trajectory, sigmas, stop)
        forced = {"clean": batch.x0} if causal is not None and self.section.stop_per == "sample" else {}
        velocity = student.velocity(x_t, sigma, batch.cond, **forced)
        return {"student/loss": regression(x0_from_velocity(x_t, velocity, sigma), trajectory.endpoint)}

    def misfits(self, student: CausalSection | None, teacher: CausalSection | None) -> Iterator[str]:
        """What does not go together: how student and teacher cut clips into blocks, and ``stop_per``."""
        if teacher is not None and student is None:
            yield (
                "student: it sees whole clips, and the teacher's trajectories depend on clean blocks that it is not "
                "shown; write student.causal like the teacher's, or take a bidirectional teacher"
            )
        elif teacher is not None and student is not None and _cut(student) != _cut(teacher):
            yield (
                f"student.causal: it makes blocks of {_cut(student)}, the teacher of {_cut(teacher)}; write the same"
            )
        wanted = "block" if student is not None and teacher is None else "sample"
        if self.section.stop_per != wanted:
            yield (
                f"method.stop_per = {self.section.stop_per}: 'block' is for a causal student of a bidirectional "
                f"teacher, 'sample' for all others; write {wanted}"
            )

    def _stop_per_sample(self, trajectory: Trajectory, draw: Draw) -> FrameStops:
        stop = _index(draw.uniform("stop"), len(self.sigmas))
        return stop[:, None].expand(-1, trajectory.endpoint.shape[1])

    def _stop_per_block(self, causal: CausalSection | None, trajectory: Trajectory, draw: Draw) -> FrameStops:
        """The level below the ladder's last is 0, so that a block meets finished blocks before it, as in sampling."""
        assert causal is not None
        sizes = causal.partition(trajectory.endpoint.shape[1])
        return spread(_index(draw.uniform("stop", (len(sizes),)), len(self.sigmas) + 1), sizes)


def stopped(trajectory: Trajectory, sigmas: tuple[float, ...], stop: FrameStops) -> tuple[Latents, Sigma]:
    """The state of every frame at its ``stop``, an index into ``sigmas``, and its noise level; the index after the last
    state is that of the endpoint."""
    states = torch.cat([trajectory.states, trajectory.endpoint[:, None]], 1)
    index = stop[:, None, :, None, None, None].expand(-1, -1, -1, *states.shape[3:])
    wide = torch.promote_types(states.dtype, torch.float32)
    return states.gather(1, index)[:, 0], _levels(sigmas, states.device, wide)[stop]


def regression(x0: Latents, endpoint: Latents) -> PerSample:
    """mean (x0 - endpoint)^2 of every sample, in float32 or wider. Frames at noise level 0 add nothing to the sum."""
    wide = torch.promote_types(x0.dtype, torch.float32)
    return (x0.to(wide) - endpoint.to(wide)).square().flatten(1).mean(1)


def _index(uniform: Float[Tensor, "b ..."], count: int) -> Int64[Tensor, "b ..."]:
    return (uniform * count).long().clamp(max=count - 1)


@lru_cache(maxsize=8)
def _levels(sigmas: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Float[Tensor, "k"]:
    """On the device once and for all, so that no iteration waits for a copy."""
    return torch.tensor(sigmas, dtype=dtype, device=device)


def _cut(causal: CausalSection) -> str:
    return f"{causal.block_frames} frames" + (" after a first one alone" if causal.first_frame_alone else "")

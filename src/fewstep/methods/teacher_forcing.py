"""Teacher forcing: every noisy block sees the clean blocks of the data before it (Williams and Zipser, 1989).

On video it is compared by Self-Forcing (arXiv:2506.08009), and the first stage of a student in Causal Forcing.

repeat
    x0, cond ~ data            noise ~ N(0, 1)            sigma ~ density, one a block        (as in diffusion forcing)
    clean = x0, or x0 noised: its own noise, a level ~ uniform(0, history_sigma_max) a block
    x_t  = (1 - sigma) x0 + sigma noise
    v    = student(x_t, sigma, cond), block i seeing itself and the blocks < i of clean
    loss = mean over the frames of weight(sigma) (v - (noise - x0))^2
    step the student

A noised history makes the student forgive what it will make itself. Frames that are given stay clean in both halves.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fewstep.flow.path import add_noise
from fewstep.methods.diffusion_forcing import DiffusionForcing, ForcingSection, per_frame
from fewstep.methods.sft import draw_noise
from fewstep.models.api import CausalFlowModel
from fewstep.records import Batch
from fewstep.rng import Draw
from fewstep.shapes import PerSample


class TeacherForcingSection(ForcingSection):
    """Teacher forcing: a causal student sees the clean blocks of the data before."""

    name: Literal["teacher_forcing"] = "teacher_forcing"
    """The method's name in a recipe."""
    history_sigma_max: float = Field(default=0.0, ge=0, le=1)
    """Highest noise level of the clean blocks, drawn uniformly from 0 on for each; 0 leaves them clean."""


class TeacherForcing(DiffusionForcing):
    """One training phase an iteration; the student is causal."""

    Section = TeacherForcingSection
    section: TeacherForcingSection

    def student_losses(self, student: CausalFlowModel, batch: Batch, draw: Draw) -> dict[str, PerSample]:
        x0, highest = batch.x0, self.section.history_sigma_max
        assert x0 is not None
        if highest == 0:
            return self.forced_losses(student, batch, draw, clean=x0)
        levels = highest * draw.uniform("history.sigma", (len(student.causal.partition(x0.shape[1])),))
        sigma = per_frame(levels, x0, student.causal, self.section.given_frames)
        clean = add_noise(x0, draw_noise(draw, "history.noise", x0), sigma)
        return self.forced_losses(student, batch, draw, clean=clean, clean_sigma=sigma)

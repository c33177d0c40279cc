"""Diffusion forcing: every block of a clip at a noise level of its own (Chen et al., arXiv:2407.01392).

repeat
    x0, cond ~ data            noise ~ N(0, 1)
    cond <- the null condition, for a share of the rows
    sigma ~ density, one a block, the same for all frames of it
    x_t  = (1 - sigma) x0 + sigma noise
    v    = student(x_t, sigma, cond), block i seeing the blocks <= i of x_t
    loss = mean over the frames of weight(sigma) (v - (noise - x0))^2
    step the student

Frames that are given (image to video) enter clean, at sigma 0, and leave the loss.
"""

from __future__ import annotations

from typing import Any, Literal

from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import pad

from fewstep.errors import UserError
from fewstep.flow.sigmas import Grid, SigmaDensity
from fewstep.flow.weighting import bsmntw
from fewstep.methods.api import StudentRollout
from fewstep.methods.sft import SFT, draw_noise, drop_condition, flow_matching_error
from fewstep.models.api import CausalFlowModel
from fewstep.models.blocks import CausalSection, spread
from fewstep.records import Batch
from fewstep.rng import Draw
from fewstep.section import Section
from fewstep.shapes import Latents, PerSample, Sigma


class ForcingSection(Section):
    """Flow matching on clips with one noise level a block."""

    name: str
    """The method's name in a recipe."""
    sigma: SigmaDensity = Grid(nodes=1000, shift=5.0)
    """Density of the noise level, one draw a block."""
    weighting: Literal["bsmntw", "none"] = "bsmntw"
    """Weight of a noise level in the loss: ``bsmntw`` is a bell of mean 1 over the shifted levels, 0 at both ends."""
    cond_dropout: float = Field(default=0.1, ge=0, le=1)
    """Share of the rows whose condition is replaced by the null condition."""
    given_frames: int = Field(default=0, ge=0)
    """The first frames, whole blocks of them, that are given clean and not learnt (1 for image to video)."""

    @model_validator(mode="after")
    def _weighted_levels_have_a_shift(self) -> ForcingSection:
        if self.weighting == "bsmntw" and self.shift is None:
            raise ValueError(
                f"weighting bsmntw is made for the levels of a shift, and the density '{self.sigma.name}' has none: "
                "write the density grid, shifted or logit_normal, or weighting: none"
            )
        return self

    @property
    def shift(self) -> float | None:
        """The shift of the density; None where it has none."""
        return getattr(self.sigma, "shift", None)


class DiffusionForcingSection(ForcingSection):
    """Diffusion forcing: a causal student sees the noisy blocks before."""

    name: Literal["diffusion_forcing"] = "diffusion_forcing"
    """The method's name in a recipe."""


class DiffusionForcing(SFT):
    """One training phase an iteration, as in flow matching on data; the student is causal."""

    Section = DiffusionForcingSection
    section: ForcingSection
    needs_causal = True
    """Whether the student must be causal."""

    def __init__(self, section: ForcingSection):
        self.section = section

    @classmethod
    def of(cls, section: ForcingSection, rollout: StudentRollout) -> DiffusionForcing:
        """The method of a recipe; it has no rollout."""
        return cls(section)

    def student_losses(self, student: CausalFlowModel, batch: Batch, draw: Draw) -> dict[str, PerSample]:
        return self.forced_losses(student, batch, draw)

    def forced_losses(self, student: CausalFlowModel, batch: Batch, draw: Draw, **history: Any) -> dict[str, PerSample]:
        """The loss with what the blocks see before them: their like, or the clean blocks of ``history``."""
        section, x0, given = self.section, batch.x0, self.section.given_frames
        assert x0 is not None
        check_given(given, x0.shape[1], student.causal)
        u = draw.uniform("sigma", (len(student.causal.partition(x0.shape[1])),))
        sigma = per_frame(section.sigma.sigma(u.flatten()).view_as(u), x0, student.causal, given)
        cond, noise = drop_condition(batch, draw, section.cond_dropout), draw_noise(draw, "noise", x0)
        error = flow_matching_error(student, x0, noise, sigma, cond, **history)
        if section.weighting == "bsmntw":
            assert section.shift is not None
            error = bsmntw(sigma, section.shift) * error
        return {"student/loss": error[:, given:].mean(1)}


def per_frame(levels: Float[Tensor, "b blocks"], x0: Latents, causal: CausalSection, given: int) -> Sigma:
    """The noise levels of the blocks as those of their frames; the ``given`` first frames are clean."""
    sigma = spread(levels, causal.partition(x0.shape[1]))
    return pad(sigma[:, given:], (given, 0))


def check_given(given: int, num_frames: int, causal: CausalSection) -> None:
    """Raises UserError unless ``given`` frames are whole blocks of a clip and leave a block to be made."""
    ends = [causal.start(block) for block in range(len(causal.partition(num_frames)))]
    if given not in ends:
        raise UserError(
            f"method.given_frames = {given}: of {num_frames} latent frames, whole blocks can be given, all but the "
            f"last; write one of {ends}"
        )

"""Flow matching on data: supervised fine-tuning, and the way a teacher is made (Lipman et al., arXiv:2210.02747).

repeat
    x0, cond ~ data            sigma ~ density            noise ~ N(0, 1)
    cond <- the null condition, for a share of the rows       (so that guidance is possible later)
    x_t  = (1 - sigma) x0 + sigma noise
    loss = mean (v(x_t, sigma, cond) - (noise - x0))^2
    step the student
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import pad

from fewstep.flow import path
from fewstep.flow.sigmas import LogitNormal, SigmaDensity
from fewstep.methods.api import Phase, StudentRollout
from fewstep.models.api import FlowModel
from fewstep.records import Batch, select
from fewstep.rng import Draw
from fewstep.section import Section
from fewstep.shapes import Latents, PerSample, Sigma


class SFTSection(Section):
    """Flow matching on data."""

    name: Literal["sft"] = "sft"
    sigma: SigmaDensity = LogitNormal()
    """Density of the noise level, one draw a sample."""
    cond_dropout: float = Field(default=0.1, ge=0, le=1)
    """Share of the rows whose condition is replaced by the null condition."""


class SFT:
    """One training phase an iteration."""

    Section = SFTSection
    roles = ("student",)
    trained = ("student",)
    num_batches = 1
    row_parts = 1

    def __init__(self, section: SFTSection):
        self.section = section

    @classmethod
    def of(cls, section: SFTSection, rollout: StudentRollout) -> SFT:
        """The method of a recipe; flow matching on data has no rollout."""
        return cls(section)

    def phases(self, iteration: int) -> Iterator[Phase]:
        yield Phase("student", self.student_losses, trains=("student",))

    def student_losses(self, student: FlowModel, batch: Batch, draw: Draw) -> dict[str, PerSample]:
        assert batch.x0 is not None
        cond = drop_condition(batch, draw, self.section.cond_dropout)
        sigma = draw_sigma(self.section.sigma, draw, "sigma", batch.x0)
        noise = draw_noise(draw, "noise", batch.x0)
        return {"student/loss": flow_matching_loss(student, batch.x0, noise, sigma, cond)}


def flow_matching_loss(
    model: FlowModel, x0: Latents, noise: Latents, sigma: Sigma, cond: Any, *, given: int = 0
) -> PerSample:
    """mean (v - (noise - x0))^2 of every sample over the frames after the ``given`` first, in float32 or wider."""
    return flow_matching_error(model, x0, noise, sigma, cond)[:, given:].mean(1)


def flow_matching_error(
    model: FlowModel, x0: Latents, noise: Latents, sigma: Sigma, cond: Any, **forced: Any
) -> Float[Tensor, "b f"]:
    """mean (v - (noise - x0))^2 of every frame, in float32 or wider; ``forced`` is the history of a causal network."""
    velocity = model.velocity(path.add_noise(x0, noise, sigma), sigma, cond, **forced)
    return (velocity - path.velocity(x0, noise)).square().flatten(2).mean(2)


def drop_condition(batch: Batch, draw: Draw, share: float) -> Any:
    """The conditions of the batch, a ``share`` of the rows with the null one instead (where the data have it)."""
    if not share or batch.uncond is None:
        return batch.cond
    return select(draw.uniform("cond_dropout") < share, batch.uncond, batch.cond)


def draw_sigma(density: SigmaDensity, draw: Draw, name: str, x0: Latents, given: int = 0) -> Sigma:
    """One noise level a sample, the same for all its frames but the ``given`` first, which are clean."""
    return pad(density.sigma(draw.uniform(name))[:, None].expand(-1, x0.shape[1] - given), (given, 0))


def draw_noise(draw: Draw, name: str, x0: Latents) -> Latents:
    """Standard normal noise in the shape and precision of ``x0``."""
    return draw.normal(name, tuple(x0.shape[1:]), dtype=x0.dtype)

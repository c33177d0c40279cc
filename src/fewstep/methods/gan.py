"""The adversarial term that sharpens a distilled student (DMD2, arXiv:2405.14867, section 4.3).

    real, fake = x0 of the data, x0 of the student, each noised at a sigma of its own
    D(x)       = discriminator(features of the critic, or of the teacher, at x)
    the discriminator descends   softplus(-D(real)) + softplus(D(fake)) + r1_weight R1
    the student descends         softplus(-D(fake))
    R1         = ((D(real + a n) - D(real)) / a)^2,  n ~ N(0, 1): the squared gradient at real, by a finite difference

With the critic's features the discriminator's loss also trains the critic up to the layer that is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field
from torch.nn.functional import softplus

from fewstep.flow.path import add_noise
from fewstep.flow.sigmas import SigmaDensity, Uniform
from fewstep.methods.sft import draw_noise, draw_sigma
from fewstep.models.api import FlowModel
from fewstep.records import concat
from fewstep.rng import Draw
from fewstep.section import Section
from fewstep.shapes import Latents, PerSample, Sigma, Tokens

Judge = Callable[[tuple[Tokens, ...]], PerSample]
"""The role of the discriminator: one logit a sample, positive for real, from the features of some layers."""


class GANSection(Section):
    """The adversarial term; needs real data and a discriminator."""

    features: Literal["critic", "teacher"] = "critic"
    """Whose features the discriminator reads."""
    layers: tuple[int, ...] | None = Field(default=None, min_length=1)
    """Blocks whose features are read, ascending from 0; the middle block when left out."""
    student_weight: float = Field(default=1e-3, ge=0)
    """Weight of softplus(-D(fake)) in the student's gradient."""
    discriminator_weight: float = Field(default=1e-2, ge=0)
    """Weight of the discriminator's whole loss, R1 included, in the critic phase."""
    sigma: SigmaDensity = Uniform()
    """Density of the noise level at which real and fake are compared."""
    share_noise: bool = False
    """True: real and fake of a row get the same noise level and noise."""
    r1_weight: float = Field(default=0.0, ge=0)
    """Weight of the approximate R1 penalty beside the two softplus terms."""
    r1_step: float = Field(default=0.1, gt=0)
    """Length a of the finite difference in the R1 penalty."""


class GAN:
    """The two sides of the adversarial game, as losses of every sample."""

    def __init__(self, section: GANSection):
        self.section = section

    def reads(self, critic: FlowModel, teacher: FlowModel) -> FlowModel:
        """The network whose features the discriminator reads."""
        return critic if self.section.features == "critic" else teacher

    def discriminator_losses(
        self,
        discriminator: Judge,
        network: FlowModel,
        real: Latents,
        fake: Latents,
        cond: Any,
        draw: Draw,
        *,
        given: int = 0,
    ) -> dict[str, PerSample]:
        """What the discriminator (and the critic below it) descends, weights included; the ``given`` first frames are
        those of the data in both, and clean."""
        section, fakes = self.section, "gan.real" if self.section.share_noise else "gan.fake"
        real_t, real_sigma = self._noised(real, draw, "gan.real", given)
        fake_t, fake_sigma = self._noised(fake, draw, fakes, given)
        states, sigmas, conds = [real_t, fake_t], [real_sigma, fake_sigma], [cond, cond]
        if section.r1_weight:
            states.append(real_t + section.r1_step * draw_noise(draw, "gan.r1", real))
            states[-1][:, :given] = real_t[:, :given]
            sigmas.append(real_sigma)
            conds.append(cond)
        logits = self._logits(discriminator, network, torch.cat(states), torch.cat(sigmas), concat(conds))
        real_logits, fake_logits, *moved = logits.chunk(len(states))
        losses = {"discriminator/loss": discriminator_loss(real_logits, fake_logits)}
        if moved:
            losses["discriminator/r1"] = section.r1_weight * approximate_r1(real_logits, moved[0], section.r1_step)
        return {name: section.discriminator_weight * loss for name, loss in losses.items()}

    def student_loss(
        self, discriminator: Judge, network: FlowModel, fake: Latents, cond: Any, draw: Draw, *, given: int = 0
    ) -> PerSample:
        """What the student descends, weight included; differentiable in ``fake``."""
        fake_t, sigma = self._noised(fake, draw, "gan.student", given)
        logits = self._logits(discriminator, network, fake_t, sigma, cond)
        return self.section.student_weight * student_loss(logits)

    def _noised(self, x0: Latents, draw: Draw, name: str, given: int) -> tuple[Latents, Sigma]:
        sigma = draw_sigma(self.section.sigma, draw, f"{name}.sigma", x0, given)
        return add_noise(x0, draw_noise(draw, f"{name}.noise", x0), sigma), sigma

    def _logits(self, discriminator: Judge, network: FlowModel, x_t: Latents, sigma: Sigma, cond: Any) -> PerSample:
        layers = self.section.layers or (network.num_layers // 2,)
        return discriminator(network.features(x_t, sigma, cond, layers))


def discriminator_loss(real_logits: PerSample, fake_logits: PerSample) -> PerSample:
    """softplus(-D(real)) + softplus(D(fake)): 2 ln 2 where D is 0."""
    return softplus(-real_logits) + softplus(fake_logits)


def student_loss(fake_logits: PerSample) -> PerSample:
    """softplus(-D(fake)), non-saturating: ln 2 where D is 0."""
    return softplus(-fake_logits)


def approximate_r1(logits: PerSample, moved_logits: PerSample, step: float) -> PerSample:
    """((D(x + a n) - D(x)) / a)^2: for a linear D = w . x it is (w . n)^2, whose mean is |w|^2."""
    return ((moved_logits - logits) / step).square()

"""SiD, score identity distillation (Zhou et al., arXiv:2404.04057), in place of distribution matching.

    repeat
        K times:  the critic descends flow matching on the student's samples           (all of it as in DMD2)
        x_t  <- x0 noised at one sigma a sample
        loss  = mean (x0_t - x0_c) ((x0_t - x0) - alpha (x0_t - x0_c)) / scale
                where x0_t, x0_c = x0 of the teacher (guided) and of the critic at x_t,  scale = mean |x0 - x0_t|
        g    <- numel x d loss / d x0, through both networks and x_t, the scale held fixed
        student descends  x0 . g / numel, x0 computed again with gradient

Where DMD takes the difference of the scores for the gradient, SiD differentiates a divergence of them: a student update
costs two backward passes through the networks more, and no network receives a gradient from them.
"""

from __future__ import annotations

from typing import Literal

import torch

from fewstep.methods.api import input_gradient
from fewstep.methods.dmd2 import DMD2, DMD2Section, Predictions, mean_distance
from fewstep.shapes import Latents, PerSample


class SiDSection(DMD2Section):
    """Score identity distillation with a trained critic."""

    name: Literal["sid"] = "sid"  # type: ignore[assignment]
    alpha: float = 1.0
    """Weight of the squared difference of the scores; 1 leaves (x0_t - x0_c)(x0_c - x0)."""


class SiD(DMD2):
    """The schedule, the critic and the adversarial term of DMD2, another gradient."""

    Section = SiDSection
    section: SiDSection

    def matching(self, x0: Latents, predict: Predictions) -> tuple[Latents, dict[str, PerSample]]:
        """The gradient of the loss through both predictions, and values for the log."""

        def loss_of(x0: Latents) -> PerSample:
            x0_teacher, x0_critic = predict(x0)
            return sid_loss(x0, x0_teacher=x0_teacher, x0_critic=x0_critic, alpha=self.section.alpha)

        gradient, loss = input_gradient(loss_of, x0)
        return gradient, {"student/sid": loss, "student/sid_rms": gradient.square().flatten(1).mean(1).sqrt()}


def sid_loss(
    x0: Latents, *, x0_teacher: Latents, x0_critic: Latents, alpha: float = 1.0, eps: float = 1e-6
) -> PerSample:
    """mean (x0_t - x0_c) ((x0_t - x0) - alpha (x0_t - x0_c)) / scale of every sample, in float32 or wider.

    The scale is that of DMD, max(mean over the sample of |x0 - x0_t|, eps), without gradient.
    """
    wide = torch.promote_types(x0.dtype, torch.float32)
    x0, x0_teacher, x0_critic = x0.to(wide), x0_teacher.to(wide), x0_critic.to(wide)
    scale = mean_distance(x0, x0_teacher).detach().clamp_min(eps)
    difference = x0_teacher - x0_critic
    return (difference * ((x0_teacher - x0) - alpha * difference) / scale).flatten(1).mean(1)

"""DMD2: improved distribution matching distillation (Yin et al., arXiv:2405.14867).

    repeat
        K times:
            x0 <- rollout of the student, stopped at a random step         (backward simulation)
            critic descends  flow matching on x0 as if it were data        (+ the discriminator's loss)
        x_t <- x0 noised at one sigma a sample
        g   <- (x0_critic(x_t) - x0_teacher(x_t)) / mean |x0 - x0_teacher(x_t)|     (teacher guided, critic not)
        student descends  x0 . g / numel, x0 computed again with gradient  (+ softplus(-D(x0)))

The teacher is frozen and may be larger than the others. The critic is the score of what the student makes now. Frames
that were given to the student stay clean in x_t: the predictions agree there, and so g is 0.

Rollouts that go on across iterations (LongLive, arXiv:2509.22622): each of the K batches has streams of its own, which
a chunk of every iteration continues; so the scored batch passes through every chunk. The frames that a chunk has from
the one before it are noised with the others, and g is 0 there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from fewstep.flow.path import add_noise, x0_from_velocity
from fewstep.flow.sigmas import SigmaDensity, Uniform
from fewstep.methods.api import Phase, StudentRollout, descend, input_gradient
from fewstep.methods.gan import GAN, GANSection
from fewstep.methods.sft import draw_noise, draw_sigma, flow_matching_loss
from fewstep.models.api import FlowModel
from fewstep.models.guided import guided_velocity
from fewstep.records import Batch, Rollout, Scores
from fewstep.rng import Draw
from fewstep.rollout.carry import Carry
from fewstep.section import Section
from fewstep.shapes import Latents, PerSample

Predictions = Callable[[Latents], tuple[Latents, Latents]]
"""From the samples to the clean latents that the teacher and the critic see in them, noised; differentiable."""


class DMD2Section(Section):
    """Distribution matching distillation with a trained critic."""

    name: Literal["dmd2"] = "dmd2"
    critic_updates: int = Field(default=5, ge=1)
    """Critic updates per student update (K)."""
    critic_batches: Literal["fresh", "separate", "shared"] = "fresh"
    """``fresh``: K rollouts, the last one also scored. ``separate``: one more, for the student. ``shared``: one rollout
    in all, each critic update on its own K-th of the rows."""
    critic_sigma: SigmaDensity = Uniform()
    """Density of the noise level in the critic's flow matching."""
    critic_warmup_updates: int = Field(default=0, ge=0)
    """Critic updates before the first iteration with a student update, whose own critic updates come on top."""
    score_sigma: SigmaDensity = Uniform(low=0.02, high=0.98)
    """Density of the noise level at which teacher and critic are compared."""
    guidance_scale: float = Field(default=1.0, ge=0)
    """Guidance of the teacher's score: uncond + scale x (cond - uncond); 1 is off."""
    guidance_rescale: float = Field(default=0.0, ge=0, le=1)
    """How far the guided score is brought back to the standard deviation of the conditional one (arXiv:2305.08891)."""
    gan: GANSection | None = None
    """The adversarial term; left out, there is none and no discriminator."""


class DMD2:
    """K critic updates, then one student update, against scores that are computed once."""

    Section = DMD2Section
    streams = True
    """Its rollouts can go on across iterations."""

    def __init__(self, section: DMD2Section, rollout: StudentRollout):
        self.section, self.rollout_of = section, rollout
        self.gan = GAN(section.gan) if section.gan else None
        head = ("discriminator",) if self.gan else ()
        self.roles = ("student", "teacher", "critic", *head)
        self.trained = ("student", "critic", *head)
        self.critic_phase = ("critic", *head)
        shared, extra = section.critic_batches == "shared", section.critic_batches == "separate"
        self.num_batches = 1 if shared else section.critic_updates + extra
        self.row_parts = section.critic_updates if shared else 1

    @classmethod
    def of(cls, section: DMD2Section, rollout: StudentRollout) -> DMD2:
        """The method of a recipe."""
        return cls(section, rollout)

    def phases(self, iteration: int) -> Iterator[Phase]:
        """An iteration of the warm-up has critic updates alone; streams go on in all batches, updates or not."""
        num_critic, mode = self.section.critic_updates, self.section.critic_batches
        warm_up = self.section.critic_warmup_updates - iteration * num_critic
        updates = range(min(num_critic, warm_up) if warm_up > 0 else num_critic)
        if mode == "shared":
            yield self._rolls("rollout")
            for k in updates:
                yield Phase(f"critic.{k}", self.critic_losses, trains=self.critic_phase, part=(k, num_critic))
        else:
            for k in updates:
                yield self._rolls(f"rollout.{k}", k)
                yield Phase(f"critic.{k}", self.critic_losses, trains=self.critic_phase, batch=k)
            if warm_up <= 0 or self.rollout_of.stream_chunks > 1:
                for k in range(len(updates), self.num_batches):
                    yield self._rolls(f"rollout.{k}", k)
        if warm_up > 0:
            return
        last = self.num_batches - 1
        yield Phase("scores", self.scores, gives="scores", batch=last)
        yield Phase("student", self.student_losses, trains=("student",), batch=last)

    def _rolls(self, name: str, batch: int = 0) -> Phase:
        """Makes samples: clips of their own, or the next chunk of streams."""
        if self.rollout_of.stream_chunks == 1:
            return Phase(name, self.rollout, gives="rollout", batch=batch)
        return Phase(name, self.chunk, gives="rollout", batch=batch, carries=True)

    def rollout(self, student: FlowModel, batch: Batch, draw: Draw) -> Rollout:
        return self.rollout_of(student, batch, draw)

    def chunk(self, student: FlowModel, batch: Batch, draw: Draw, carry: Carry | None) -> tuple[Rollout, Carry | None]:
        return self.rollout_of.chunk(student, batch, draw, carry)  # type: ignore[attr-defined]

    def critic_losses(
        self, critic: FlowModel, teacher: FlowModel, discriminator: Any, rollout: Rollout, batch: Batch, draw: Draw
    ) -> dict[str, PerSample]:
        x0, clean = rollout.x0, rollout.clean
        sigma = draw_sigma(self.section.critic_sigma, draw, "sigma", x0, clean)
        noise = draw_noise(draw, "noise", x0)
        losses = {"critic/loss": flow_matching_loss(critic, x0, noise, sigma, batch.cond, given=rollout.given)}
        if self.gan:
            assert batch.x0 is not None
            losses |= self.gan.discriminator_losses(
                discriminator, self.gan.reads(critic, teacher), batch.x0, x0, batch.cond, draw, given=clean
            )
        return losses

    def scores(
        self, teacher: FlowModel, critic: FlowModel, discriminator: Any, rollout: Rollout, batch: Batch, draw: Draw
    ) -> Scores:
        x0, clean = rollout.x0, rollout.clean
        gradient, losses = self.matching(x0, self.predictions(teacher, critic, rollout, batch, draw))
        losses |= moments(rollout)
        if self.gan:
            gan, network = self.gan, self.gan.reads(critic, teacher)
            ascent, losses["student/gan"] = input_gradient(
                lambda fake: gan.student_loss(discriminator, network, fake, batch.cond, draw, given=clean), x0
            )
            gradient = gradient + ascent
        gradient[:, : rollout.given] = 0
        return Scores(rollout.key, gradient, losses)

    def predictions(
        self, teacher: FlowModel, critic: FlowModel, rollout: Rollout, batch: Batch, draw: Draw
    ) -> Predictions:
        """At one noise level a sample; the teacher guided, the critic not."""
        section, cond, uncond = self.section, batch.cond, batch.uncond
        sigma = draw_sigma(section.score_sigma, draw, "sigma", rollout.x0, rollout.clean)
        noise = draw_noise(draw, "noise", rollout.x0)

        def predict(x0: Latents) -> tuple[Latents, Latents]:
            x_t = add_noise(x0, noise, sigma)
            guided = guided_velocity(
                teacher, x_t, sigma, cond, uncond, scale=section.guidance_scale, rescale=section.guidance_rescale
            )
            plain = critic.velocity(x_t, sigma, cond)
            return x0_from_velocity(x_t, guided, sigma), x0_from_velocity(x_t, plain, sigma)

        return predict

    def matching(self, x0: Latents, predict: Predictions) -> tuple[Latents, dict[str, PerSample]]:
        """The gradient that makes teacher and critic agree, and values for the log."""
        x0_teacher, x0_critic = predict(x0)
        gradient = dmd_gradient(x0, x0_teacher=x0_teacher, x0_critic=x0_critic)
        return gradient, {"student/dmd_rms": gradient.square().flatten(1).mean(1).sqrt()}

    def student_losses(
        self, student: FlowModel, rollout: Rollout, scores: Scores, batch: Batch, carry: Carry | None = None
    ) -> dict[str, PerSample]:
        return {"student/loss": descend(self.rollout_of.again(student, rollout, batch, carry), scores.gradient)}


def dmd_gradient(x0: Latents, *, x0_teacher: Latents, x0_critic: Latents, eps: float = 1e-6) -> Latents:
    """(x0_critic - x0_teacher) / max(mean over the sample of |x0 - x0_teacher|, eps), in float32 or wider."""
    wide = torch.promote_types(x0.dtype, torch.float32)
    x0, x0_teacher, x0_critic = x0.to(wide), x0_teacher.to(wide), x0_critic.to(wide)
    scale = mean_distance(x0, x0_teacher)
    return (x0_critic - x0_teacher) / scale.clamp_min(eps)


def mean_distance(x0: Latents, x0_teacher: Latents) -> Float[Tensor, "b 1 1 1 1"]:
    """mean over the sample of |x0 - x0_teacher|."""
    return (x0 - x0_teacher).abs().mean(dim=(1, 2, 3, 4), keepdim=True)


def moments(rollout: Rollout) -> dict[str, PerSample]:
    """Mean and standard deviation of what the student made, named by the step at which the rollout stopped."""
    x0 = rollout.x0[:, rollout.given :].flatten(1)
    return {f"latents/mean.stop{rollout.stop}": x0.mean(1), f"latents/std.stop{rollout.stop}": x0.std(1)}

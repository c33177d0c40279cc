"""What the phases of DMD2 compute, with real tiny networks in float64, against the algorithm box written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.flow.sigmas import Shifted, Uniform
from fewstep.methods.gan import GANSection
from fewstep.models.discriminator import Discriminator
from fewstep.models.wan.conditioner import LabelCond
from fewstep.records import Batch, Rollout, rows
from fewstep.rng import Draw
from tests.engines.worlds import LADDER, NUMEL, SHAPE, dmd2, network
from tests.models.tiny import randomise

ROWS, DOUBLE = 5, torch.float64
LABEL = torch.tensor([3, 0, 4, 1, 2])


def latents(seed: int) -> Tensor:
    return torch.randn(ROWS, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def batch() -> Batch:
    return Batch(torch.arange(ROWS), latents(1), LabelCond(LABEL), LabelCond(torch.full((ROWS,), 5)))


def rollout() -> Rollout:
    return Rollout(torch.arange(ROWS), 1, latents(2), torch.full((ROWS, 1), LADDER[1], dtype=DOUBLE), latents(3))


def draw(phase: str) -> Draw:
    return Draw(seed=3, phase=phase, iteration=7, key=torch.arange(ROWS))


@pytest.fixture(scope="module")
def teacher() -> Any:
    return network(1).double().requires_grad_(False)


@pytest.fixture(scope="module")
def critic() -> Any:
    return network(2).double()


@pytest.fixture(scope="module")
def head() -> Any:
    return randomise(Discriminator(48), 3).double()


def noised(x0: Tensor, phase: str, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """x_t, sigma and noise of a phase that draws them uniformly in sigma, as it must."""
    sigma = low + (high - low) * draw(phase).uniform("sigma").double()
    noise = draw(phase).normal("noise", SHAPE, dtype=DOUBLE)
    level = sigma.float().double().view(-1, 1, 1, 1, 1)
    return (1 - level) * x0 + level * noise, sigma.float()[:, None], noise


def x0_of(model: Any, x_t: Tensor, sigma: Tensor, cond: LabelCond) -> Tensor:
    return x_t - sigma.double()[..., None, None, None] * model.velocity(x_t, sigma, cond)


def test_the_critic_descends_flow_matching_on_the_students_samples(teacher, critic):
    """It is the loss of flow matching on data: same inputs, target and weight; with the positive condition."""
    losses = dmd2(DOUBLE, gan=None).critic_losses(critic, teacher, None, rollout(), batch(), draw("critic.1"))
    x0 = rollout().x0
    x_t, sigma, noise = noised(x0, "critic.1", 0.0, 1.0)
    expected = (critic.velocity(x_t, sigma, batch().cond) - (noise - x0)).square().flatten(1).mean(1)
    torch.testing.assert_close(losses["critic/loss"], expected, rtol=1e-12, atol=0)
    assert list(losses) == ["critic/loss"]


def test_the_critics_loss_is_the_error_of_x0_over_sigma_squared(teacher, critic):
    """Invariant 46, through the method."""
    method = dmd2(DOUBLE, gan=None, critic_sigma=Uniform(low=0.2, high=0.8))
    losses = method.critic_losses(critic, teacher, None, rollout(), batch(), draw("critic.0"))
    x_t, sigma, _ = noised(rollout().x0, "critic.0", 0.2, 0.8)
    error = x0_of(critic, x_t, sigma, batch().cond) - rollout().x0
    level = sigma.double().view(-1, 1, 1, 1, 1)
    torch.testing.assert_close(losses["critic/loss"], (error / level).square().flatten(1).mean(1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@torch.no_grad()
def test_the_scores_are_the_guided_teachers_and_the_plain_critics(teacher, critic, scale):
    """PITFALLS, guidance, normaliser: uncond + w (cond - uncond) for the teacher, none for the critic; per sample."""
    method = dmd2(DOUBLE, gan=None, guidance_scale=scale, score_sigma=Uniform(low=0.3, high=0.7))
    scores = method.scores(teacher, critic, None, rollout(), batch(), draw("scores"))
    x0, cond, uncond = rollout().x0, batch().cond, batch().uncond
    x_t, sigma, _ = noised(x0, "scores", 0.3, 0.7)
    plain, null = x0_of(teacher, x_t, sigma, cond), x0_of(teacher, x_t, sigma, uncond)
    x0_teacher, x0_critic = null + scale * (plain - null), x0_of(critic, x_t, sigma, cond)
    distance = (x0 - x0_teacher).abs().flatten(1).mean(1).view(-1, 1, 1, 1, 1)
    expected = (x0_critic - x0_teacher) / distance
    torch.testing.assert_close(scores.gradient, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(scores.losses["student/dmd_rms"], expected.square().flatten(1).mean(1).sqrt())
    assert torch.equal(scores.key, torch.arange(ROWS))


@torch.no_grad()
def test_there_is_one_score_sigma_a_sample_within_its_bounds(teacher, critic):
    asked = []

    class Asked:
        geometry, num_layers, width = critic.geometry, 2, 48
        features = critic.features

        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            asked.append(sigma)
            return critic.velocity(x_t, sigma, cond)

    density = Shifted(shift=5.0, low=0.02, high=0.98, bounds="clamped")
    method = dmd2(DOUBLE, gan=None, score_sigma=density)
    method.scores(teacher, Asked(), None, rollout(), batch(), draw("scores"))
    u = draw("scores").uniform("sigma").double()
    torch.testing.assert_close(asked[0][:, 0].double(), (5 * u / (1 + 4 * u)).clamp(0.02, 0.98), rtol=1e-6, atol=0)
    assert asked[0].dtype == torch.float32


@torch.no_grad()
def test_a_critic_that_equals_an_unguided_teacher_gives_no_gradient_at_all(teacher):
    """Invariant 45."""
    method = dmd2(DOUBLE, gan=None, guidance_scale=1.0)
    twin = network(1).double()
    scores = method.scores(teacher, twin, None, rollout(), batch(), draw("scores"))
    assert torch.equal(scores.gradient, torch.zeros_like(scores.gradient))


@pytest.mark.parametrize("features", ["critic", "teacher", None])
@torch.no_grad()
def test_a_samples_gradient_does_not_depend_on_its_batch_mates(teacher, critic, head, features):
    """Invariant 45."""
    method = dmd2(DOUBLE, gan=GANSection(features=features, student_weight=0.3) if features else None)
    first = slice(0, 1)
    alone = method.scores(
        teacher, critic, head, rows(rollout(), first), rows(batch(), first), draw("scores").rows(first)
    )
    wild = rollout().x0.clone()
    wild[1:] *= 1e3
    mates = Rollout(torch.arange(ROWS), 1, latents(2), rollout().sigma_stop, wild)
    together = method.scores(teacher, critic, head, mates, batch(), draw("scores"))
    torch.testing.assert_close(together.gradient[:1], alone.gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("features", ["critic", "teacher"])
def test_the_adversarial_gradient_is_added_on_the_scale_of_the_other(teacher, critic, head, features):
    """The student's mean loss is x0 . g / numel plus the mean of weight softplus(-D(x0)): the gradients add up so."""
    section = GANSection(features=features, student_weight=0.3)
    with torch.no_grad():
        scores = dmd2(DOUBLE, gan=section).scores(teacher, critic, head, rollout(), batch(), draw("scores"))
        plain = dmd2(DOUBLE, gan=None).scores(teacher, critic, None, rollout(), batch(), draw("scores"))
    fake = rollout().x0.requires_grad_()
    sigma = draw("scores").uniform("gan.student.sigma")
    level = sigma.double().view(-1, 1, 1, 1, 1)
    x_t = (1 - level) * fake + level * draw("scores").normal("gan.student.noise", SHAPE, dtype=DOUBLE)
    model = critic if features == "critic" else teacher
    logits = head(model.features(x_t, sigma[:, None], batch().cond, (1,)))
    loss = 0.3 * torch.log1p(torch.exp(-logits))
    (gradient,) = torch.autograd.grad(loss.sum(), fake)
    torch.testing.assert_close(scores.gradient, plain.gradient + NUMEL * gradient, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(scores.losses["student/gan"], loss.detach(), rtol=1e-10, atol=0)
    assert all(p.grad is None for net in (critic, head, teacher) for p in net.parameters())


@pytest.mark.parametrize("features", ["critic", "teacher"])
def test_the_discriminators_loss_reaches_the_critic_only_where_its_features_are_read(teacher, critic, head, features):
    method = dmd2(DOUBLE, gan=GANSection(features=features, discriminator_weight=0.5))
    losses = method.critic_losses(critic, teacher, head, rollout(), batch(), draw("critic.0"))
    weight = critic.blocks[0].self_attention.q.weight
    (gradient,) = torch.autograd.grad(losses["discriminator/loss"].sum(), weight, allow_unused=True, retain_graph=True)
    assert (gradient is not None) == (features == "critic")
    own = torch.autograd.grad(losses["discriminator/loss"].sum(), list(head.parameters()))
    assert all(value.abs().max() > 0 for value in own)


def test_the_student_descends_the_gradient_through_x0_at_its_stop():
    """Invariant 45: d loss / d weights is that of sum(x0 g) / numel of the batch."""
    student, method = network(0).double(), dmd2(DOUBLE, gan=None)
    made = rollout()
    with torch.no_grad():
        made = Rollout(
            made.key, 1, made.x_stop, made.sigma_stop, x0_of(student, made.x_stop, made.sigma_stop, batch().cond)
        )
        scores = method.scores(network(1).double(), network(2).double(), None, made, batch(), draw("scores"))
    losses = method.student_losses(student, made, scores, batch())
    assert list(losses) == ["student/loss"]
    weights = list(student.parameters())
    found = torch.autograd.grad(losses["student/loss"].mean(), weights)
    x0 = x0_of(student, made.x_stop, made.sigma_stop, batch().cond)
    expected = torch.autograd.grad(x0, weights, grad_outputs=scores.gradient / x0.numel())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)


@torch.no_grad()
def test_the_latents_moments_are_logged_by_stop(teacher, critic):
    """PITFALLS, curves: latent mean and std per stop."""
    losses = dmd2(DOUBLE, gan=None).scores(teacher, critic, None, rollout(), batch(), draw("scores")).losses
    x0 = rollout().x0.flatten(1)
    mean = x0.sum(1) / NUMEL
    torch.testing.assert_close(losses["latents/mean.stop1"], mean)
    deviation = ((x0 - mean[:, None]) ** 2).sum(1) / (NUMEL - 1)
    torch.testing.assert_close(losses["latents/std.stop1"], deviation.sqrt())
    assert set(losses) == {"latents/mean.stop1", "latents/std.stop1", "student/dmd_rms"}


@torch.no_grad()
def test_guidance_without_an_unconditional_input_is_refused(teacher, critic):
    bare = Batch(torch.arange(ROWS), None, batch().cond, None)
    with pytest.raises(ValueError, match="needs the unconditional input"):
        dmd2(DOUBLE, gan=None, guidance_scale=3.0).scores(teacher, critic, None, rollout(), bare, draw("scores"))


@torch.no_grad()
def test_scores_of_float32_networks_are_float32(teacher, critic):
    """PITFALLS, precision: the DMD gradient is never narrower."""
    narrow = Rollout(torch.arange(ROWS), 1, latents(2).float(), rollout().sigma_stop.float(), latents(3).float())
    method = dmd2(gan=None)
    scores = method.scores(network(1), network(2), None, narrow, batch(), draw("scores"))
    assert scores.gradient.dtype == torch.float32
    assert math.isfinite(scores.gradient.abs().max().item())

"""Score identity distillation: its equation written out, and its gradient against finite differences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.flow.sigmas import Uniform
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.gan import GANSection
from fewstep.methods.sid import SiD, SiDSection, sid_loss
from fewstep.models.discriminator import Discriminator
from fewstep.records import Batch, Rollout, rows
from fewstep.rollout.few_step import FewStep
from tests.engines.worlds import LADDER, network
from tests.methods.clips import DOUBLE, ROWS, clips, draw, gradients, latents, noised, x0_of
from tests.models.tiny import randomise

SHAPE = (1, 4, 4, 2)
NUMEL = 4 * 4 * 2


def method(**settings: Any) -> SiD:
    values = {"guidance_scale": 3.0, "score_sigma": Uniform(low=0.2, high=0.8)} | settings
    return SiD(SiDSection(**values), FewStep(LADDER, "renoise", SHAPE, dtype=DOUBLE))


def rollout() -> Rollout:
    return Rollout(torch.arange(ROWS), 1, latents(2, 1), torch.full((ROWS, 1), LADDER[1], dtype=DOUBLE), latents(3, 1))


@pytest.fixture(scope="module")
def teacher() -> Any:
    return network(1).double().requires_grad_(False)


@pytest.fixture(scope="module")
def critic() -> Any:
    return network(2).double()


def scored(made: SiD, teacher: Any, critic: Any, given: Rollout | None = None, head: Any = None) -> Any:
    with torch.no_grad():
        return made.scores(teacher, critic, head, given or rollout(), clips(1), draw("scores"))


def loss_by_hand(x0: Tensor, teacher: Any, critic: Any, batch: Batch, alpha: float, scale: Tensor | None) -> Any:
    """The box, word for word; a scale that is given is held fixed."""
    sigma = (0.2 + 0.6 * draw("scores").uniform("sigma").double()).float()[:, None]
    x_t = noised(x0, draw("scores").normal("noise", SHAPE, dtype=DOUBLE), sigma)
    with_cond, without = (x0_of(teacher.velocity(x_t, sigma, told), x_t, sigma) for told in (batch.cond, batch.uncond))
    x0_t = without + 3.0 * (with_cond - without)
    x0_c = x0_of(critic.velocity(x_t, sigma, batch.cond), x_t, sigma)
    scale = (x0 - x0_t).abs().flatten(1).mean(1).view(-1, 1, 1, 1, 1) if scale is None else scale
    return ((x0_t - x0_c) * ((x0_t - x0) - alpha * (x0_t - x0_c)) / scale).flatten(1).mean(1), scale


@pytest.mark.parametrize("alpha", [1.0, 0.6, 1.2])
def test_the_gradient_agrees_with_finite_differences_of_the_loss(teacher, critic, alpha):
    """Invariant 47: through both networks, through x and through x_t, the scale held fixed."""
    x0, batch = rollout().x0, clips(1)
    scores = scored(method(alpha=alpha), teacher, critic)
    with torch.no_grad():
        loss, scale = loss_by_hand(x0, teacher, critic, batch, alpha, None)
        torch.testing.assert_close(scores.losses["student/sid"], loss, rtol=1e-9, atol=1e-12)
        for seed in (11, 12, 13):
            direction, step = latents(seed, 1), 1e-5
            ahead, behind = (
                loss_by_hand(x0 + sign * step * direction, teacher, critic, batch, alpha, scale)[0] for sign in (1, -1)
            )
            slope = (scores.gradient * direction).flatten(1).sum(1) / NUMEL
            torch.testing.assert_close(slope, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-7)


def test_with_alpha_1_the_loss_is_a_product_of_two_differences():
    """Invariant 47: (x0_t - x0_c)(x0_c - x) / scale."""
    x0, x0_t, x0_c = (latents(seed) for seed in (1, 2, 3))
    scale = (x0 - x0_t).abs().flatten(1).mean(1).view(-1, 1, 1, 1, 1)
    expected = ((x0_t - x0_c) * (x0_c - x0) / scale).flatten(1).mean(1)
    torch.testing.assert_close(sid_loss(x0, x0_teacher=x0_t, x0_critic=x0_c), expected, rtol=1e-12, atol=0)


def test_no_gradient_flows_through_the_scale():
    x0, x0_t, x0_c = (latents(seed).requires_grad_() for seed in (1, 2, 3))
    loss = sid_loss(x0, x0_teacher=x0_t, x0_critic=x0_c).sum()
    found = torch.autograd.grad(loss, (x0, x0_t, x0_c))
    with torch.no_grad():
        share = 1 / ((x0 - x0_t).abs().flatten(1).mean(1).view(-1, 1, 1, 1, 1) * x0[0].numel())
        expected = (-(x0_t - x0_c) * share, (x0_c - x0) * share, (x0_t - 2 * x0_c + x0) * share)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_a_teacher_that_agrees_with_the_sample_gives_a_finite_loss():
    """Invariant 45."""
    x0 = latents(1)
    loss = sid_loss(x0, x0_teacher=x0.clone(), x0_critic=x0 + 1e-3, eps=1e-4)
    torch.testing.assert_close(loss, torch.full((ROWS,), -1e-6 / 1e-4, dtype=DOUBLE), rtol=1e-9, atol=0)


def test_a_critic_that_equals_an_unguided_teacher_gives_no_gradient(teacher):
    """Invariant 45."""
    scores = scored(method(guidance_scale=1.0), teacher, network(1).double())
    assert scores.gradient.abs().max() < 1e-12
    assert torch.equal(scores.losses["student/sid"], torch.zeros(ROWS, dtype=DOUBLE))


def test_a_samples_gradient_does_not_depend_on_its_batch_mates(teacher, critic):
    """Invariants 45, 50."""
    wild = rollout().x0.clone()
    wild[1:] *= 1e3
    mates = Rollout(torch.arange(ROWS), 1, latents(2, 1), rollout().sigma_stop, wild)
    first = slice(0, 1)
    with torch.no_grad():
        alone = method().scores(
            teacher, critic, None, rows(rollout(), first), rows(clips(1), first), draw("scores").rows(first)
        )
    together = scored(method(), teacher, critic, mates)
    torch.testing.assert_close(together.gradient[:1], alone.gradient, rtol=1e-9, atol=1e-12)


def test_the_scores_leave_no_gradient_anywhere_and_the_student_descends_them(teacher, critic):
    """Invariants 43, 45."""
    scores = scored(method(), teacher, critic)
    assert not scores.gradient.requires_grad
    assert gradients(critic) == gradients(teacher) == []
    student, made = network(0).double(), rollout()
    losses = method().student_losses(student, made, scores, clips(1))
    weights = list(student.parameters())
    found = torch.autograd.grad(losses["student/loss"].mean(), weights)
    x0 = x0_of(student.velocity(made.x_stop, made.sigma_stop, clips(1).cond), made.x_stop, made.sigma_stop)
    expected = torch.autograd.grad(x0, weights, grad_outputs=scores.gradient / x0.numel())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-14)


def test_the_adversarial_gradient_is_added(teacher, critic):
    section, head = GANSection(student_weight=0.3), randomise(Discriminator(48), 3).double()
    both = scored(method(gan=section), teacher, critic, head=head)
    plain, dmd = scored(method(), teacher, critic), DMD2Section(gan=section)
    other = DMD2(dmd, FewStep(LADDER, "renoise", SHAPE))
    with torch.no_grad():
        adversarial = other.scores(teacher, critic, head, rollout(), clips(1), draw("scores"))
        alone = DMD2(DMD2Section(), FewStep(LADDER, "renoise", SHAPE)).scores(
            teacher, critic, None, rollout(), clips(1), draw("scores")
        )
    expected = plain.gradient + adversarial.gradient - alone.gradient
    torch.testing.assert_close(both.gradient, expected, rtol=1e-9, atol=1e-10)
    assert set(both.losses) == {*plain.losses, "student/gan"}
    rms = plain.gradient.square().flatten(1).mean(1).sqrt()
    torch.testing.assert_close(plain.losses["student/sid_rms"], rms)


def test_the_schedule_and_the_critic_are_those_of_dmd2(teacher, critic):
    settings: dict[str, Any] = {"critic_updates": 3, "critic_batches": "shared", "critic_warmup_updates": 4}
    made, dmd = method(**settings), DMD2(DMD2Section(**settings), FewStep(LADDER, "renoise", SHAPE))
    for iteration in range(3):
        pairs = zip(made.phases(iteration), dmd.phases(iteration), strict=True)
        assert all((a.name, a.trains, a.batch, a.part) == (b.name, b.trains, b.batch, b.part) for a, b in pairs)
    assert (made.roles, made.trained, made.num_batches, made.row_parts) == (
        dmd.roles,
        dmd.trained,
        dmd.num_batches,
        dmd.row_parts,
    )
    arguments = (critic, teacher, None, rollout(), clips(1), draw("critic.0"))
    found, expected = made.critic_losses(*arguments), dmd.critic_losses(*arguments)
    assert list(found) == ["critic/loss"]
    assert torch.equal(found["critic/loss"], expected["critic/loss"])


def test_the_loss_is_float32_at_least():
    """PITFALLS, precision."""
    x0, x0_t, x0_c = (latents(seed).bfloat16() for seed in (1, 2, 3))
    loss = sid_loss(x0, x0_teacher=x0_t, x0_critic=x0_c)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, sid_loss(x0.float(), x0_teacher=x0_t.float(), x0_critic=x0_c.float()))

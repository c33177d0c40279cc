"""Frames given to the student reach every network clean, and no loss counts them (PITFALLS, image-to-video)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.flow.sigmas import Uniform
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.gan import GANSection
from fewstep.methods.sid import SiD, SiDSection
from fewstep.models.discriminator import Discriminator
from fewstep.records import Rollout
from fewstep.rollout.few_step import FewStep
from tests.engines.worlds import LADDER, network
from tests.methods.clips import DOUBLE, ROWS, Watched, clips, draw, latents, noised, x0_of
from tests.models.tiny import randomise

FRAMES, GIVEN = 5, 2
SHAPE = (FRAMES, 4, 4, 2)
SIGMA = Uniform(low=0.3, high=0.7)


def rollout(given: int = GIVEN) -> Rollout:
    return Rollout(
        torch.arange(ROWS), 1, latents(2), torch.full((ROWS, FRAMES), LADDER[1], dtype=DOUBLE), latents(3), given, given
    )


def dmd2(**settings: Any) -> DMD2:
    values = {"guidance_scale": 3.0, "score_sigma": SIGMA, "critic_sigma": SIGMA} | settings
    return DMD2(DMD2Section(**values), FewStep(LADDER, "renoise", SHAPE, dtype=DOUBLE))


def sid() -> SiD:
    section = SiDSection(guidance_scale=3.0, score_sigma=SIGMA)
    return SiD(section, FewStep(LADDER, "renoise", SHAPE, dtype=DOUBLE))


@pytest.fixture(scope="module")
def teacher() -> Any:
    return network(1).double().requires_grad_(False)


@pytest.fixture(scope="module")
def critic() -> Any:
    return network(2).double()


@pytest.fixture(scope="module")
def head() -> Any:
    return randomise(Discriminator(48), 3).double()


def noised_after(x0: Tensor, phase: str, name: str = "") -> tuple[Tensor, Tensor, Tensor]:
    """x_t, sigma and the noise: one level a sample, the given frames clean."""
    sigma = (0.3 + 0.4 * draw(phase).uniform(f"{name}sigma").double()).float()[:, None].repeat(1, FRAMES)
    sigma[:, :GIVEN] = 0
    noise = draw(phase).normal(f"{name}noise", SHAPE, dtype=DOUBLE)
    return noised(x0, noise, sigma), sigma, noise


def assert_given_enter_clean(watched: Watched, *clean: Tensor) -> None:
    """In every call, whatever rows were put together."""
    assert watched.asked
    for x_t, sigma, _, _ in watched.asked:
        assert torch.equal(sigma[:, :GIVEN], torch.zeros_like(sigma[:, :GIVEN]))
        assert (sigma[:, GIVEN:] > 0).all()
        assert torch.equal(x_t[:, :GIVEN], torch.cat(clean)[:, :GIVEN].to(x_t))


def test_the_critics_loss_is_the_mean_over_the_frames_that_the_student_made(teacher, critic):
    x0, watched = rollout().x0, Watched(critic)
    losses = dmd2().critic_losses(watched, teacher, None, rollout(), clips(), draw("critic.0"))
    assert_given_enter_clean(watched, x0)
    x_t, sigma, noise = noised_after(x0, "critic.0")
    error = (critic.velocity(x_t, sigma, clips().cond) - (noise - x0))[:, GIVEN:]
    torch.testing.assert_close(losses["critic/loss"], error.square().flatten(1).mean(1), rtol=1e-10, atol=0)


def predictions(x0: Tensor, teacher: Any, critic: Any) -> tuple[Tensor, Tensor]:
    x_t, sigma, _ = noised_after(x0, "scores")
    batch = clips()
    with_cond, without = (x0_of(teacher.velocity(x_t, sigma, told), x_t, sigma) for told in (batch.cond, batch.uncond))
    return without + 3.0 * (with_cond - without), x0_of(critic.velocity(x_t, sigma, batch.cond), x_t, sigma)


@torch.no_grad()
def test_the_dmd_gradient_is_that_of_a_mean_over_the_frames_that_the_student_made(teacher, critic):
    """0 for the given ones; the normaliser is over the made ones; numel x d loss / d x0 as everywhere."""
    watched = Watched(teacher), Watched(critic)
    x0 = rollout().x0
    scores = dmd2().scores(*watched, None, rollout(), clips(), draw("scores"))
    assert_given_enter_clean(watched[0], x0, x0)
    assert_given_enter_clean(watched[1], x0)
    x0_teacher, x0_critic = predictions(x0, teacher, critic)
    made = (x0_critic - x0_teacher)[:, GIVEN:]
    distance = (x0 - x0_teacher)[:, GIVEN:].abs().flatten(1).mean(1).view(-1, 1, 1, 1, 1)
    assert torch.equal(scores.gradient[:, :GIVEN], torch.zeros_like(scores.gradient[:, :GIVEN]))
    expected = made / distance * FRAMES / (FRAMES - GIVEN)
    torch.testing.assert_close(scores.gradient[:, GIVEN:], expected, rtol=1e-9, atol=1e-12)


def test_the_sid_loss_is_the_mean_over_the_frames_that_the_student_made(teacher, critic):
    """And its gradient, though the others' predictions see the given frames, is 0 there."""
    with torch.no_grad():
        scores = sid().scores(teacher, critic, None, rollout(), clips(), draw("scores"))
    x0 = rollout().x0.requires_grad_()
    x0_t, x0_c = predictions(x0, teacher, critic)
    scale = (x0 - x0_t)[:, GIVEN:].abs().flatten(1).mean(1).view(-1, 1, 1, 1, 1).detach()
    loss = ((x0_t - x0_c) * (x0_c - x0))[:, GIVEN:].div(scale).flatten(1).mean(1)
    (gradient,) = torch.autograd.grad(loss.sum(), x0)
    torch.testing.assert_close(scores.losses["student/sid"], loss.detach(), rtol=1e-9, atol=1e-12)
    expected = gradient * x0[0].numel()
    assert expected[:, :GIVEN].abs().max() > 1e-3
    assert torch.equal(scores.gradient[:, :GIVEN], torch.zeros_like(scores.gradient[:, :GIVEN]))
    torch.testing.assert_close(scores.gradient[:, GIVEN:], expected[:, GIVEN:], rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("features", ["critic", "teacher"])
def test_the_discriminator_sees_given_frames_clean_also_where_its_penalty_moves_the_others(
    teacher, critic, head, features
):
    section = GANSection(features=features, r1_weight=0.3, sigma=SIGMA)
    watched = Watched(critic), Watched(teacher)
    dmd2(gan=section).critic_losses(*watched, head, rollout(), clips(), draw("critic.0"))
    reader = watched[0] if features == "critic" else watched[1]
    reader.asked = [asked for asked in reader.asked if "layers" in asked[3]]
    assert len(reader.asked) == 1
    assert_given_enter_clean(reader, clips().x0, rollout().x0, clips().x0)
    real, _, moved = reader.asked[0][0].chunk(3)
    assert (real - moved)[:, GIVEN:].abs().min() > 0


@torch.no_grad()
def test_the_adversarial_gradient_of_given_frames_is_0(teacher, critic, head):
    section = GANSection(student_weight=0.3, sigma=SIGMA)
    with_gan, without = dmd2(gan=section), dmd2()
    scores = with_gan.scores(teacher, critic, head, rollout(), clips(), draw("scores"))
    plain = without.scores(teacher, critic, None, rollout(), clips(), draw("scores"))
    assert torch.equal(scores.gradient[:, :GIVEN], torch.zeros_like(scores.gradient[:, :GIVEN]))
    with torch.enable_grad():
        fake = rollout().x0.requires_grad_()
        x_t, sigma, _ = noised_after(fake, "scores", "gan.student.")
        logits = head(critic.features(x_t, sigma, clips().cond, (1,)))
        (ascent,) = torch.autograd.grad((0.3 * torch.log1p(torch.exp(-logits))).sum(), fake)
    expected = plain.gradient + ascent * fake[0].numel()
    torch.testing.assert_close(scores.gradient[:, GIVEN:], expected[:, GIVEN:], rtol=1e-8, atol=1e-11)


@torch.no_grad()
def test_the_latents_moments_are_those_of_the_frames_that_the_student_made(teacher, critic):
    losses = dmd2().scores(teacher, critic, None, rollout(), clips(), draw("scores")).losses
    made = rollout().x0[:, GIVEN:].flatten(1)
    torch.testing.assert_close(losses["latents/mean.stop1"], made.mean(1))
    torch.testing.assert_close(losses["latents/std.stop1"], made.std(1))


@torch.no_grad()
def test_a_rollout_without_given_frames_is_noised_everywhere(teacher, critic):
    watched = Watched(critic)
    dmd2().scores(teacher, watched, None, rollout(given=0), clips(), draw("scores"))
    assert (watched.asked[0][1] > 0.29).all()

"""The adversarial term: what each side sees, and what it makes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fewstep.flow.sigmas import Uniform
from fewstep.methods.gan import GAN, GANSection
from fewstep.models.api import Geometry
from fewstep.models.discriminator import Discriminator
from fewstep.rng import Draw
from tests.engines.worlds import NUMEL, SHAPE, network
from tests.models.tiny import randomise

ROWS = 5
SIGMA = Uniform(low=0.1, high=0.9)


class Looking:
    """A network whose features are its input, token by token; keeps what it was asked."""

    geometry, num_layers, width = Geometry(4, (1, 1, 1)), 4, 1

    def __init__(self) -> None:
        self.asked: list[tuple[Tensor, Tensor, Any, tuple[int, ...]]] = []

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        raise AssertionError("a discriminator reads features")

    def features(self, x_t: Tensor, sigma: Tensor, cond: Any, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        self.asked.append((x_t, sigma, cond, layers))
        return tuple(x_t.reshape(len(x_t), -1, 1) for _ in layers)


WEIGHT = torch.randn(NUMEL, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def linear(features: tuple[Tensor, ...]) -> Tensor:
    """D = w . x"""
    return features[0].squeeze(-1) @ WEIGHT


def draw() -> Draw:
    return Draw(seed=1, phase="critic.0", iteration=0, key=torch.arange(ROWS))


def latents(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(ROWS, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


COND = torch.arange(ROWS)


def seen(**settings: Any) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    """The discriminator's losses on a linear D; the states that it saw, and their noise levels, cut into their rows."""
    model = Looking()
    section = GANSection(sigma=SIGMA, **({"discriminator_weight": 1.0} | settings))
    losses = GAN(section).discriminator_losses(linear, model, latents(1), latents(2), COND, draw())
    ((x_t, sigma, cond, layers),) = model.asked
    assert torch.equal(cond, COND.repeat(len(x_t) // ROWS))
    assert layers == (2,), "the middle block"
    return losses, list(x_t.split(ROWS)), list(sigma.split(ROWS))


def noise_in(x_t: Tensor, x0: Tensor, sigma: Tensor) -> Tensor:
    level = sigma.double()[..., None, None, None]
    return (x_t - (1 - level) * x0) / level


def test_the_discriminator_sees_both_noised_and_descends_the_softplus_terms():
    losses, (real, fake), _ = seen(discriminator_weight=0.25)
    logits = [x.flatten(1) @ WEIGHT for x in (real, fake)]
    expected = torch.log1p(torch.exp(-logits[0])) + torch.log1p(torch.exp(logits[1]))
    torch.testing.assert_close(losses["discriminator/loss"], 0.25 * expected, rtol=1e-10, atol=0)
    assert list(losses) == ["discriminator/loss"]


def test_real_and_fake_get_noise_and_noise_level_of_their_own():
    _, (real, fake), (real_sigma, fake_sigma) = seen()
    noises = [noise_in(real, latents(1), real_sigma), noise_in(fake, latents(2), fake_sigma)]
    for noise in noises:
        assert abs(noise.mean()) < 0.1
        assert abs(noise.std() - 1) < 0.1
    assert abs(torch.corrcoef(torch.stack([noise.flatten() for noise in noises]))[0, 1]) < 0.1
    for sigma in (real_sigma, fake_sigma):
        assert ((sigma >= 0.1) & (sigma <= 0.9)).all()
        assert len(sigma.unique()) == ROWS, "one a sample"
    assert not torch.isclose(real_sigma, fake_sigma).any()


def test_shared_noise_is_the_same_for_real_and_fake_of_a_row():
    _, (real, fake), (real_sigma, fake_sigma) = seen(share_noise=True)
    assert torch.equal(real_sigma, fake_sigma)
    torch.testing.assert_close(noise_in(real, latents(1), real_sigma), noise_in(fake, latents(2), fake_sigma))


@pytest.mark.parametrize("share_noise", [False, True])
def test_the_penalty_compares_the_noised_real_sample_with_itself_moved(share_noise):
    """Invariant 48: the same noise and the same sigma on both sides, on x_t and not on the data; for a linear D the
    penalty is (w . n)^2 in each draw."""
    losses, (real, _, moved), (real_sigma, _, moved_sigma) = seen(r1_weight=0.3, r1_step=0.05, share_noise=share_noise)
    assert torch.equal(real_sigma, moved_sigma)
    n = (moved - real) / 0.05
    torch.testing.assert_close(n, draw().normal("gan.r1", SHAPE, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(losses["discriminator/r1"], 0.3 * (n.flatten(1) @ WEIGHT) ** 2, rtol=1e-8, atol=0)


def test_the_penalty_has_the_discriminators_weight_too():
    whole, _, _ = seen(r1_weight=0.3)
    part, _, _ = seen(r1_weight=0.3, discriminator_weight=0.01)
    for name in ("discriminator/loss", "discriminator/r1"):
        torch.testing.assert_close(part[name], 0.01 * whole[name], rtol=1e-12, atol=0)


def test_the_penalty_changes_no_other_loss():
    with_penalty, _, _ = seen(r1_weight=0.3)
    without, _, _ = seen()
    torch.testing.assert_close(with_penalty["discriminator/loss"], without["discriminator/loss"], rtol=1e-12, atol=0)


def test_the_students_loss_is_a_function_of_its_sample_noised_anew():
    fake, model = latents(2).requires_grad_(), Looking()
    loss = GAN(GANSection(sigma=SIGMA, student_weight=0.4)).student_loss(linear, model, fake, COND, draw())
    ((x_t, sigma, cond, _),) = model.asked
    torch.testing.assert_close(loss, 0.4 * torch.log1p(torch.exp(-(x_t.flatten(1) @ WEIGHT))), rtol=1e-10, atol=0)
    (gradient,) = torch.autograd.grad(loss.sum(), fake)
    outer = -0.4 * torch.sigmoid(-(x_t.flatten(1) @ WEIGHT)) * (1 - sigma.double()[:, 0])
    torch.testing.assert_close(gradient.flatten(1), outer[:, None].detach() * WEIGHT, rtol=1e-7, atol=1e-12)
    assert torch.equal(cond, COND)


@pytest.mark.parametrize("r1_weight", [0.0, 0.5])
def test_a_head_of_zeros_loses_two_ln_2_and_the_student_ln_2_times_their_weights(r1_weight):
    """Invariant 48, with real networks; the head's last layer is zero, the rest is not."""
    model, head = network(1).double(), randomise(Discriminator(48), 2).double()
    torch.nn.init.zeros_(head.heads[0].output.weight)
    torch.nn.init.zeros_(head.heads[0].output.bias)
    cond = model.conditioner.condition(torch.arange(ROWS))
    gan = GAN(GANSection(student_weight=0.3, discriminator_weight=0.7, r1_weight=r1_weight))
    losses = gan.discriminator_losses(head, model, latents(1), latents(2), cond, draw())
    ln2 = math.log(2) * torch.ones(ROWS, dtype=torch.float64)
    torch.testing.assert_close(losses["discriminator/loss"], 0.7 * 2 * ln2, rtol=1e-12, atol=0)
    torch.testing.assert_close(gan.student_loss(head, model, latents(2), cond, draw()), 0.3 * ln2, rtol=1e-12, atol=0)
    if r1_weight:
        assert torch.equal(losses["discriminator/r1"], torch.zeros(ROWS, dtype=torch.float64))


def test_the_layers_of_the_recipe_are_read():
    model = Looking()
    GAN(GANSection(layers=(0, 3))).student_loss(linear, model, latents(2), COND, draw())
    assert model.asked[0][3] == (0, 3)


@pytest.mark.parametrize(
    "values",
    [
        {"features": "student"},
        {"r1_step": 0.0},
        {"r1_weight": -1.0},
        {"student_weight": -1e-3},
        {"sigma": {"name": "x"}},
    ],
)
def test_a_section_that_makes_no_sense_is_refused(values):
    with pytest.raises(ValidationError):
        GANSection(**values)

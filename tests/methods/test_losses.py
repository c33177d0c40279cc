"""The equations of the methods against the formulas written out, in float64, without a network."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fewstep.methods.api import descend, input_gradient
from fewstep.methods.dmd2 import dmd_gradient
from fewstep.methods.gan import approximate_r1, discriminator_loss, student_loss
from fewstep.methods.sft import flow_matching_loss
from fewstep.models.api import Geometry
from fewstep.models.guided import guided_velocity

SHAPE = (5, 3, 2, 4, 6)
NUMEL = 3 * 2 * 4 * 6


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class ClosedForm:
    """velocity = slope x_t + sigma + cond, so that every value can be worked out by hand; keeps what it was asked."""

    geometry, num_layers, width = Geometry(2, (1, 1, 1)), 1, 1

    def __init__(self, slope: float = 0.5):
        self.slope, self.asked = slope, []

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        self.asked.append((x_t, sigma, cond))
        return self.slope * x_t + sigma[..., None, None, None] + cond[:, None, None, None, None]

    def features(self, x_t: Tensor, sigma: Tensor, cond: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(x_t.reshape(len(x_t), -1, 1) for _ in layers)


# --- distribution matching --------------------------------------------------------------------------------------------


def test_the_dmd_gradient_is_the_difference_of_the_predictions_over_the_samples_mean_distance():
    x0, teacher, critic = normal(1), normal(2), normal(3)
    found = dmd_gradient(x0, x0_teacher=teacher, x0_critic=critic)
    for sample in range(len(x0)):
        distance = sum(abs(a - b) for a, b in zip(x0[sample].flatten(), teacher[sample].flatten(), strict=True)) / NUMEL
        torch.testing.assert_close(found[sample], (critic[sample] - teacher[sample]) / distance, rtol=1e-12, atol=0)


def test_the_normaliser_belongs_to_one_sample_alone():
    """Invariant 45; PITFALLS, normaliser: batch mates do not couple."""
    x0, teacher, critic = normal(1), normal(2), normal(3)
    wild = torch.cat([x0[:1], 1e6 * x0[1:]])
    alone = dmd_gradient(x0[:1], x0_teacher=teacher[:1], x0_critic=critic[:1])
    assert torch.equal(dmd_gradient(wild, x0_teacher=teacher, x0_critic=critic)[:1], alone)


def test_a_teacher_that_agrees_with_the_sample_gives_a_finite_gradient():
    """Invariant 45; PITFALLS, normaliser: clamped at eps, no nan_to_num."""
    x0 = normal(1)
    critic = x0 + 1e-3
    found = dmd_gradient(x0, x0_teacher=x0.clone(), x0_critic=critic, eps=1e-4)
    torch.testing.assert_close(found, (critic - x0) / 1e-4, rtol=1e-12, atol=0)
    assert torch.equal(dmd_gradient(x0, x0_teacher=x0.clone(), x0_critic=x0.clone()), torch.zeros_like(x0))


def test_nothing_hides_a_prediction_that_is_not_finite():
    """PITFALLS, normaliser: a broken teacher is seen (and the update skipped), not turned into zeros."""
    teacher = normal(2)
    teacher[0, 0, 0, 0, 0] = torch.nan
    found = dmd_gradient(normal(1), x0_teacher=teacher, x0_critic=normal(3))
    assert found[0].isnan().all()
    assert found[1:].isfinite().all()


def test_the_dmd_gradient_is_float32_at_least():
    """PITFALLS, precision: predictions in bfloat16 are widened before they are subtracted."""
    x0, teacher, critic = (normal(seed, dtype=torch.bfloat16) for seed in (1, 2, 3))
    found = dmd_gradient(x0, x0_teacher=teacher, x0_critic=critic)
    assert found.dtype == torch.float32
    assert torch.equal(found, dmd_gradient(x0.float(), x0_teacher=teacher.float(), x0_critic=critic.float()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_descending_a_gradient_gives_it_over_the_elements_of_the_global_batch(dtype):
    """Invariant 45: d loss / d x0 == g / numel, where the loss is the mean over the batch."""
    x0, gradient = normal(1, dtype=dtype).requires_grad_(), normal(2, dtype=dtype).requires_grad_()
    loss = descend(x0, gradient)
    assert loss.shape == (5,)
    loss.mean().backward()
    torch.testing.assert_close(x0.grad, gradient.detach() / x0.numel(), rtol=1e-6, atol=0)
    assert gradient.grad is None


def test_descending_in_bfloat16_keeps_the_gradient_in_float32():
    """PITFALLS, precision: the product of a bfloat16 sample with its gradient is taken in float32."""
    x0, gradient = normal(1, dtype=torch.bfloat16), normal(2, dtype=torch.float32)
    loss = descend(x0, gradient)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, (x0.float() * gradient).flatten(1).mean(1))


def test_an_input_gradient_is_numel_times_the_derivative_of_each_samples_own_loss():
    x0, weight = normal(1), torch.nn.Parameter(normal(2, 3, 2, 4, 6))
    with torch.no_grad():
        gradient, loss = input_gradient(lambda x: ((weight * x).flatten(1).sum(1)) ** 3, x0)
    inner = torch.stack([(weight * sample).sum() for sample in x0]).detach()
    torch.testing.assert_close(loss, inner**3)
    for sample in range(len(x0)):
        expected = NUMEL * 3 * inner[sample] ** 2 * weight.detach()
        torch.testing.assert_close(gradient[sample], expected, rtol=1e-12, atol=1e-12)
    assert weight.grad is None
    assert not any(tensor.requires_grad for tensor in (gradient, loss, x0))


def test_a_loss_descended_through_its_input_gradient_is_the_loss_itself():
    """The two pieces agree on their scale: the sum of d loss / d x0 from `descend` is that of the loss's own mean."""
    x0 = normal(1).requires_grad_()

    def loss_of(x: Tensor) -> Tensor:
        return torch.sin(x).flatten(1).sum(1)

    (direct,) = torch.autograd.grad(loss_of(x0).mean(), x0)
    (by_record,) = torch.autograd.grad(descend(x0, input_gradient(loss_of, x0)[0]).mean(), x0)
    torch.testing.assert_close(by_record, direct, rtol=1e-12, atol=0)


# --- flow matching ----------------------------------------------------------------------------------------------------


def test_flow_matching_is_the_mean_squared_error_of_the_velocity():
    x0, noise, cond = normal(1), normal(2), normal(3, 5)
    sigma = torch.rand(5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    model = ClosedForm(slope=0.5)
    found = flow_matching_loss(model, x0, noise, sigma, cond)
    level = sigma[:, :, None, None, None]
    x_t = (1 - level) * x0 + level * noise
    error = 0.5 * x_t + level + cond.view(5, 1, 1, 1, 1) - (noise - x0)
    torch.testing.assert_close(found, (error**2).sum((1, 2, 3, 4)) / NUMEL, rtol=1e-12, atol=0)
    asked_x_t, asked_sigma, asked_cond = model.asked[0]
    torch.testing.assert_close(asked_x_t, x_t)
    assert asked_sigma is sigma
    assert asked_cond is cond


def test_flow_matching_is_the_squared_error_of_x0_over_sigma_squared():
    """Invariant 46, with a noise level of its own for every frame."""
    x0, noise, cond = normal(1), normal(2), normal(3, 5)
    sigma = 0.1 + 0.9 * torch.rand(5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    model = ClosedForm(slope=-0.3)
    found = flow_matching_loss(model, x0, noise, sigma, cond)
    level = sigma[:, :, None, None, None]
    x_t = (1 - level) * x0 + level * noise
    x0_hat = x_t - level * model.velocity(x_t, sigma, cond)
    torch.testing.assert_close(found, ((x0_hat - x0) ** 2 / level**2).flatten(1).mean(1), rtol=1e-10, atol=0)


def test_the_exact_velocity_has_no_flow_matching_loss():
    x0, noise = normal(1), normal(2)

    class Exact(ClosedForm):
        def velocity(self, x_t, sigma, cond):
            return (x_t - x0) / sigma[..., None, None, None]

    loss = flow_matching_loss(Exact(), x0, noise, torch.full((5, 3), 0.7, dtype=torch.float64), normal(3, 5))
    torch.testing.assert_close(loss, torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-25)


# --- guidance ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 4.0])
def test_guidance_starts_at_uncond(scale):
    """PITFALLS, guidance: uncond + scale (cond - uncond); the cond-based form of others is off by one."""
    x_t, cond, uncond, sigma = normal(1), normal(2, 5), normal(3, 5), torch.full((5, 3), 0.4, dtype=torch.float64)
    model = ClosedForm()
    found = guided_velocity(model, x_t, sigma, cond, uncond, scale=scale)
    with_cond = 0.5 * x_t + 0.4 + cond.view(5, 1, 1, 1, 1)
    without = 0.5 * x_t + 0.4 + uncond.view(5, 1, 1, 1, 1)
    torch.testing.assert_close(found, without + scale * (with_cond - without), rtol=1e-12, atol=1e-12)
    assert len(model.asked) == 1, "one call on both halves"


def test_guidance_of_one_is_a_single_plain_call():
    x_t, cond, sigma = normal(1), normal(2, 5), torch.full((5, 3), 0.4, dtype=torch.float64)
    model = ClosedForm()
    found = guided_velocity(model, x_t, sigma, cond, None, scale=1.0)
    assert torch.equal(found, ClosedForm().velocity(x_t, sigma, cond))
    assert [len(asked[0]) for asked in model.asked] == [5]


def test_guidance_without_an_unconditional_input_is_refused():
    with pytest.raises(ValueError, match=r"guidance_scale 4\.0 needs the unconditional input"):
        guided_velocity(ClosedForm(), normal(1), torch.ones(5, 3), normal(2, 5), None, scale=4.0)


def test_a_rescale_of_one_gives_the_standard_deviation_of_the_conditional_velocity():
    x_t, cond, uncond, sigma = normal(1), normal(2, 5), normal(3, 5), torch.full((5, 3), 0.4, dtype=torch.float64)

    class CondScales(ClosedForm):
        def velocity(self, x_t, sigma, cond):
            return x_t * (1 + cond.view(-1, 1, 1, 1, 1).abs())

    found = guided_velocity(CondScales(), x_t, sigma, cond, uncond, scale=3.0, rescale=1.0)
    expected = CondScales().velocity(x_t, sigma, cond).flatten(1).std(1, correction=0)
    torch.testing.assert_close(found.flatten(1).std(1, correction=0), expected, rtol=1e-12, atol=0)


# --- the adversarial term ---------------------------------------------------------------------------------------------


def test_the_discriminator_descends_the_two_softplus_terms():
    real, fake = normal(1, 5), normal(2, 5)
    expected = [math.log1p(math.exp(-r)) + math.log1p(math.exp(f)) for r, f in zip(real, fake, strict=True)]
    found = discriminator_loss(real, fake)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_the_student_descends_the_non_saturating_loss():
    fake = normal(2, 5)
    expected = [math.log1p(math.exp(-f)) for f in fake]
    torch.testing.assert_close(student_loss(fake), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_a_discriminator_that_knows_nothing_loses_two_ln_2_and_the_student_ln_2():
    """Invariant 48."""
    zero = torch.zeros(5, dtype=torch.float64)
    torch.testing.assert_close(discriminator_loss(zero, zero), torch.full_like(zero, 2 * math.log(2)))
    torch.testing.assert_close(student_loss(zero), torch.full_like(zero, math.log(2)))


def test_the_student_wants_the_discriminator_to_say_real():
    logits = normal(1, 5).requires_grad_()
    (gradient,) = torch.autograd.grad(student_loss(logits).sum(), logits)
    torch.testing.assert_close(gradient, -torch.sigmoid(-logits.detach()))
    assert (gradient < 0).all()


def test_the_penalty_of_a_linear_discriminator_is_its_squared_slope_along_the_step():
    """Invariant 48: R1 of D = w . x is (w . n)^2 for each draw, whatever the length of the step."""
    w, x, n = normal(1, 24), normal(2, 5, 24), normal(3, 5, 24)
    for step in (0.1, 3.0):
        found = approximate_r1(x @ w, (x + step * n) @ w, step)
        torch.testing.assert_close(found, (n @ w) ** 2, rtol=1e-9, atol=0)


def test_the_penalty_of_many_draws_is_the_squared_gradient():
    w, x = normal(1, 24), normal(2, 1, 24).expand(40_000, -1)
    n = normal(3, 40_000, 24)
    found = approximate_r1(x @ w, (x + 0.1 * n) @ w, 0.1).mean()
    assert abs(found / w.square().sum() - 1) < 0.04

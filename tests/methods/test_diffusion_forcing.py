"""Diffusion forcing with a real tiny causal network in float64, against the algorithm box written out."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fewstep.errors import UserError
from fewstep.flow.sigmas import Grid, LogitNormal, Shifted, Uniform
from fewstep.methods.diffusion_forcing import DiffusionForcing, DiffusionForcingSection
from fewstep.models.wan.conditioner import LabelCond
from fewstep.records import rows
from tests.methods.clips import NULL, ROWS, Watched, causal, clips, draw, gradients, noised, x0_of


def method(**settings: object) -> DiffusionForcing:
    return DiffusionForcing(DiffusionForcingSection(**({"cond_dropout": 0.0} | settings)))  # type: ignore[arg-type]


def grid_sigma(frames_of_blocks: tuple[int, ...]) -> Tensor:
    """Node k of 1000, counted from below, is (k / 1000) shifted by 5: 5 k / (1000 + 4 k)."""
    k = (draw().uniform("sigma", (len(frames_of_blocks),)).double() * 1000).floor() + 1
    return (5 * k / (1000 + 4 * k)).repeat_interleave(torch.tensor(frames_of_blocks), dim=1).float()


def bell(sigma: Tensor) -> Tensor:
    """bsmntw as METHODS writes it, over the 1000 nodes of shift 5."""
    u = torch.arange(1000, 0, -1, dtype=torch.float64) / 1000
    nodes = 5000 * u / (1 + 4 * u)
    y, floor = torch.exp(-2 * ((nodes - 500) / 1000) ** 2), torch.exp(torch.tensor(-0.5, dtype=torch.float64))
    return 1000 * (torch.exp(-2 * ((1000 * sigma.double() - 500) / 1000) ** 2) - floor) / (y - floor).sum()


FORMS = [({"block_frames": 1}, (1,) * 5), ({"block_frames": 2, "first_frame_alone": True}, (1, 2, 2))]


@pytest.mark.parametrize(("form", "sizes"), FORMS, ids=str)
@pytest.mark.parametrize("weighting", ["bsmntw", "none"])
def test_the_loss_is_the_weighted_error_of_the_velocity_with_one_noise_level_a_block(form, sizes, weighting):
    model, batch = causal(0, **form), clips()
    sigma, noise = grid_sigma(sizes), draw().normal("noise", batch.x0.shape[1:], dtype=torch.float64)
    assert len(sigma.unique()) > ROWS * (len(sizes) - 1)
    velocity = model.velocity(noised(batch.x0, noise, sigma), sigma, batch.cond)
    error = (velocity - (noise - batch.x0)).square().mean(dim=(2, 3, 4))
    weight = bell(sigma) if weighting == "bsmntw" else torch.ones_like(error)
    losses = method(weighting=weighting).student_losses(model, batch, draw())
    assert list(losses) == ["student/loss"]
    torch.testing.assert_close(losses["student/loss"], (weight * error).mean(1), rtol=1e-6, atol=0)


def test_the_loss_is_the_error_of_x0_over_sigma_squared():
    """Invariant 46, with a noise level a block."""
    model, batch = causal(0, first_frame_alone=True), clips()
    made = method(weighting="none", sigma=Uniform(low=0.1))
    u = draw().uniform("sigma", (3,)).double()
    sigma = (0.1 + 0.9 * u).float()[:, [0, 1, 1, 2, 2]]
    noise = draw().normal("noise", batch.x0.shape[1:], dtype=torch.float64)
    x_t = noised(batch.x0, noise, sigma)
    error = x0_of(model.velocity(x_t, sigma, batch.cond), x_t, sigma) - batch.x0
    expected = (error / sigma.double()[..., None, None, None]).square().flatten(1).mean(1)
    torch.testing.assert_close(made.student_losses(model, batch, draw())["student/loss"], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("given", "form"), [(1, {"first_frame_alone": True}), (3, {"first_frame_alone": True})])
def test_given_frames_enter_clean_and_leave_the_loss(given, form):
    """PITFALLS, image-to-video: never noised, never counted; the mean is over the other frames."""
    model, batch = Watched(causal(0, **form)), clips()
    losses = method(weighting="none", given_frames=given).student_losses(model, batch, draw())
    ((x_t, sigma, _, forced),) = model.asked
    assert forced == {}
    assert torch.equal(x_t[:, :given], batch.x0[:, :given])
    assert torch.equal(sigma[:, :given], torch.zeros(ROWS, given))
    assert torch.equal(sigma[:, given:], grid_sigma((1, 2, 2))[:, given:])
    noise = draw().normal("noise", batch.x0.shape[1:], dtype=torch.float64)
    torch.testing.assert_close(x_t[:, given:], noised(batch.x0, noise, sigma)[:, given:], rtol=1e-12, atol=0)
    error = (model.network.velocity(x_t, sigma, batch.cond) - (noise - batch.x0))[:, given:]
    torch.testing.assert_close(losses["student/loss"], error.square().flatten(1).mean(1), rtol=1e-12, atol=0)


def test_given_frames_teach_the_others():
    """They are not in the loss, but later blocks see them."""
    model, batch = causal(0, first_frame_alone=True), clips()
    made = method(weighting="none", given_frames=1)
    plain = made.student_losses(model, batch, draw())["student/loss"]
    batch.x0[:, 0] += 1.0
    assert (made.student_losses(model, batch, draw())["student/loss"] - plain).abs().min() > 1e-6


@pytest.mark.parametrize(
    ("given", "form", "message"),
    [
        (1, {"block_frames": 2}, r"given_frames = 1: of 4 latent frames, .* write one of \[0, 2\]"),
        (2, {"block_frames": 1, "first_frame_alone": True}, None),
        (4, {"block_frames": 2}, r"given_frames = 4: of 4 latent frames, .* all but the last; write one of \[0, 2\]"),
        (9, {"block_frames": 2}, r"write one of \[0, 2\]"),
    ],
)
def test_only_whole_blocks_can_be_given_and_not_all_of_them(given, form, message):
    made, model, batch = method(given_frames=given), causal(0, **form), clips(4)
    if message is None:
        assert made.student_losses(model, batch, draw())["student/loss"].isfinite().all()
        return
    with pytest.raises(UserError, match=message):
        made.student_losses(model, batch, draw())


def test_frames_that_do_not_divide_are_refused_with_both_numbers():
    """Invariant 18."""
    with pytest.raises(UserError, match="5 latent frames cannot be cut into blocks of 2"):
        method().student_losses(causal(0), clips(5), draw())


def test_the_rows_that_lose_their_condition_get_the_null_one():
    model, batch = Watched(causal(0)), clips(4)
    lost = draw().uniform("cond_dropout") < 0.5
    assert 0 < lost.sum() < ROWS
    method(cond_dropout=0.5).student_losses(model, batch, draw())
    assert torch.equal(model.asked[0][2].label, torch.where(lost, NULL, batch.cond.label))


def test_a_batch_is_its_micro_batches():
    """Invariant 50; invariant 22 through the method."""
    model, batch = causal(0), clips(4)
    whole = method(cond_dropout=0.5).student_losses(model, batch, draw())["student/loss"]
    for row in range(ROWS):
        cut = slice(row, row + 1)
        part = method(cond_dropout=0.5).student_losses(model, rows(batch, cut), draw().rows(cut))["student/loss"]
        torch.testing.assert_close(part, whole[cut], rtol=1e-10, atol=0)


def test_the_gradient_reaches_every_weight_from_the_first_block_on():
    """Invariant 43."""
    model = causal(0)
    method(cond_dropout=1.0).student_losses(model, clips(4), draw())["student/loss"].mean().backward()
    assert len(gradients(model)) == len(list(model.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in gradients(model))


def test_the_exact_velocity_has_no_loss():
    batch = clips(4)

    class Exact(Watched):
        def velocity(self, x_t: Tensor, sigma: Tensor, cond: LabelCond, **forced: object) -> Tensor:
            return (x_t - batch.x0) / sigma.double()[..., None, None, None]

    loss = method(weighting="none").student_losses(Exact(causal(0)), batch, draw())["student/loss"]
    torch.testing.assert_close(loss, torch.zeros(ROWS, dtype=torch.float64), rtol=0, atol=1e-20)


def test_the_weight_takes_the_shift_of_the_density_and_needs_one():
    with pytest.raises(ValidationError, match="the density 'uniform' has none: write the density grid, shifted"):
        DiffusionForcingSection(sigma=Uniform())
    assert DiffusionForcingSection(sigma=Uniform(), weighting="none").shift is None
    for density in (Grid(nodes=9, shift=3.0), LogitNormal(shift=3.0), Shifted(shift=3.0, bounds="index")):
        assert DiffusionForcingSection(sigma=density).shift == 3.0
    assert DiffusionForcingSection().shift == 5.0


def test_a_shift_of_its_own_changes_the_weight():
    model, batch = causal(0), clips(4)
    density = Grid(nodes=1, shift=2.0)
    loss = method(sigma=density).student_losses(model, batch, draw())["student/loss"]
    assert torch.equal(loss, torch.zeros_like(loss)), "the only node is sigma 1, where the bell is 0"
    losses = [method(sigma=LogitNormal(shift=s)).student_losses(model, batch, draw())["student/loss"] for s in (1, 3)]
    assert (losses[0] - losses[1]).abs().min() > 1e-3

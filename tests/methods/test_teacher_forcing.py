"""Teacher forcing with a real tiny causal network in float64, against blocks that meet their history one by one."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fewstep.flow.sigmas import Uniform
from fewstep.methods.diffusion_forcing import DiffusionForcing, DiffusionForcingSection
from fewstep.methods.teacher_forcing import TeacherForcing, TeacherForcingSection
from fewstep.records import rows
from tests.methods.clips import ROWS, Watched, block_by_block, causal, clips, draw, gradients, noised

ALONE = {"block_frames": 2, "first_frame_alone": True}
FRAMES = [0, 1, 1, 2, 2]
"""The block of each of five frames."""


def method(**settings: object) -> TeacherForcing:
    values = {"cond_dropout": 0.0, "sigma": Uniform(), "weighting": "none"} | settings
    return TeacherForcing(TeacherForcingSection(**values))  # type: ignore[arg-type]


def drawn(name: str) -> Tensor:
    return draw().uniform(name, (3,))[:, FRAMES]


def noise_of(name: str, x0: Tensor) -> Tensor:
    return draw().normal(name, tuple(x0.shape[1:]), dtype=torch.float64)


@pytest.mark.parametrize("highest", [0.0, 0.4])
@pytest.mark.parametrize("window", [None, 3])
def test_the_loss_is_that_of_every_block_against_the_history_of_the_data(highest, window):
    """Invariants 9, 14 through the method; the history has its own levels and its own noise."""
    model, batch = causal(0, **ALONE, window=window), clips()
    sigma, history_sigma = drawn("sigma"), highest * drawn("history.sigma")
    noise = noise_of("noise", batch.x0)
    clean = noised(batch.x0, noise_of("history.noise", batch.x0), history_sigma)
    x_t = noised(batch.x0, noise, sigma)
    velocity = block_by_block(model, x_t, sigma, batch.cond, clean, history_sigma)
    expected = (velocity - (noise - batch.x0)).square().flatten(1).mean(1)
    losses = method(history_sigma_max=highest).student_losses(model, batch, draw())
    assert list(losses) == ["student/loss"]
    torch.testing.assert_close(losses["student/loss"], expected, rtol=1e-9, atol=0)


def test_a_clean_history_is_the_data_bit_for_bit():
    model, batch = Watched(causal(0, **ALONE)), clips()
    method().student_losses(model, batch, draw())
    ((_, _, _, forced),) = model.asked
    assert list(forced) == ["clean"]
    assert forced["clean"] is batch.x0


def test_a_noised_history_has_one_level_a_block_up_to_the_highest_and_noise_that_is_not_the_blocks():
    model, batch = Watched(causal(0, **ALONE)), clips()
    method(history_sigma_max=0.3).student_losses(model, batch, draw())
    ((x_t, sigma, _, forced),) = model.asked
    levels = forced["clean_sigma"]
    assert torch.equal(levels, levels[:, [0, 1, 1, 3, 3]])
    assert len(levels.unique()) == 3 * ROWS
    assert 0 < levels.min() < 0.1 < 0.2 < levels.max() <= 0.3
    level = levels.double()[..., None, None, None]
    history_noise = (forced["clean"] - (1 - level) * batch.x0) / level
    level = sigma.double()[..., None, None, None]
    noise = (x_t - (1 - level) * batch.x0) / level
    correlation = torch.corrcoef(torch.stack([noise.flatten(), history_noise.flatten()]))[0, 1]
    assert abs(correlation) < 0.15


@pytest.mark.parametrize("highest", [0.0, 0.4])
def test_given_frames_are_clean_in_both_halves_and_leave_the_loss(highest):
    """PITFALLS, image-to-video."""
    model, batch = Watched(causal(0, **ALONE)), clips()
    losses = method(history_sigma_max=highest, given_frames=3).student_losses(model, batch, draw())
    ((x_t, sigma, _, forced),) = model.asked
    for seen in (x_t, forced["clean"]):
        assert torch.equal(seen[:, :3], batch.x0[:, :3])
    for levels in (sigma, forced.get("clean_sigma", torch.zeros(ROWS, 5))):
        assert torch.equal(levels[:, :3], torch.zeros(ROWS, 3))
    if highest:
        assert torch.equal(forced["clean_sigma"][:, 3:], 0.4 * drawn("history.sigma")[:, 3:])
    error = model.network.velocity(x_t, sigma, batch.cond, **forced) - (noise_of("noise", batch.x0) - batch.x0)
    expected = error[:, 3:].square().flatten(1).mean(1)
    torch.testing.assert_close(losses["student/loss"], expected, rtol=1e-12, atol=0)


def test_the_first_block_learns_the_same_from_teacher_and_diffusion_forcing():
    """It has no history; with the same draws the losses of a clip of one block are equal."""
    model, batch = causal(0, block_frames=2), clips(2)
    values = {"cond_dropout": 0.5}
    forced = TeacherForcing(TeacherForcingSection(**values)).student_losses(model, batch, draw())
    diffused = DiffusionForcing(DiffusionForcingSection(**values)).student_losses(model, batch, draw())
    torch.testing.assert_close(forced["student/loss"], diffused["student/loss"], rtol=1e-10, atol=0)
    longer = clips(4)
    losses = [
        made.student_losses(model, longer, draw())["student/loss"]
        for made in (
            TeacherForcing(TeacherForcingSection(**values)),
            DiffusionForcing(DiffusionForcingSection(**values)),
        )
    ]
    assert (losses[0] - losses[1]).abs().min() > 1e-6


def test_a_batch_is_its_micro_batches():
    """Invariant 50."""
    model, batch = causal(0, **ALONE), clips()
    made = method(history_sigma_max=0.4, cond_dropout=0.5)
    whole = made.student_losses(model, batch, draw())["student/loss"]
    for row in range(ROWS):
        cut = slice(row, row + 1)
        part = made.student_losses(model, rows(batch, cut), draw().rows(cut))["student/loss"]
        torch.testing.assert_close(part, whole[cut], rtol=1e-10, atol=0)


def test_the_gradient_reaches_every_weight_from_the_first_block_on():
    """Invariant 43."""
    model = causal(0, **ALONE)
    method().student_losses(model, clips(), draw())["student/loss"].mean().backward()
    found = gradients(model)
    assert len(found) == len(list(model.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in found)


@pytest.mark.parametrize("values", [{"history_sigma_max": 1.5}, {"history_sigma_max": -0.1}, {"history_sigma": 0.1}])
def test_a_section_that_makes_no_sense_is_refused(values):
    with pytest.raises(ValidationError):
        TeacherForcingSection(**values)

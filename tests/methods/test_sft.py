"""Flow matching on data, with a real tiny network in float64."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fewstep.flow.sigmas import Uniform
from fewstep.methods.sft import SFT, SFTSection
from fewstep.models.wan.conditioner import LabelCond
from fewstep.records import Batch
from fewstep.rng import Draw
from tests.engines.worlds import SHAPE, network, sft

ROWS, DOUBLE = 5, torch.float64


def draw(rows: int = ROWS) -> Draw:
    return Draw(seed=3, phase="student", iteration=4, key=torch.arange(rows))


def batch(rows: int = ROWS) -> Batch:
    x0 = torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    return Batch(torch.arange(rows), x0, LabelCond(torch.arange(rows) % 5), LabelCond(torch.full((rows,), 5)))


def expected_loss(model, label: Tensor, low: float, high: float) -> Tensor:
    x0 = batch().x0
    sigma = (low + (high - low) * draw().uniform("sigma").double()).float()[:, None]
    noise = draw().normal("noise", SHAPE, dtype=DOUBLE)
    level = sigma.double()[..., None, None, None]
    velocity = model.velocity((1 - level) * x0 + level * noise, sigma, LabelCond(label))
    return (velocity - (noise - x0)).square().flatten(1).mean(1)


def test_the_loss_is_the_mean_squared_error_of_the_velocity():
    model = network(0).double()
    method = SFT(SFTSection(sigma=Uniform(low=0.1, high=0.6), cond_dropout=0.0))
    losses = method.student_losses(model, batch(), draw())
    torch.testing.assert_close(losses["student/loss"], expected_loss(model, batch().cond.label, 0.1, 0.6))
    assert list(losses) == ["student/loss"]


def test_the_rows_that_lose_their_condition_get_the_null_one():
    """PITFALLS, guidance: one definition of uncond, that of the batch."""
    model = network(0).double()
    lost = draw().uniform("cond_dropout") < 0.5
    assert 0 < lost.sum() < ROWS
    losses = SFT(SFTSection(sigma=Uniform(), cond_dropout=0.5)).student_losses(model, batch(), draw())
    label = torch.where(lost, 5, batch().cond.label)
    torch.testing.assert_close(losses["student/loss"], expected_loss(model, label, 0.0, 1.0))


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_the_share_of_lost_conditions_is_that_of_the_recipe(share):
    asked = []

    class Asked:
        geometry, num_layers, width = network(0).geometry, 1, 1

        def velocity(self, x_t: Tensor, sigma: Tensor, cond: LabelCond) -> Tensor:
            asked.append(cond.label)
            return x_t

        def features(self, *_):
            raise AssertionError

    SFT(SFTSection(cond_dropout=share)).student_losses(Asked(), batch(2000), draw(2000))
    found = (asked[0] == 5).double().mean().item()
    assert found == pytest.approx(share, abs=0.02 if 0 < share < 1 else 0)


def test_data_without_a_null_condition_keep_theirs():
    bare = Batch(batch().key, batch().x0, batch().cond, None)
    model = network(0).double()
    kept = SFT(SFTSection(cond_dropout=1.0)).student_losses(model, bare, draw())
    plain = SFT(SFTSection(cond_dropout=0.0)).student_losses(model, batch(), draw())
    assert torch.equal(kept["student/loss"], plain["student/loss"])


def test_an_iteration_is_one_update_of_the_student():
    (phase,) = sft().phases(5)
    assert (phase.name, phase.trains, phase.batch, phase.part) == ("student", ("student",), 0, (0, 1))


@pytest.mark.parametrize(
    "values", [{"cond_dropout": 1.1}, {"cond_dropout": -0.1}, {"sigma": {"name": "normal"}}, {"k": 1}]
)
def test_a_section_that_makes_no_sense_is_refused(values):
    with pytest.raises(ValidationError):
        SFTSection(**values)

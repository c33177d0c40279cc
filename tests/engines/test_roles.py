"""Roles: frozen for ever or float32 masters, computed in bfloat16 where that is asked for, float32 towards others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fewstep.engines.roles import CriticSection, FrozenSection, Role, StudentSection, freeze
from fewstep.methods.gan import GANSection
from fewstep.models.wan.conditioner import LabelCond
from fewstep.optim.optimizer import OptimizerSection
from tests.engines.worlds import CPU, SHAPE, dmd2, engine, network

BF16 = torch.bfloat16


def inputs() -> tuple[torch.Tensor, torch.Tensor, LabelCond]:
    x_t = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(1))
    return x_t, torch.linspace(0.1, 0.9, 5)[:, None], LabelCond(torch.arange(5))


def test_a_frozen_role_computes_and_is_kept_in_its_precision_and_asks_for_no_gradient():
    frozen = freeze(network(0), CPU, BF16)
    assert {(p.dtype, p.requires_grad) for p in frozen.parameters()} == {(BF16, False)}
    assert Role("teacher", frozen, BF16).parameters() == {}


@pytest.mark.parametrize("frozen", [True, False])
def test_a_role_in_bfloat16_gives_float32_velocities_near_those_of_float32(frozen):
    made = freeze(network(0), CPU, BF16) if frozen else network(0)
    found = Role("student", made, BF16).velocity(*inputs())
    exact = network(0).velocity(*inputs())
    assert found.dtype == torch.float32
    error = (found - exact).norm() / exact.norm()
    assert 1e-5 < error < 0.05, "computed in bfloat16, and rightly"


def test_a_role_in_float32_is_its_network_to_the_last_bit():
    role = Role("student", network(0), torch.float32)
    assert torch.equal(role.velocity(*inputs()), network(0).velocity(*inputs()))
    (found,), (expected,) = (model.features(*inputs(), (1,)) for model in (role, network(0)))
    assert torch.equal(found, expected)


def test_autocast_ends_with_the_call():
    role = Role("student", network(0), BF16)
    role.velocity(*inputs())
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("features", ["critic", "teacher"])
def test_masters_stay_float32_and_move_at_a_rate_that_bfloat16_would_round_away(features):
    """PITFALLS, precision: lr 2e-6 on bfloat16 weights moves nothing."""
    optimizer = OptimizerSection(lr=2e-6, weight_decay=0.0)
    made = engine(dmd2(critic_updates=1, gan=GANSection(features=features)), dtype=BF16, optimizer=optimizer)
    before = {name: p.detach().clone() for name, p in made.roles["student"].parameters().items()}
    metrics = made.run(0)
    assert all(value.isfinite() for value in metrics.values())
    assert metrics["student/loss"].dtype == metrics["critic/loss"].dtype == torch.float32
    for name, parameter in made.roles["student"].parameters().items():
        assert parameter.dtype == torch.float32
        assert not torch.equal(parameter, before[name]), name
        assert (parameter - before[name]).abs().max() < 1e-5
    floats = {
        tensor.dtype for named in made.state().values() for tensor in named.values() if tensor.is_floating_point()
    }
    assert floats == {torch.float32}
    assert {p.dtype for p in made.roles["teacher"].network.parameters()} == {BF16}


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (FrozenSection, {}),
        (FrozenSection, {"init": "runs/x", "optimizer": {"lr": 1.0}}),
        (FrozenSection, {"init": "runs/x", "weights": "best"}),
        (StudentSection, {"init": "teacher"}),
        (CriticSection, {"lr": 1e-3}),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(section: Any, values: dict[str, Any]):
    with pytest.raises(ValidationError):
        section(**values)

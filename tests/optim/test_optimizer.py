"""The optimizer of a role against torch's AdamW driven by hand, and what a skipped update leaves alone."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fewstep.optim.optimizer import OptimizerSection, RoleOptimizer
from fewstep.optim.schedule import ScheduleSection

YES, NO = torch.tensor(True), torch.tensor(False)
SECTION = OptimizerSection(lr=0.03, betas=(0.5, 0.9), weight_decay=0.1, clip=2.0)
SCHEDULE = ScheduleSection(name="cosine", warmup_updates=2, final=0.1)
TOTAL = 6


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    drawn = {"a": torch.randn(3, 5, generator=generator), "b.c": torch.randn(7, generator=generator)}
    return {name: nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


def give(weights: dict[str, nn.Parameter], seed: int, broken: float | None = None) -> None:
    """Gradients, some of them above the limit; ``broken`` becomes one of their elements."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights.values():
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * (0.2 + seed % 2)
        weight.grad = drawn.to(weight.dtype)
    if broken is not None:
        weights["b.c"].grad[3] = broken  # type: ignore[index]


def step(optimizer: RoleOptimizer, seed: int, finite: Tensor = YES, broken: float | None = None) -> dict[str, Tensor]:
    give(optimizer.parameters, seed, broken)
    return optimizer.step(optimizer.norm(), finite)


def bits(optimizer: RoleOptimizer) -> dict[str, Tensor]:
    held = {f"weight/{name}": weight for name, weight in optimizer.parameters.items()}
    return {name: tensor.detach().clone() for name, tensor in (held | optimizer.state()).items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("betas", [(0.5, 0.9), (0.0, 0.999)])
def test_updates_equal_those_of_adamw_clipped_and_scheduled_by_hand(betas):
    section = SECTION.model_copy(update={"betas": betas})
    optimizer, weights = RoleOptimizer(parameters(), section, SCHEDULE, TOTAL), parameters()
    plain = torch.optim.AdamW(list(weights.values()), lr=1.0, betas=betas, weight_decay=0.1, fused=False)
    for update in range(TOTAL):
        report = step(optimizer, update)
        give(weights, update)
        norm = math.sqrt(sum(float(weight.grad.square().sum()) for weight in weights.values()))  # type: ignore[union-attr]
        for weight in weights.values():
            weight.grad *= min(1.0, 2.0 / norm)  # type: ignore[operator]
        rise = min(1.0, (update + 1) / 2)
        fall = (1 + math.cos(math.pi * max(0.0, (update - 2) / (TOTAL - 1 - 2)))) / 2
        plain.param_groups[0]["lr"] = 0.03 * rise * (0.1 + 0.9 * fall)
        plain.step()
        assert float(report["grad_norm"]) == pytest.approx(norm, rel=1e-12), "before clipping"
        assert float(report["lr"]) == pytest.approx(plain.param_groups[0]["lr"], rel=1e-12)
        assert (int(report["updates"]), int(report["skipped"])) == (update + 1, 0)
        for name, weight in weights.items():
            torch.testing.assert_close(optimizer.parameters[name], weight, rtol=1e-11, atol=1e-13)
    assert optimizer.parameters["a"].grad is None


def test_the_weights_decay_apart_from_the_gradient():
    optimizer = RoleOptimizer(parameters(), SECTION, ScheduleSection(), TOTAL)
    for weight in optimizer.parameters.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step(optimizer.norm(), YES)
    for name, before in parameters().items():
        torch.testing.assert_close(optimizer.parameters[name], before * (1 - 0.03 * 0.1), rtol=1e-12, atol=0)


def test_the_reported_values_do_not_change_later():
    optimizer = RoleOptimizer(parameters(), SECTION, SCHEDULE, TOTAL)
    first = step(optimizer, 0)
    kept = {name: value.clone() for name, value in first.items()}
    step(optimizer, 1)
    assert_same_bits(first, kept)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("before", [0, 3])
def test_a_skipped_update_leaves_weights_moments_and_progress_bit_for_bit(broken, dtype, before):
    optimizer = RoleOptimizer(parameters(dtype), SECTION, SCHEDULE, TOTAL)
    untouched = RoleOptimizer(parameters(dtype), SECTION, SCHEDULE, TOTAL)
    for update in range(before):
        step(optimizer, update)
        step(untouched, update)
    earlier = bits(optimizer)
    report = step(optimizer, 7, finite=NO, broken=broken)
    assert not report["grad_norm"].isfinite()
    assert (int(report["updates"]), int(report["skipped"])) == (before, 1)
    assert optimizer.parameters["b.c"].grad is None
    later = bits(optimizer)
    if not before:  # a first update that is skipped makes moments, all of them zero
        later = {name: tensor for name, tensor in later.items() if name in earlier or tensor.any()}
    assert_same_bits(later, earlier | {"skipped": torch.tensor(1)})
    went_on, expected = step(optimizer, 4), step(untouched, 4)
    assert torch.equal(went_on["lr"], expected["lr"])
    assert all(torch.equal(optimizer.parameters[name], weight) for name, weight in untouched.parameters.items())


def test_an_update_is_skipped_by_its_flag_though_its_gradient_is_finite():
    """Another role's loss was not finite: all roles of the phase stand still."""
    optimizer = RoleOptimizer(parameters(), SECTION, SCHEDULE, TOTAL)
    step(optimizer, 0)
    earlier = bits(optimizer)
    step(optimizer, 1, finite=NO)
    earlier["skipped"] += 1
    assert_same_bits(bits(optimizer), earlier)


def test_a_loaded_optimizer_goes_on_bit_for_bit():
    one = RoleOptimizer(parameters(torch.float32), SECTION, SCHEDULE, TOTAL)
    for update in range(3):
        step(one, update)
    step(one, 5, finite=NO, broken=math.nan)
    saved = {name: tensor.clone() for name, tensor in one.state().items()}
    weights = {name: nn.Parameter(weight.detach().clone()) for name, weight in one.parameters.items()}
    other = RoleOptimizer(weights, SECTION, SCHEDULE, TOTAL)
    other.load(saved)
    assert_same_bits(bits(other), bits(one))
    for update in range(3, 6):
        assert_same_bits(step(other, update), step(one, update))
    assert_same_bits(bits(other), bits(one))
    assert float(saved["updates"]) == 3, "what was loaded is a copy"


def test_the_state_of_an_optimizer_that_never_stepped_can_be_loaded():
    one = RoleOptimizer(parameters(), SECTION, SCHEDULE, TOTAL)
    other = RoleOptimizer(parameters(), SECTION, SCHEDULE, TOTAL)
    other.load(one.state())
    assert_same_bits(bits(other), bits(one))


def test_a_moment_of_an_unknown_parameter_is_an_error():
    one = RoleOptimizer(parameters(), SECTION, SCHEDULE, TOTAL)
    step(one, 0)
    state = {name.replace("b.c", "b.d"): tensor for name, tensor in one.state().items()}
    with pytest.raises(KeyError, match=r"b\.d"):
        RoleOptimizer(parameters(), SECTION, SCHEDULE, TOTAL).load(state)


def test_a_role_that_got_no_gradient_has_a_norm_of_zero_and_keeps_its_weights():
    optimizer = RoleOptimizer(parameters(), SECTION, SCHEDULE, TOTAL)
    assert float(optimizer.norm()) == 0
    optimizer.step(optimizer.norm(), YES)
    assert all(torch.equal(optimizer.parameters[name], weight) for name, weight in parameters().items())


@pytest.mark.parametrize(
    "values", [{"lr": 0.0}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}, {"clip": 0.0}, {"eps": 0.0}]
)
def test_a_section_that_makes_no_sense_is_refused(values):
    with pytest.raises(ValidationError):
        OptimizerSection(**({"lr": 1e-3} | values))

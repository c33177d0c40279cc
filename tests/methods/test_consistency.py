"""Consistency distillation with real tiny networks in float64, against the algorithm box written out."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fewstep.flow.sigmas import grid
from fewstep.methods.consistency import (
    Consistency,
    ConsistencySection,
    consistency_loss,
    euler_step,
    interval,
    predict,
)
from fewstep.models.wan.conditioner import LabelCond
from fewstep.records import Batch, Pair, Target, rows
from fewstep.rng import Draw
from tests.engines.worlds import assert_same_bits, copied, engine, network
from tests.methods.clips import DOUBLE, ROWS, Watched, block_by_block, causal, clips, draw, gradients, noised, x0_of
from tests.methods.gaussian import GaussianTeacher

ALONE = {"block_frames": 2, "first_frame_alone": True}


def method(**settings: Any) -> Consistency:
    return Consistency(ConsistencySection(**settings))


def exact_level(i: int, nodes: int) -> Fraction:
    """Node i of the grid at shift 5 (the last one is 0), without any rounding."""
    u = Fraction(nodes - i, nodes)
    return 5 * u / (1 + 4 * u)


def all_intervals(nodes: int, s: float = 5.0) -> tuple[Tensor, Tensor, Tensor]:
    return interval(torch.arange(nodes, dtype=torch.float32), nodes, s)


# --- the grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [48, 1000])
def test_the_step_is_exact_to_a_millionth_however_small_it_is(nodes):
    """Invariant 8 (ref): taken in float64 before it is stored; from stored levels it would be off by more, and in
    bfloat16 by up to 64 %."""
    sigma, sigma_next, dt = all_intervals(nodes)
    exact = [exact_level(i + 1, nodes) - exact_level(i, nodes) for i in range(nodes)]
    error = [abs(Fraction(found) - value) / abs(value) for found, value in zip(dt.tolist(), exact, strict=True)]
    assert max(error) < 1e-6
    stored = (sigma_next - sigma).tolist()
    assert max(abs(Fraction(a) - b) / abs(b) for a, b in zip(stored, exact, strict=True)) > 1e-6
    narrow = (sigma_next.bfloat16() - sigma.bfloat16()).tolist()
    assert max(abs(Fraction(a) - b) / abs(b) for a, b in zip(narrow, exact, strict=True)) > 0.5
    assert dt.dtype == torch.float32


@pytest.mark.parametrize(("nodes", "s"), [(48, 5.0), (7, 1.0), (1, 3.0)])
def test_the_levels_are_those_of_the_grid_and_a_last_0_bit_for_bit(nodes, s):
    sigma, sigma_next, _ = all_intervals(nodes, s)
    levels = torch.tensor([*grid(nodes, s), 0.0], dtype=torch.float64).float()
    assert torch.equal(sigma, levels[:-1])
    assert torch.equal(sigma_next, levels[1:])


@pytest.mark.parametrize(("last", "count"), [(True, 6), (False, 5)])
def test_every_interval_is_drawn_alike_one_a_sample_for_all_frames(last, count):
    many = Batch(torch.arange(6000), torch.zeros(6000, 2, 1, 1, 1), LabelCond(torch.zeros(6000).long()), None)
    wide = Draw(seed=3, phase="pair", iteration=7, key=many.key)

    class Still(Watched):
        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            return torch.zeros_like(x_t)

    pair = method(nodes=6, guidance_scale=1.0, last_interval=last).pair(Still(network(0)), many, wide)
    assert torch.equal(pair.sigma[:, 0], pair.sigma[:, 1])
    assert torch.equal(pair.sigma_next[:, 0], pair.sigma_next[:, 1])
    levels, counts = pair.sigma[:, 0].unique(return_counts=True)
    expected = torch.tensor(grid(6, 5.0), dtype=torch.float64).float()[:count]
    assert torch.equal(levels, expected.sort().values)
    assert (counts.double() / 6000 - 1 / count).abs().max() < 0.02
    assert (pair.sigma_next == 0).any() == last


# --- the three phases -------------------------------------------------------------------------------------------------


def drawn_levels(nodes: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    """sigma, the next one and the step of every sample, in float64, [b 1]."""
    index = (draw("pair").uniform("index").double() * nodes).floor().long().tolist()
    levels = [[float(exact_level(i + k, nodes)) for i in index] for k in (0, 1)]
    sigma, sigma_next = torch.tensor(levels, dtype=DOUBLE)[..., None]
    return sigma, sigma_next, sigma_next - sigma


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_pair_is_one_guided_euler_step_of_the_teacher_on_the_clean_history(scale):
    """Invariant 9 through the method: both halves of the guidance see the history of the data."""
    teacher, batch = causal(1, **ALONE), clips()
    pair = method(guidance_scale=scale).pair(teacher, batch, draw("pair"))
    sigma, sigma_next, dt = drawn_levels()
    level = sigma.float().expand(-1, 5)
    x_t = noised(batch.x0, draw("pair").normal("noise", batch.x0.shape[1:], dtype=DOUBLE), level)
    zero = torch.zeros_like(level)
    with_cond, without = (
        block_by_block(teacher, x_t, level, told, batch.x0, zero) for told in (batch.cond, batch.uncond)
    )
    velocity = without + scale * (with_cond - without)
    torch.testing.assert_close(pair.x_t, x_t, rtol=1e-12, atol=0)
    torch.testing.assert_close(pair.x_next, x_t + dt[..., None, None, None] * velocity, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(pair.sigma_next, sigma_next.float().expand(-1, 5), rtol=0, atol=0)
    assert torch.equal(pair.sigma, level)
    assert torch.equal(pair.key, batch.key)


def pair_at(index: int, nodes: int, batch: Batch, teacher: Any) -> Pair:
    """The pair of one interval for every sample, with the step taken here."""
    sigma, sigma_next, dt = (level[index].expand(ROWS, batch.x0.shape[1]) for level in all_intervals(nodes))
    x_t = noised(batch.x0, draw().normal("noise", batch.x0.shape[1:], dtype=DOUBLE), sigma)
    forced = {"clean": batch.x0} if getattr(teacher, "causal", None) else {}
    return Pair(
        batch.key, x_t, sigma, euler_step(x_t, teacher.velocity(x_t, sigma, batch.cond, **forced), dt), sigma_next
    )


@torch.no_grad()
def test_the_target_is_x0_of_the_average_at_the_next_level_and_the_loss_its_squared_distance():
    student, teacher, ema, batch = causal(0, **ALONE), causal(1, **ALONE), causal(2, **ALONE), clips()
    pair = pair_at(3, 8, batch, teacher)
    target = method().target(ema, pair, batch)
    zero = torch.zeros(ROWS, 5)
    velocity = block_by_block(ema, pair.x_next, pair.sigma_next, batch.cond, batch.x0, zero)
    torch.testing.assert_close(target.x0, x0_of(velocity, pair.x_next, pair.sigma_next), rtol=1e-9, atol=1e-10)
    assert torch.equal(target.key, batch.key)
    losses = method().student_losses(student, pair, target, batch)
    velocity = block_by_block(student, pair.x_t, pair.sigma, batch.cond, batch.x0, zero)
    expected = (x0_of(velocity, pair.x_t, pair.sigma) - target.x0).square().flatten(1).mean(1)
    assert list(losses) == ["student/loss"]
    torch.testing.assert_close(losses["student/loss"], expected, rtol=1e-9, atol=0)


@torch.no_grad()
def test_the_last_interval_ends_at_the_teachers_x0():
    """The step to 0 is x_t - sigma v, and the average has no say there, whatever it is (ref)."""
    teacher, batch = causal(1, **ALONE), clips()
    pair = pair_at(7, 8, batch, teacher)
    assert torch.equal(pair.sigma_next, torch.zeros(ROWS, 5))
    expected = predict(teacher, pair.x_t, pair.sigma, batch)
    for seed in (2, 3):
        assert torch.equal(method().target(causal(seed, **ALONE), pair, batch).x0, pair.x_next)
    assert torch.equal(pair.x_next, expected)


@torch.no_grad()
def test_images_with_a_network_that_sees_all_frames_need_no_history():
    student, teacher, ema, batch = (network(0).double(), network(1).double(), network(2).double(), clips(1))
    made, watched = method(guidance_scale=3.0), [Watched(model) for model in (teacher, ema, student)]
    pair = made.pair(watched[0], batch, draw("pair"))
    losses = made.student_losses(watched[2], pair, made.target(watched[1], pair, batch), batch)
    assert all(asked[3] == {} for model in watched for asked in model.asked)
    sigma, sigma_next, dt = drawn_levels()
    level = sigma.float()
    x_t = noised(batch.x0, draw("pair").normal("noise", batch.x0.shape[1:], dtype=DOUBLE), level)
    with_cond, without = (teacher.velocity(x_t, level, told) for told in (batch.cond, batch.uncond))
    x_next = x_t + dt[..., None, None, None] * (without + 3.0 * (with_cond - without))
    target = x0_of(ema.velocity(x_next, sigma_next.float(), batch.cond), x_next, sigma_next)
    error = x0_of(student.velocity(x_t, level, batch.cond), x_t, level) - target
    torch.testing.assert_close(losses["student/loss"], error.square().flatten(1).mean(1), rtol=1e-5, atol=0)


@torch.no_grad()
def test_data_of_one_point_have_no_residual():
    """Invariant 40: v = (x - c) / sigma is the exact velocity, and its consistency function is c everywhere."""
    batch = clips(1)
    point = batch.x0

    class OnePoint(Watched):
        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            return (x_t - point) / sigma.double().clamp_min(1e-30)[..., None, None, None]

    model, made = OnePoint(network(0)), method(guidance_scale=1.0)
    for index in range(6):
        pair = pair_at(index, 6, batch, model)
        losses = made.student_losses(model, pair, made.target(model, pair, batch), batch)
        assert losses["student/loss"].max() < 1e-12
    pair = made.pair(model, batch, draw("pair"))
    level = pair.sigma_next.double()[..., None, None, None]
    noise = draw("pair").normal("noise", point.shape[1:], dtype=DOUBLE)
    torch.testing.assert_close(pair.x_next, (1 - level) * point + level * noise, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("index", [0, 4, 7])
def test_one_network_in_all_roles_disagrees_with_itself_by_the_change_of_its_velocity(index):
    """Invariant 41: f(x_t) - f(x_next) = sigma' (v' - v)."""
    model, batch = causal(1, **ALONE), clips()
    pair = pair_at(index, 8, batch, model)
    here = model.velocity(pair.x_t, pair.sigma, batch.cond, clean=batch.x0)
    there = model.velocity(pair.x_next, pair.sigma_next, batch.cond, clean=batch.x0)
    level = pair.sigma_next.double()[..., None, None, None]
    expected = (level * (there - here)).square().flatten(1).mean(1)
    losses = method().student_losses(model, pair, method().target(model, pair, batch), batch)
    torch.testing.assert_close(losses["student/loss"], expected, rtol=1e-4, atol=1e-13)


@pytest.mark.parametrize(("nodes", "endpoint"), [(48, 0.9484), (192, 0.9868)])
def test_the_teachers_steps_one_after_the_other_shrink_gaussian_data_as_euler_must(nodes, endpoint):
    """Invariant 42: data N(0, 1), where the exact flow keeps every state's scale of 1 at the end."""
    teacher, x = GaussianTeacher(0.0, 1.0), torch.ones(1, 1, 1, 1, 1, dtype=DOUBLE)
    for sigma, dt in zip(all_intervals(nodes)[0], all_intervals(nodes)[2], strict=True):
        level = sigma.double().view(1, 1)
        x = euler_step(x, teacher.velocity(x, level, None), dt.double().view(1, 1))
    assert x.item() == pytest.approx(endpoint, abs=5e-5)


# --- gradients, batches, engines --------------------------------------------------------------------------------------


def test_the_gradient_stays_in_the_student_and_reaches_its_first_block():
    """Invariant 43."""
    student, teacher, ema, batch = causal(0, **ALONE), causal(1, **ALONE), causal(2, **ALONE), clips()
    made = method()
    with torch.no_grad():
        pair = made.pair(teacher, batch, draw("pair"))
        target = made.target(ema, pair, batch)
    made.student_losses(student, pair, target, batch)["student/loss"].mean().backward()
    assert len(gradients(student)) == len(list(student.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in gradients(student))
    assert gradients(teacher) == gradients(ema) == []


@torch.no_grad()
def test_a_batch_is_its_micro_batches():
    """Invariant 50."""
    student, teacher, ema, batch = causal(0, **ALONE), causal(1, **ALONE), causal(2, **ALONE), clips()
    made = method()

    def losses(cut: slice) -> Tensor:
        part = rows(batch, cut)
        pair = made.pair(teacher, part, draw("pair").rows(cut))
        return made.student_losses(student, pair, made.target(ema, pair, part), part)["student/loss"]

    whole = losses(slice(None))
    for row in range(ROWS):
        torch.testing.assert_close(losses(slice(row, row + 1)), whole[row : row + 1], rtol=1e-9, atol=0)


def test_an_iteration_leaves_the_teacher_as_it_is_and_moves_the_average_by_its_rule():
    """Invariants 43, 49: the target is the average before the update, which then takes its share of the student."""
    running = engine(method(nodes=7))
    before = copied(running.state())
    teacher = copied({"teacher": dict(running.roles["teacher"].network.state_dict())})
    running.run(0)
    after = copied(running.state())
    assert_same_bits({"teacher": dict(running.roles["teacher"].network.state_dict())}, teacher)
    assert gradients(running.roles["teacher"].network) == []
    moved = [name for name, weight in after["student"].items() if not torch.equal(weight, before["student"][name])]
    assert len(moved) == len(after["student"])
    running.run(1)
    for name, weight in running.state()["ema"].items():
        expected = 0.8 * after["ema"][name] + 0.2 * running.state()["student"][name]
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-7)


def test_losses_are_float32_at_least():
    """PITFALLS, precision: predictions in bfloat16 are widened before they are compared."""
    x_t, target = torch.ones(2, 1, 1, 2, 2), torch.zeros(2, 1, 1, 2, 2)

    class Narrow(Watched):
        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            return torch.full_like(x_t, 0.3).bfloat16()

    batch = Batch(torch.arange(2), x_t, LabelCond(torch.zeros(2).long()), None)
    pair = Pair(batch.key, x_t, torch.full((2, 1), 0.7), x_t, torch.full((2, 1), 0.5))
    losses = method().student_losses(Narrow(network(0)), pair, Target(batch.key, target), batch)
    expected = (1 - torch.tensor(0.7) * torch.tensor(0.3).bfloat16().float()) ** 2
    assert losses["student/loss"].dtype == torch.float32
    torch.testing.assert_close(losses["student/loss"], expected.expand(2), rtol=1e-6, atol=0)


def test_the_loss_is_the_mean_square_of_every_sample():
    x0, target = torch.randn(2, 3, 1, 2, 2, dtype=DOUBLE), torch.randn(2, 3, 1, 2, 2, dtype=DOUBLE)
    expected = [
        sum((a - b) ** 2 for a, b in zip(x.flatten(), y.flatten(), strict=True)) / 12
        for x, y in zip(x0, target, strict=True)
    ]
    torch.testing.assert_close(consistency_loss(x0, target), torch.stack(expected))


def test_a_grid_without_an_interval_to_learn_is_refused():
    with pytest.raises(ValidationError, match="write last_interval: true, or more nodes"):
        ConsistencySection(nodes=1, last_interval=False)
    assert ConsistencySection(nodes=1).num_intervals == 1
    assert ConsistencySection().num_intervals == 48

"""Trajectories of teachers whose ODE is known, and of real causal networks, against slower ways to compute them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewstep.errors import UserError
from fewstep.flow.guidance import guide
from fewstep.flow.sigmas import grid, ladder
from fewstep.models.api import Geometry
from fewstep.models.blocks import CausalSection
from fewstep.models.wan.causal import CausalWan
from fewstep.models.wan.conditioner import EmbeddingCond
from fewstep.records import Batch, rows
from fewstep.rng import Draw
from fewstep.rollout.teacher_ode import TeacherODE
from tests.methods.gaussian import GaussianTeacher
from tests.models.tiny import relative, tiny_section, tiny_wan

DOUBLE = torch.float64
FOUR = ladder(4, 5.0)
FORMS = [
    {"block_frames": 1},
    {"block_frames": 2},
    {"block_frames": 3},
    {"block_frames": 2, "first_frame_alone": True},
    {"block_frames": 1, "window": 3, "sink": 1},
    {"block_frames": 2, "window": 4, "sink": 1, "positions": "reindexed"},
]


class PointTeacher(nn.Module):
    """All data are the one point ``c``: the velocity is (x_t - c) / sigma. Row by row the point of its condition."""

    geometry = Geometry(channels=4, patch=(1, 1, 1))
    num_layers, width = 1, 1

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: EmbeddingCond) -> Tensor:
        return (x_t - cond.tokens[..., None, None]) / sigma[:, :, None, None, None]

    def features(self, *_: Any) -> tuple[Tensor, ...]:
        raise AssertionError


def draw(num_rows: int = 2) -> Draw:
    return Draw(7, "trajectories", 0, torch.arange(num_rows) + 5)


def noise(shape: tuple[int, ...], num_rows: int = 2) -> Tensor:
    return draw(num_rows).normal("noise", shape, dtype=DOUBLE)


def batch(num_frames: int, num_rows: int = 2, text: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(3)
    x0 = torch.randn(num_rows, num_frames, 4, 4, 4, generator=generator, dtype=DOUBLE)
    cond, uncond = (torch.randn(num_rows, text, 20, generator=generator, dtype=DOUBLE) for _ in range(2))
    return Batch(torch.arange(num_rows), x0, EmbeddingCond(cond), EmbeddingCond(uncond))


def points(c: Tensor, shape: tuple[int, ...]) -> Batch:
    x0 = torch.zeros(len(c), *shape, dtype=DOUBLE)
    return Batch(torch.arange(len(c)), x0, EmbeddingCond(c[:, None]), EmbeddingCond(-c[:, None]))


def causal(**form: Any) -> CausalWan:
    network = tiny_wan(tiny_section(causal=CausalSection(**({"block_frames": 2} | form))), DOUBLE)
    assert isinstance(network, CausalWan)
    return network


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_the_states_of_one_point_lie_on_the_straight_line_to_it(guidance_scale):
    """Invariant 40: (1 - sigma) c + sigma noise. Guided by w over the point -c, the line leads to (2 w - 1) c."""
    c = torch.tensor([[0.5, -2.0, 1.0, 3.0], [1.5, 0.1, -0.7, 0.0]], dtype=DOUBLE)
    given = points(c, (3, 4, 2, 5))
    found = TeacherODE(48, 5.0, FOUR, guidance_scale)(PointTeacher(), given, draw())
    level = torch.tensor(FOUR, dtype=DOUBLE).view(1, -1, 1, 1, 1, 1)
    point = (2 * guidance_scale - 1) * c[:, None, :, None, None]
    line = (1 - level) * point[:, None] + level * noise((3, 4, 2, 5))[:, None]
    torch.testing.assert_close(found.states, line, atol=1e-11, rtol=0)
    torch.testing.assert_close(found.endpoint, point.expand_as(found.endpoint), atol=1e-11, rtol=0)
    assert found.key.tolist() == [5, 6]


@pytest.mark.parametrize(("nodes", "factor"), [(48, 0.9484), (192, 0.9868)])
def test_the_endpoint_of_normal_data_falls_short_by_the_error_of_the_steps(nodes, factor):
    """Invariant 42: the exact endpoint is the noise itself; every Euler endpoint is a multiple of it."""
    given = points(torch.zeros(2, 4, dtype=DOUBLE), (1, 4, 3, 3))
    found = TeacherODE(nodes, 5.0, FOUR)(GaussianTeacher(0.0, 1.0), given, draw())
    assert (found.endpoint / noise((1, 4, 3, 3))).flatten().tolist() == pytest.approx([factor] * 72, abs=5e-5)
    assert torch.equal(found.states[:, 0], noise((1, 4, 3, 3)))


def sequential(network: CausalWan, given: Batch, sigmas: tuple[float, ...], scale: float) -> Tensor:
    """Block by block: each runs its whole ODE alone, with and without the condition apart, on a rolled history of the
    ground truth. Returns the state at every node and the endpoint, [b n f c h w]."""
    assert given.x0 is not None
    sizes, start = network.causal.partition(given.x0.shape[1]), 0
    whole, found = noise(tuple(given.x0.shape[1:]), len(given.x0)), []
    histories: list[Any] = [None, None]
    for block, size in enumerate(sizes):
        span = slice(start, start + size)
        x_t, states = whole[:, span], []
        for sigma, following in pairwise((*sigmas, 0.0)):
            level = torch.full(x_t.shape[:2], sigma, dtype=DOUBLE)
            velocities = [
                network.velocity_given(x_t, level, cond, history, block)
                for cond, history in zip((given.cond, given.uncond), histories, strict=True)
            ]
            states.append(x_t)
            x_t = x_t + (following - sigma) * guide(*velocities, scale)
        found.append(torch.stack([*states, x_t], 1))
        clean = given.x0[:, span]
        conds = (given.cond, given.uncond)
        histories = [network.append(old, clean, cond) for old, cond in zip(histories, conds, strict=True)]
        start += size
    return torch.cat(found, 2)


@pytest.mark.parametrize("form", FORMS, ids=str)
@torch.no_grad()
def test_all_blocks_at_once_equal_the_blocks_one_by_one(form):
    """Invariant 44: every block's ODE against the history of ground-truth blocks; invariant 30: guided in one call."""
    network, given = causal(**form), batch(7 if form.get("first_frame_alone") else 6)
    nodes, keep = 8, ladder(4, 5.0)
    found = TeacherODE(nodes, 5.0, keep, 3.0)(network, given, draw())
    expected = sequential(network, given, grid(nodes, 5.0), 3.0)
    assert relative(found.states, expected[:, [0, 2, 4, 6]]) < 1e-10
    assert relative(found.endpoint, expected[:, -1]) < 1e-10


def run_whole(network: CausalWan, given: Batch, sigmas: tuple[float, ...], scale: float) -> Tensor:
    """[clean | noisy] at every step. Returns the endpoint."""
    assert given.x0 is not None
    assert given.uncond is not None
    x_t = noise(tuple(given.x0.shape[1:]), len(given.x0))
    for sigma, following in pairwise((*sigmas, 0.0)):
        level = torch.full(x_t.shape[:2], sigma, dtype=DOUBLE)
        conds = (given.cond, given.uncond)
        velocities = [network.velocity(x_t, level, cond, clean=given.x0) for cond in conds]
        x_t = x_t + (following - sigma) * guide(*velocities, scale)
    return x_t


@pytest.mark.parametrize("form", FORMS[1:4], ids=str)
@torch.no_grad()
def test_the_history_filled_once_saves_half_of_the_tokens_and_changes_nothing(form):
    """49 of 96 sequences: 48 noisy ones and one clean, instead of both at each of 48 steps."""
    network, given, counted = causal(**form), batch(7 if form.get("first_frame_alone") else 6), [0]

    def count(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        b, f, s, _ = inputs[0].shape
        counted[0] += b * f * s

    network.blocks[0].register_forward_pre_hook(count)
    found = TeacherODE(48, 5.0, FOUR, 6.0)(network, given, draw())
    ours, counted[0] = counted[0], 0
    expected = run_whole(network, given, grid(48, 5.0), 6.0)
    assert ours / counted[0] == 49 / 96 < 0.515
    assert relative(found.endpoint, expected) < 1e-9


@torch.no_grad()
def test_an_unguided_causal_teacher_needs_no_null_condition():
    network, given = causal(), batch(4)
    bare = Batch(given.key, given.x0, given.cond, None)
    both = TeacherODE(4, 5.0, (1.0,), 1.0)(network, given, draw())
    assert torch.equal(TeacherODE(4, 5.0, (1.0,), 1.0)(network, bare, draw()).endpoint, both.endpoint)
    for teacher in (network, PointTeacher()):
        with pytest.raises(ValueError, match=r"guidance_scale 2\.0 needs the unconditional input"):
            TeacherODE(4, 5.0, (1.0,), 2.0)(teacher, bare, draw())


@pytest.mark.parametrize("teacher", [causal(), tiny_wan(dtype=DOUBLE)], ids=["causal", "bidirectional"])
def test_a_row_is_the_same_in_whatever_batch_it_is_made(teacher):
    ode = TeacherODE(4, 5.0, (1.0,), 2.0)
    whole = ode(teacher, batch(4, 3), draw(3))
    one = ode(teacher, rows(batch(4, 3), slice(1, 2)), draw(3).rows(slice(1, 2)))
    assert relative(one.endpoint, whole.endpoint[1:2]) < 1e-11
    assert torch.equal(one.states, whole.states[1:2])
    assert not whole.endpoint.requires_grad


@pytest.mark.parametrize(
    ("nodes", "shift", "keep", "words"),
    [
        (
            50,
            5.0,
            FOUR,
            r"50 nodes at shift 5 .* lacks 0\.9375, 0\.625 of .* ladder 1, 0\.9375, 0\.833333, 0\.625",
        ),
        (50, 5.0, FOUR, r"write method\.nodes: 48, or any other multiple of 4"),
        (2, 5.0, FOUR, r"write method\.nodes: 4, or"),
        (48, 3.0, FOUR, r"write the shift of sampling as method\.shift"),
        (48, 5.0, (1.0, 0.9375, 0.833, 0.625), r"lacks 0\.833 .*to the last digit"),
    ],
)
def test_a_grid_without_the_students_noise_levels_is_refused_before_anything_starts(nodes, shift, keep, words):
    with pytest.raises(UserError, match=words):
        TeacherODE(nodes, shift, keep)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 8])
def test_a_grid_of_a_multiple_of_the_steps_contains_the_ladder_exactly(steps):
    """Invariant 1, for every number of steps that divides 48."""
    assert set(ladder(steps, 5.0)) <= set(TeacherODE(48, 5.0, ladder(steps, 5.0)).sigmas)

"""Regression onto a teacher's trajectories, with real tiny networks in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fewstep.errors import UserError
from fewstep.flow.sigmas import ladder
from fewstep.methods.ode_init import OdeInit, OdeInitSection, regression, stopped
from fewstep.models.blocks import CausalSection
from fewstep.models.wan.model import Wan
from fewstep.records import Batch, Trajectory, concat, map_tensors, rows
from fewstep.rng import Draw
from fewstep.rollout.few_step import FewStep
from tests.models.tiny import inputs, relative, tiny_section, tiny_wan

ROWS, FRAMES, DOUBLE = 5, 5, torch.float64
FOUR = ladder(4, 5.0)
SHAPE = (FRAMES, 4, 4, 4)
ALONE = CausalSection(block_frames=2, first_frame_alone=True)


def method(**settings: Any) -> OdeInit:
    return OdeInit.of(OdeInitSection(**settings), FewStep(FOUR, "renoise", SHAPE))


def draw(num_rows: int = ROWS) -> Draw:
    return Draw(seed=3, phase="student", iteration=4, key=torch.arange(num_rows))


def trajectory(num_rows: int = ROWS) -> Trajectory:
    generator = torch.Generator().manual_seed(2)
    path = torch.randn(num_rows, 5, *SHAPE, generator=generator, dtype=DOUBLE)
    return Trajectory(10 + torch.arange(num_rows), path[:, :4], path[:, 4])


def batch(num_rows: int = ROWS) -> Batch:
    x0, _, cond = inputs(num_rows, FRAMES, 4, 4, dtype=DOUBLE)
    return Batch(torch.arange(num_rows), x0, cond, None, trajectory(num_rows))


def student(causal: CausalSection | None = None) -> Wan:
    return tiny_wan(tiny_section(causal=causal), DOUBLE)


def states(stop: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The state of every frame at its stop and its noise level, picked by loops; stop 4 is the endpoint."""
    given, level = trajectory(), (*FOUR, 0.0)
    path = [*given.states.unbind(1), given.endpoint]
    picked = [torch.stack([path[k][b, f] for f, k in enumerate(row)]) for b, row in enumerate(stop)]
    return torch.stack(picked), torch.tensor([[level[k] for k in row] for row in stop], dtype=DOUBLE)


def golden(network: Wan, stop: list[list[int]], **forced: Any) -> Tensor:
    """mean over a sample of (x_t - sigma v - endpoint)^2."""
    x_t, sigma = states(stop)
    velocity = network.velocity(x_t, sigma, batch().cond, **forced)
    error = x_t - sigma[..., None, None, None] * velocity - trajectory().endpoint
    return error.pow(2).sum((1, 2, 3, 4)) / error[0].numel()


def stops_per_sample() -> list[list[int]]:
    return [[int(4 * u)] * FRAMES for u in draw().uniform("stop").tolist()]


def test_the_loss_of_a_bidirectional_student_is_the_error_of_its_x0():
    """KD on images and clips: one stop a sample, the same for all its frames."""
    found = method().student_losses(student(), batch(), draw())
    assert list(found) == ["student/loss"]
    assert len({row[0] for row in stops_per_sample()}) > 1
    torch.testing.assert_close(found["student/loss"], golden(student(), stops_per_sample()), atol=0, rtol=1e-12)


@pytest.mark.parametrize("causal", [CausalSection(block_frames=1), ALONE])
def test_a_causal_student_sees_the_clean_blocks_of_the_ground_truth(causal):
    """Teacher forcing on x0, not on the teacher's endpoint."""
    network = student(causal)
    found = method().student_losses(network, batch(), draw())["student/loss"]
    expected = golden(network, stops_per_sample(), clean=batch().x0)
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-12)
    assert relative(golden(network, stops_per_sample(), clean=trajectory().endpoint), expected) > 1e-3


def test_in_causvids_form_every_block_stops_by_itself_and_sees_the_noised_blocks_before_it():
    network, uniform = student(ALONE), draw().uniform("stop", (3,)).tolist()
    stop = [[int(5 * u[block]) for block in (0, 1, 1, 2, 2)] for u in uniform]
    assert any(4 in row for row in stop), "a clean block is met"
    found = method(stop_per="block").student_losses(network, batch(), draw())["student/loss"]
    torch.testing.assert_close(found, golden(network, stop), atol=0, rtol=1e-12)


def test_blocks_that_stop_clean_add_nothing_to_the_loss():
    x_t, sigma = stopped(trajectory(), (*FOUR, 0.0), torch.full((ROWS, FRAMES), 4))
    assert torch.equal(x_t, trajectory().endpoint)
    assert not sigma.any()
    assert not regression(x_t, trajectory().endpoint).any()


def test_every_stop_is_drawn_equally_often_and_from_its_row_alone():
    taken, many = method(), draw(4000)
    stop = taken._stop_per_sample(map_tensors(lambda t: t[:1].expand(4000, *t.shape[1:]), trajectory()), many)
    assert stop.shape == (4000, FRAMES)
    assert torch.bincount(stop[:, 0], minlength=4).tolist() == pytest.approx([1000] * 4, abs=100)
    part = taken._stop_per_sample(trajectory(3), many.rows(slice(7, 10)))
    assert torch.equal(part, stop[7:10])


def test_the_loss_of_a_row_does_not_depend_on_its_batch_mates():
    """Invariant 50: micro-batches."""
    network = student(ALONE)
    whole = method().student_losses(network, batch(), draw())["student/loss"]
    parts = [
        method().student_losses(network, rows(batch(), part), draw().rows(part))["student/loss"]
        for part in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(torch.cat(parts), whole, atol=0, rtol=1e-12)


def test_a_loss_of_bfloat16_predictions_is_taken_in_float32():
    x0, endpoint = torch.full((2, 1, 1, 1, 1), 1.0), torch.full((2, 1, 1, 1, 1), 1.001)
    assert regression(x0.bfloat16(), endpoint).tolist() == pytest.approx([1e-6] * 2, rel=1e-3)


def test_a_batch_keeps_its_trajectories_when_it_is_cut_and_joined():
    cut = [rows(batch(), slice(0, 2)), rows(batch(), slice(2, 5))]
    assert cut[1].trajectory is not None
    assert cut[1].trajectory.key.tolist() == [12, 13, 14]
    joined = concat(cut).trajectory
    assert joined is not None
    assert torch.equal(joined.states, trajectory().states)
    assert torch.equal(joined.endpoint, trajectory().endpoint)


def test_an_iteration_is_one_update_of_the_student_and_needs_no_teacher():
    (phase,) = method().phases(5)
    assert (phase.name, phase.trains, phase.batch, phase.part) == ("student", ("student",), 0, (0, 1))
    assert (OdeInit.roles, OdeInit.trained, OdeInit.offline) == (("student", "teacher"), ("student",), ("teacher",))


def test_a_grid_that_lacks_the_ladder_is_refused_with_the_method():
    with pytest.raises(UserError, match=r"method\.nodes: 48"):
        method(nodes=50)


@pytest.mark.parametrize(
    ("stop_per", "student", "teacher", "words"),
    [
        ("sample", ALONE, ALONE, None),
        ("sample", None, None, None),
        ("block", ALONE, None, None),
        ("sample", ALONE, ALONE.model_copy(update={"window": 4}), None),
        ("sample", None, ALONE, r"write student\.causal like the teacher's"),
        ("sample", CausalSection(block_frames=1), ALONE, r"blocks of 1 frames, the teacher of 2 frames after a first"),
        ("sample", ALONE, None, "write block"),
        ("block", ALONE, ALONE, "write sample"),
        ("block", None, None, "write sample"),
    ],
)
def test_forms_of_student_and_teacher_that_do_not_go_together_are_told(stop_per, student, teacher, words):
    problems = list(method(stop_per=stop_per).misfits(student, teacher))
    if words is None:
        assert not problems
    else:
        (problem,) = problems
        assert re.search(words, problem)


@pytest.mark.parametrize(
    "values", [{"nodes": 0}, {"shift": 0.0}, {"stop_per": "frame"}, {"trajectories": {"count": 0}}, {"k": 1}]
)
def test_a_section_that_makes_no_sense_is_refused(values):
    with pytest.raises(ValidationError):
        OdeInitSection(**values)

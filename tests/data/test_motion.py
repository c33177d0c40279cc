"""The known physics: paths are those of a point that is followed by hand, and two positions give the next."""

from __future__ import annotations

import math

import pytest
import torch

from fewstep.data.motion import MOTIONS, Motion

BOUNCE, CIRCLE = 0, 1
SETTINGS = [Motion(16, 8, 1.0), Motion(11, 4, 0.37), Motion(13, 8, 5.0), Motion(64, 32, 3.3)]


def drawn(physics: Motion, count: int, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Paths of both motions in turn, float64."""
    generator = torch.Generator().manual_seed(1)
    motion = torch.arange(count) % 2
    start = torch.rand(count, 2, generator=generator, dtype=torch.float64) * physics.room + physics.item_size / 2
    angle = torch.rand(count, generator=generator, dtype=torch.float64) * 2 * math.pi
    return physics.path(motion, start, angle, frames), motion


def one(motion: int, start: tuple[float, float], angle: float, frames: int, physics: Motion) -> torch.Tensor:
    start_, angle_ = torch.tensor([start], dtype=torch.float64), torch.tensor([angle], dtype=torch.float64)
    return physics.path(torch.tensor([motion]), start_, angle_, frames)[0]


def test_a_bounce_follows_a_point_that_is_mirrored_at_every_wall():
    """Scalar by scalar: the walls of the centre stand half an item inside the frame."""
    physics, angle = Motion(16, 8, 1.3), 0.7
    y, x = 5.0, 11.5
    rise, run = 1.3 * math.sin(angle), 1.3 * math.cos(angle)
    for found in one(BOUNCE, (5.0, 11.5), angle, 200, physics).tolist():
        assert found == pytest.approx([y, x], abs=1e-9)
        y, x = y + rise, x + run
        if not 4 <= y <= 12:
            y, rise = (8 if y < 4 else 24) - y, -rise
        if not 4 <= x <= 12:
            x, run = (8 if x < 4 else 24) - x, -run


def test_a_circle_turns_clockwise_about_the_middle_at_the_given_speed():
    """On a circle of radius 4 a speed of pi is an eighth of a turn a frame."""
    path = one(CIRCLE, (5.0, 5.0), 0.0, 9, Motion(16, 8, math.pi))
    root = 4 / math.sqrt(2)
    assert path[0].tolist() == pytest.approx([8, 12])  # to the right of the middle
    assert path[1].tolist() == pytest.approx([8 + root, 8 + root])  # then below
    assert path[2].tolist() == pytest.approx([12, 8])
    assert path[6].tolist() == pytest.approx([4, 8])
    assert path[8].tolist() == pytest.approx([8, 12])


@pytest.mark.parametrize("physics", SETTINGS, ids=str)
def test_a_box_never_leaves_the_frame(physics: Motion):
    path, _ = drawn(physics, 40, 500)
    assert path.min() >= physics.item_size / 2 - 1e-9
    assert path.max() <= physics.size - physics.item_size / 2 + 1e-9


@pytest.mark.parametrize("physics", SETTINGS, ids=str)
def test_two_positions_give_the_next_for_thousands_of_frames(physics: Motion):
    path, motion = drawn(physics, 40, 3000)
    found = physics.step(path[:, :-2], path[:, 1:-1], motion)
    torch.testing.assert_close(found, path[:, 2:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("physics", SETTINGS[1:3], ids=str)
def test_a_path_is_continued_from_its_first_two_positions_alone(physics: Motion):
    """Each step builds on the last one; rounding does not pile up to 1e-6 in 1000 frames."""
    path, motion = drawn(physics, 20, 1000)
    previous, current = path[:, :1], path[:, 1:2]
    for frame in range(2, path.shape[1]):
        previous, current = current, physics.step(previous, current, motion)
        torch.testing.assert_close(current[:, 0], path[:, frame], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("start", "angle"),
    [
        ((4.0, 4.0), math.pi / 4),  # out of a corner
        ((4.0, 4.0), 5 * math.pi / 4),  # into the corner where it stands
        ((6.5, 6.5), 5 * math.pi / 4),  # into a corner, which is met between two frames
        ((4.0, 7.0), 0.0),  # along a wall
        ((9.0, 11.5), 0.0),  # straight onto a wall, met in the middle between two frames: it seems to stand still
        ((5.5, 6.0), -math.pi / 2),
    ],
)
def test_walls_met_at_special_places_keep_the_next_position_known(start: tuple[float, float], angle: float):
    physics = Motion(16, 8, 1.0)
    path = one(BOUNCE, start, angle, 60, physics)[None]
    found = physics.step(path[:, :-2], path[:, 1:-1], torch.tensor([BOUNCE]))
    torch.testing.assert_close(found, path[:, 2:], rtol=0, atol=1e-6)


def test_a_small_error_of_the_positions_stays_small():
    """What is measured in generated clips is never exact: between walls the next position errs by as much."""
    physics = Motion(16, 8, 1.0)
    path, motion = drawn(physics, 200, 100)
    noisy = path + 1e-3 * torch.randn(path.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    errors = (physics.step(noisy[:, :-2], noisy[:, 1:-1], motion) - path[:, 2:]).norm(dim=-1)
    assert errors.median() < 4e-3
    assert errors.quantile(0.999) < 0.1


def test_steps_keep_the_type_of_the_positions():
    physics = Motion(16, 8, 1.0)
    path, motion = drawn(physics, 4, 5)
    found = physics.step(path[:, :-2].float(), path[:, 1:-1].float(), motion)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, path[:, 2:].float(), rtol=0, atol=1e-4)


def test_the_names_of_the_motions_are_their_order():
    assert MOTIONS[BOUNCE] == "bounce"
    assert MOTIONS[CIRCLE] == "circle"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            (8, 8, 1.0),
            "item_size: an item of 8 pixels has no room to move in frames of size 8; write an item_size below",
        ),
        ((4, 8, 1.0), "item_size: an item of 8 pixels"),
        ((16, 8, 0.0), r"speed: 0\.0 pixels a frame is not above 0 and at most size - item_size = 8"),
        ((16, 8, -1.0), r"speed: -1\.0"),
        ((16, 8, 8.5), r"speed: 8\.5"),
    ],
)
def test_motions_that_are_not_known_from_two_positions_are_refused(values: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        Motion(*values)

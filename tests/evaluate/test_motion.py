"""Motion errors: none for what obeys the physics, those that were made for what does not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fewstep.data.motion import Motion
from fewstep.data.moving_fashion_mnist import (
    MovingFashionMnist,
    MovingFashionMnistSection,
    item_of,
    motion_of,
    place,
)
from fewstep.errors import UserError
from fewstep.evaluate.api import MovingClips
from fewstep.evaluate.classifier import as_values
from fewstep.evaluate.motion import centroids, motion_errors, num_motions
from tests.evaluate.small import PHYSICS, Moving, shapes

REAL = Moving(40, seed=0, frames=16)
MOTION = REAL.label % 2
BOUNCE = torch.zeros(1, dtype=torch.int64)


def drawn(centres: Tensor, item: int = 0) -> Tensor:
    """Clips [b f 1 16 16] of one item at ``centres`` [b f 2]."""
    return as_values(place(shapes()[item].expand(len(centres), 4, 4), centres, PHYSICS.size))


def straight(frames: int, way: float = 1.0) -> Tensor:
    """Centres [1 f 2] of a free flight from (7.4, 5.2) to the right, far from all walls, ``way`` pixels a frame."""
    return torch.stack([torch.full((frames,), 7.4), 5.2 + way * torch.arange(frames)], -1)[None]


def test_clips_that_obey_the_physics_have_no_error():
    errors = motion_errors(REAL.values, MOTION, PHYSICS)
    assert errors.shape == (40, 14)
    assert errors.mean() < 0.06
    assert errors.mean(1).max() < 0.12


def test_a_simulation_that_turns_its_velocity_at_walls_has_no_error_either():
    """Independent of the physics that judges: tiny steps, one coordinate after the other."""
    rng = torch.Generator().manual_seed(3)
    angle = 6.2832 * torch.rand(9, generator=rng)
    place_now, velocity = 2 + 12 * torch.rand(9, 2, generator=rng), torch.stack([angle.sin(), angle.cos()], -1)
    centres = [place_now.clone()]
    for _ in range(15):
        for _ in range(200):
            place_now = place_now + velocity / 200
            outside = (place_now < 2) | (place_now > 14)
            velocity = torch.where(outside, -velocity, velocity)
        centres.append(place_now.clone())
    errors = motion_errors(drawn(torch.stack(centres, 1)), torch.zeros(9, dtype=torch.int64), PHYSICS)
    assert errors.mean(1).max() < 0.08


def test_the_items_own_constant_is_found():
    """The corner's centre of brightness is 0.64 pixels below and left of its box's; unknown, walls would seem there."""
    seen = centroids(REAL.values) - REAL.centres
    corner = seen[REAL.label // 2 == 0].mean((0, 1))
    assert corner.tolist() == pytest.approx([9 / 14, -9 / 14], abs=0.02)
    down_and_up = torch.tensor([[12.7, 5.0], [13.7, 5.0], [13.3, 5.0], [12.3, 5.0]])[None]
    errors = motion_errors(drawn(down_and_up), BOUNCE, PHYSICS)
    assert errors.max() < 0.06, "it meets the wall half-way between two frames"


@pytest.mark.parametrize("way", [0.0, 0.4, 1.5])
def test_a_free_flight_at_another_speed_has_the_difference_as_its_error(way: float):
    """An item that stands still is a straight line too; only the speed tells."""
    errors = motion_errors(drawn(straight(4, way)), BOUNCE, PHYSICS)
    assert errors.flatten().tolist() == pytest.approx([abs(1 - way)] * 2, abs=0.05)


def test_a_leap_is_seen_at_its_frame_and_at_the_next_and_not_after():
    """2 pixels aside between frames 2 and 3: the place is wrong by 2, the way is sqrt(5) instead of 1."""
    centres = straight(6)
    centres[:, 3:, 0] += 2
    errors = motion_errors(drawn(centres), BOUNCE, PHYSICS)[0]
    both = [math.hypot(2, math.sqrt(5) - 1), 2.0]
    assert errors.tolist() == pytest.approx([0, *both, 0], abs=0.08)


def test_frozen_and_shuffled_clips_and_clips_of_the_wrong_motion_are_far_from_real_ones():
    real = motion_errors(REAL.values, MOTION, PHYSICS).mean(1)
    frozen = REAL.values[:, :1].expand_as(REAL.values)
    shuffled = REAL.values[:, torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    assert motion_errors(frozen, MOTION, PHYSICS).mean() > 0.6
    assert motion_errors(shuffled, MOTION, PHYSICS).mean() > 1.5
    swapped = motion_errors(REAL.values, 1 - MOTION, PHYSICS).mean(1)
    for motion in (0, 1):
        assert swapped[motion == MOTION].min() > 2 * real[motion == MOTION].max()


def test_what_is_nearly_black_does_not_count():
    noisy = REAL.values + (8 / 127.5) * (REAL.values < -0.999) * torch.rand_like(REAL.values)
    torch.testing.assert_close(centroids(noisy), centroids(REAL.values))


def test_a_frame_without_anything_bright_counts_as_its_middle():
    black = -torch.ones(2, 5, 1, 16, 16)
    assert torch.equal(centroids(black), torch.full((2, 5, 2), 8.0, dtype=torch.float64))
    assert motion_errors(black, torch.tensor([0, 1]), PHYSICS).flatten().tolist() == pytest.approx([1.0] * 6)


def test_the_centre_of_brightness_is_that_of_what_is_above_black():
    picture = -torch.ones(1, 1, 3, 4, 6)
    picture[0, 0, :, 1, 2] = 1
    picture[0, 0, :, 3, 5] = 108 / 127.5 - 1
    weights = (255 - 8, 108 - 8)
    expected = [(1.5 * weights[0] + 3.5 * weights[1]) / 347, (2.5 * weights[0] + 5.5 * weights[1]) / 347]
    assert centroids(picture).flatten().tolist() == pytest.approx(expected)


def test_every_clip_is_judged_by_itself():
    together = motion_errors(REAL.values[:4], MOTION[:4], PHYSICS)
    alone = [motion_errors(REAL.values[i : i + 1], MOTION[i : i + 1], PHYSICS) for i in range(4)]
    torch.testing.assert_close(together, torch.cat(alone))


def test_two_frames_show_no_motion_that_could_be_judged():
    with pytest.raises(ValueError, match="the clips have 2"):
        motion_errors(REAL.values[:, :2], MOTION, PHYSICS)


def test_the_motion_is_the_part_of_a_class_that_changes_fastest():
    assert isinstance(REAL, MovingClips)
    assert num_motions(Moving.classes) == 2
    assert num_motions(("a, b, x", "a, b, y", "a, b, z", "c, x", "c, y", "c, z")) == 3
    with pytest.raises(ValueError, match="all pairs 'item, motion'"):
        num_motions(("a, x", "b, x", "a, y", "b, y"))
    with pytest.raises(ValueError, match="all pairs"):
        num_motions(("a, x", "a, y", "b, x"))


def test_real_clips_of_moving_fashion_mnist_are_below_a_tenth_of_a_pixel():
    try:
        data = MovingFashionMnist(MovingFashionMnistSection(batch=8, frames=12), "test")
    except UserError:
        pytest.skip("Fashion-MNIST is not on this machine")
    assert isinstance(data, MovingClips)
    assert isinstance(data.motion, Motion)
    items = data.items(range(0, 10_000, 40))
    n = num_motions(data.classes)
    assert torch.equal(items.label % n, motion_of(items.label))
    assert torch.equal(items.label // n, item_of(items.label))
    errors = motion_errors(as_values(items.pixels), items.label % n, data.motion)
    assert errors.mean() < 0.05
    assert errors.mean(0).max() < 0.06, "at every frame"
    frozen = as_values(items.pixels[:, :1]).expand(-1, 12, -1, -1, -1)
    assert motion_errors(frozen, items.label % n, data.motion).mean() > 0.6

"""Moving Fashion-MNIST: pixels as a slow loop draws them, balanced labels, clips that their ids determine."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.functional import avg_pool2d, pad

from fewstep.data.fashion_mnist import CLASSES, DEBIAN_FOLDER
from fewstep.data.idx import read_idx
from fewstep.data.motion import MOTIONS
from fewstep.data.moving_fashion_mnist import (
    MovingFashionMnist,
    MovingFashionMnistSection,
    item_of,
    motion_of,
    place,
)
from fewstep.errors import UserError

needs_debian_package = pytest.mark.skipif(
    not (DEBIAN_FOLDER / "train-images-idx3-ubyte.gz").exists(), reason="dataset-fashion-mnist is not installed"
)


def section(folder: Path | None, **settings) -> MovingFashionMnistSection:
    path = None if folder is None else str(folder)
    return MovingFashionMnistSection(**{"path": path, "frames": 5, "batch": 2, **settings})


def drawn_by_hand(image: np.ndarray, centre: tuple[float, float], size: int) -> np.ndarray:
    """Each pixel of the item gives its brightness to the four pixels of the frame that it covers, by area."""
    frame = np.zeros((size, size))
    top, left = centre[0] - len(image) / 2, centre[1] - len(image) / 2
    for row in range(len(image)):
        for column in range(len(image)):
            y, x = math.floor(top + row), math.floor(left + column)
            down, right = top + row - y, left + column - x
            for step_y, share_y in ((0, 1 - down), (1, down)):
                for step_x, share_x in ((0, 1 - right), (1, right)):
                    if share_y * share_x:
                        frame[y + step_y, x + step_x] += share_y * share_x * image[row, column]
    return frame


def averaged(folder: Path, size: int) -> torch.Tensor:
    """The items of the training split, by another road: ``[n, size, size]``, rounded, halves upwards."""
    raw = torch.from_numpy(read_idx(folder / "train-images-idx3-ubyte", 3).astype(np.float64))
    return (avg_pool2d(pad(raw, (2, 2, 2, 2)), 32 // size) + 0.5).floor()


@pytest.mark.parametrize(("size", "item_size", "speed"), [(16, 8, 1.0), (9, 4, 0.3), (21, 16, 2.5), (35, 32, 0.9)])
def test_frames_are_those_of_a_slow_loop_over_pixels(clothes: Path, size: int, item_size: int, speed: float):
    """To the rounding of the pixels; the true centres are taken from ``centres``."""
    dataset = MovingFashionMnist(section(clothes, size=size, item_size=item_size, speed=speed))
    ids = [6, 0, 3]
    pixels, images = dataset.items(ids).pixels, averaged(clothes, item_size).numpy()
    assert dataset.shape == (5, 1, size, size)
    assert pixels.shape == (3, 5, 1, size, size)
    for clip, path, image in zip(pixels.numpy(), dataset.centres(ids).tolist(), images[ids], strict=True):
        for frame, centre in zip(clip[:, 0], path, strict=True):
            assert np.abs(frame - drawn_by_hand(image, centre, size)).max() <= 0.5 + 1e-9


def test_an_item_on_whole_pixels_is_shown_as_it_is():
    images = torch.randint(0, 256, (2, 3, 3), dtype=torch.uint8)
    frames = place(images, torch.tensor([[[1.5, 1.5]], [[3.5, 2.5]]], dtype=torch.float64), 5)
    assert torch.equal(frames[0, 0, 0, :3, :3], images[0])
    assert torch.equal(frames[1, 0, 0, 2:, 1:4], images[1])
    assert frames.sum() == images.sum()


def test_long_clips_are_drawn_in_parts_that_nobody_sees(clothes: Path):
    """7 x 1500 frames are more than are drawn at once, and the cut goes through the third clip."""
    dataset = MovingFashionMnist(section(clothes, frames=1500))
    together = dataset.items(range(7)).pixels
    assert torch.equal(together, torch.cat([dataset.items([index]).pixels for index in range(7)]))


def test_the_centre_of_brightness_is_the_box_centre_and_a_constant_of_the_item(clothes: Path):
    dataset = MovingFashionMnist(section(clothes, frames=40))
    pixels = dataset.items(range(7)).pixels[:, :, 0].double()
    middle = torch.arange(16, dtype=torch.float64) + 0.5
    total = pixels.sum((-2, -1))
    found = torch.stack([pixels.sum(-1) @ middle, pixels.sum(-2) @ middle], dim=-1) / total[..., None]
    offset = found - dataset.centres(range(7))
    assert (offset - offset.mean(1, keepdim=True)).abs().max() < 0.01
    assert offset.abs().amax() > 0.02
    assert (total - total.mean(1, keepdim=True)).abs().max() < 0.5 * 81  # every pixel rounded, none lost


def test_clips_are_a_function_of_their_ids_alone(clothes: Path):
    dataset = MovingFashionMnist(section(clothes))
    whole = dataset.items(range(7))
    again = MovingFashionMnist(section(clothes, batch=5)).items(torch.tensor([4, 1, 4]))
    assert torch.equal(again.pixels, whole.pixels[[4, 1, 4]])
    assert torch.equal(again.label, whole.label[[4, 1, 4]])
    assert whole.pixels.dtype == torch.uint8
    whole.pixels.zero_()
    assert torch.equal(dataset.items([4]).pixels, again.pixels[:1])


def test_a_longer_clip_begins_with_the_shorter_one(clothes: Path):
    short, long = (MovingFashionMnist(section(clothes, frames=frames)).items(range(7)).pixels for frames in (1, 9))
    assert short.shape == (7, 1, 1, 16, 16)
    assert torch.equal(long[:, :1], short)


def test_clips_of_different_ids_move_differently(clothes: Path):
    start = MovingFashionMnist(section(clothes)).centres(range(7))[:, 0]
    distances = torch.cdist(start, start) + 10 * torch.eye(7)
    assert distances.min() > 0.01


def test_the_test_split_has_its_own_items_and_motions(clothes: Path, write_idx):
    """Even where the images are the same."""
    for kind in ("images-idx3", "labels-idx1"):
        (clothes / f"t10k-{kind}-ubyte").write_bytes((clothes / f"train-{kind}-ubyte").read_bytes())
    train, test = (MovingFashionMnist(section(clothes), split) for split in ("train", "test"))
    assert torch.equal(train.items(range(7)).label, test.items(range(7)).label)
    assert ((train.centres(range(7)) - test.centres(range(7))).abs().amax((1, 2)) > 0.01).all()


def test_labels_are_item_and_motion(clothes: Path):
    """The images of a class bounce and circle in turn, in the order of the ids."""
    dataset = MovingFashionMnist(section(clothes))
    label = dataset.items(range(7)).label
    items = read_idx(clothes / "train-labels-idx1-ubyte", 1).tolist()
    assert item_of(label).tolist() == items
    assert motion_of(label).tolist() == [items[:index].count(item) % 2 for index, item in enumerate(items)]
    assert dataset.classes[14:16] == ("Sneaker, bounce", "Sneaker, circle")
    assert [dataset.classes[index] for index in label] == [
        f"{CLASSES[item]}, {MOTIONS[motion]}" for item, motion in zip(items, motion_of(label).tolist(), strict=True)
    ]


def test_the_motion_of_the_label_is_the_motion_that_is_seen(clothes: Path):
    """Two positions and the label give the next position, for every clip (``Motion.step``)."""
    dataset = MovingFashionMnist(section(clothes, frames=100, speed=1.7))
    path, motion = dataset.centres(range(7)), motion_of(dataset.items(range(7)).label)
    assert set(motion.tolist()) == {0, 1}
    found = dataset.motion.step(path[:, :-2], path[:, 1:-1], motion)
    torch.testing.assert_close(found, path[:, 2:], rtol=0, atol=1e-6)
    wrong = dataset.motion.step(path[:, :-2], path[:, 1:-1], 1 - motion)
    assert ((wrong - path[:, 2:]).norm(dim=-1).mean(1) > 0.3).all()


@needs_debian_package
def test_all_twenty_classes_are_equally_frequent_and_starts_are_spread_evenly():
    """The real test split; starts and directions of the bounces against the uniform law (10 bins, chi-squared)."""
    dataset = MovingFashionMnist(section(None, frames=2), "test")
    assert len(dataset) == 10_000
    labels = dataset.items(range(10_000)).label
    assert torch.bincount(labels).tolist() == [500] * 20
    path = dataset.centres(range(10_000))
    bounce = path[motion_of(labels) == 0]
    for places in ((bounce[:, 0, 0] - 4) / 8, (bounce[:, 0, 1] - 4) / 8):
        counts = torch.histc(places, 10, 0, 1)
        assert ((counts - 500) ** 2 / 500).sum() < 27.9  # one in a thousand
    free = bounce[((bounce - 8).abs() < 3).all(-1).all(-1)]
    directions = (free[:, 1] - free[:, 0]).sign()
    assert directions.mean(0).abs().max() < 4 / math.sqrt(len(free))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"frames": 0}, "frames"),
        ({"item_size": 5}, "item_size"),
        ({"size": 8}, "item_size: an item of 8 pixels has no room to move in frames of size 8"),
        ({"speed": 8.1}, r"speed: 8\.1 pixels a frame is not above 0 and at most size - item_size = 8"),
        ({"speed": 0.0}, "speed"),
        ({"radius": 3}, "radius"),
    ],
)
def test_settings_out_of_range_are_refused(clothes: Path, settings: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        section(clothes, **settings)


def test_missing_files_are_named_as_for_still_images(tmp_path: Path):
    with pytest.raises(UserError, match=r"data\.path: the folder '.*' lacks train-images-idx3-ubyte"):
        MovingFashionMnist(section(tmp_path))

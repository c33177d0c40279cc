"""Pictures hold the pixels they were given, where they are expected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fewstep.evaluate.classifier import as_values
from fewstep.evaluate.picture import class_rows, save_grid, save_pictures, to_uint8


def noise(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_every_grey_value_survives_the_way_to_floats_and_back():
    grey = torch.arange(256, dtype=torch.uint8).view(1, 1, 1, 16, 16)
    assert torch.equal(to_uint8(as_values(grey)), grey)


def test_values_outside_are_clamped_and_rounded_to_the_nearest():
    values = torch.tensor([-7.0, -1.0, -0.999, 0.0, 0.99, 1.0, 3.0, torch.nan, torch.inf]).view(1, 1, 1, 1, 9)
    assert to_uint8(values).flatten().tolist() == [0, 0, 0, 128, 254, 255, 255, 0, 255]


@pytest.mark.parametrize("channels", [1, 3])
def test_single_files_hold_exactly_the_pixels(tmp_path: Path, channels: int):
    pixels = noise(2, 1, channels, 5, 7)
    first, second = save_pictures(tmp_path / "new", pixels, ["T-shirt/top", "Bag"])
    assert (first.name, second.name) == ("00000-T-shirt_top.png", "00001-Bag.png")
    found = np.asarray(Image.open(second))
    expected = to_uint8(pixels)[1, 0].numpy()
    assert np.array_equal(found if channels == 3 else found[..., None], expected.transpose(1, 2, 0))
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_a_grid_has_one_row_after_the_other_each_with_its_name(tmp_path: Path):
    rows = [noise(3, 1, 1, 16, 12), -noise(3, 1, 1, 16, 12)]
    save_grid(tmp_path / "grid.png", rows, ["teacher", "student"], ["4 steps", "2", "1"])
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    height, width = 16 * 3, 12 * 3
    left, top = grid.shape[1] - 3 * (width + 2), grid.shape[0] - 2 * (height + 2)
    for row in range(2):
        for column in range(3):
            y, x = top + row * (height + 2), left + column * (width + 2)
            expected = to_uint8(rows[row])[column, 0, 0].repeat_interleave(3, 0).repeat_interleave(3, 1)
            cell = grid[y : y + height, x : x + width]
            assert np.array_equal(cell, expected.numpy()[..., None].repeat(3, 2))
        assert (grid[top + row * (height + 2) :][:height, :left] < 128).any(), "the name of the row"
    assert (grid[:top] < 128).any(), "the names of the columns"


def test_a_grid_without_names_has_no_margin(tmp_path: Path):
    save_grid(tmp_path / "grid.png", [noise(2, 1, 3, 50, 40)])
    assert Image.open(tmp_path / "grid.png").size == (2 * 42, 2 + 52)


def test_the_frames_of_a_clip_stand_side_by_side(tmp_path: Path):
    clip = noise(1, 3, 1, 4, 5)
    (path,) = save_pictures(tmp_path, clip, ["clip"])
    assert np.array_equal(np.asarray(Image.open(path)), to_uint8(clip)[0, :, 0].permute(1, 0, 2).reshape(4, 15))


def test_latents_are_not_pixels(tmp_path: Path):
    with pytest.raises(ValueError, match="these have 4: decode"):
        save_grid(tmp_path / "grid.png", [noise(1, 1, 4, 8, 8)])
    assert list(tmp_path.iterdir()) == []


def test_rows_of_classes_are_as_wide_as_the_rarest_allows():
    labels = torch.tensor([4, 1, 1, 0, 4, 1, 4, 0])
    assert class_rows(labels, 10, 8).tolist() == [[3, 7], [1, 2], [0, 4]]
    assert class_rows(labels, 2, 1).tolist() == [[3], [1]]

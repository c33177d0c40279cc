"""The data section of a recipe: which data set it names, and which words it accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import TypeAdapter, ValidationError

from fewstep.data.fashion_mnist import FashionMnist
from fewstep.data.image_folder import ImageFolder
from fewstep.data.moving_fashion_mnist import MovingFashionMnist
from fewstep.data.sources import DataSection, open_dataset
from fewstep.data.video_folder import VideoFolder

SECTION = TypeAdapter(DataSection)


def test_the_name_chooses_the_data_set(clothes: Path, tmp_path: Path):
    section = SECTION.validate_python({"name": "fashion_mnist", "size": 16, "batch": 64, "path": str(clothes)})
    assert isinstance(open_dataset(section), FashionMnist)
    assert len(open_dataset(section, "test")) == 3
    settings = {"frames": 3, "batch": 2, "path": str(clothes)}
    dataset = open_dataset(SECTION.validate_python({"name": "moving_fashion_mnist", **settings}), "test")
    assert isinstance(dataset, MovingFashionMnist)
    assert (len(dataset), dataset.shape) == (3, (3, 1, 16, 16))
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    Image.new("L", (5, 5)).save(tmp_path / "pets" / "cat" / "a.png")
    settings = {"path": str(tmp_path / "pets"), "size": [8, 4], "channels": 3, "batch": 1, "cache": str(tmp_path / "c")}
    dataset = open_dataset(SECTION.validate_python({"name": "image_folder", **settings}))
    assert isinstance(dataset, ImageFolder)
    assert dataset.shape == (1, 3, 8, 4)


def test_a_folder_of_videos_is_chosen_by_its_name(tmp_path: Path, write_video):
    (tmp_path / "acts" / "run").mkdir(parents=True)
    write_video(tmp_path / "acts" / "run" / "a.mkv", np.zeros((6, 4, 4), np.uint8))
    settings = {"path": str(tmp_path / "acts"), "size": 4, "channels": 1, "batch": 1, "cache": str(tmp_path / "c")}
    dataset = open_dataset(SECTION.validate_python({"name": "video_folder", "frames": 5, **settings}))
    assert isinstance(dataset, VideoFolder)
    assert dataset.shape == (5, 1, 4, 4)


@pytest.mark.parametrize(
    "values",
    [
        {"name": "mnist", "size": 16, "batch": 64},
        {"name": "fashion_mnist", "size": 20, "batch": 64},
        {"name": "fashion_mnist", "size": 16, "batch": 0},
        {"name": "fashion_mnist", "size": 16, "batch": 64, "channels": 1},
        {"name": "fashion_mnist", "size": 16},
        {"name": "image_folder", "size": 16, "batch": 64, "channels": 1},
        {"name": "moving_fashion_mnist", "batch": 64},
        {"name": "moving_fashion_mnist", "frames": 12, "batch": 64, "channels": 1},
        {"name": "video_folder", "path": "x", "size": 16, "batch": 64, "channels": 1},
    ],
)
def test_unknown_names_keys_and_values_are_refused(values: dict):
    """PITFALLS 'config': nothing is read and not used."""
    with pytest.raises(ValidationError):
        SECTION.validate_python(values)


def test_a_section_survives_being_written_and_read(tmp_path: Path):
    section = SECTION.validate_python({"name": "image_folder", "path": "x", "size": [8, 4], "channels": 3, "batch": 1})
    assert SECTION.validate_json(section.model_dump_json()) == section

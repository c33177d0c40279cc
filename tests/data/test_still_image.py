"""One image file: exact pixels where nothing has to be resized, and a reason for everything that cannot be shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fewstep.data.still_image import read_image

RNG = np.random.default_rng(5)
GREY = RNG.integers(0, 256, (6, 10), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (6, 10, 3), dtype=np.uint8)


def save(path: Path, pixels: np.ndarray | Image.Image, **options) -> Path:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(path, **options)
    return path


def with_alpha(pixels: np.ndarray, alpha: int) -> np.ndarray:
    """Opaque but for the first pixel."""
    opaque = np.dstack([pixels, np.full((6, 10), 255, np.uint8)])
    opaque[0, 0, 3] = alpha
    return opaque


def test_an_image_of_the_asked_size_is_unchanged(tmp_path: Path):
    """The channels come first, and rows are the height."""
    np.testing.assert_array_equal(read_image(save(tmp_path / "a.png", COLOUR), 3, 6, 10), COLOUR.transpose(2, 0, 1))
    np.testing.assert_array_equal(read_image(save(tmp_path / "b.png", GREY), 1, 6, 10), GREY[None])


@pytest.mark.parametrize(
    ("height", "width", "part"), [(6, 6, np.s_[:, 2:8]), (6, 4, np.s_[:, 3:7]), (2, 10, np.s_[2:4])]
)
def test_the_middle_part_is_cut_out(tmp_path: Path, height: int, width: int, part):
    np.testing.assert_array_equal(read_image(save(tmp_path / "a.png", GREY), 1, height, width)[0], GREY[part])


def test_shrinking_averages_instead_of_picking_pixels(tmp_path: Path):
    """A checkerboard becomes its mean: an aliased resize would keep blacks or whites."""
    board = (np.indices((32, 32)).sum(0) % 2 * 255).astype(np.uint8)
    small = read_image(save(tmp_path / "a.png", board), 1, 4, 4)
    assert np.abs(small.astype(int) - 127).max() <= 8


def test_the_rotation_of_the_exif_data_is_carried_out(tmp_path: Path):
    """Orientation 6: the image is stored lying, a quarter turn clockwise makes it upright."""
    exif = Image.Exif()
    exif[0x0112] = 6
    found = read_image(save(tmp_path / "a.png", GREY, exif=exif), 1, 10, 6)
    np.testing.assert_array_equal(found[0], np.rot90(GREY, k=-1))


def test_grey_becomes_colour_where_three_channels_are_asked_for(tmp_path: Path):
    found = read_image(save(tmp_path / "a.png", GREY), 3, 6, 10)
    np.testing.assert_array_equal(found, np.stack([GREY] * 3))


def test_grey_that_is_stored_as_colour_is_grey(tmp_path: Path):
    found = read_image(save(tmp_path / "a.png", np.dstack([GREY] * 3)), 1, 6, 10)
    np.testing.assert_array_equal(found, GREY[None])


def test_opaque_transparency_is_no_loss(tmp_path: Path):
    found = read_image(save(tmp_path / "a.png", with_alpha(COLOUR, 255)), 3, 6, 10)
    np.testing.assert_array_equal(found, COLOUR.transpose(2, 0, 1))


def test_palettes_and_bits_are_read(tmp_path: Path):
    palette = Image.fromarray(COLOUR).quantize(16)
    expected = np.asarray(palette.convert("RGB")).transpose(2, 0, 1)
    np.testing.assert_array_equal(read_image(save(tmp_path / "a.gif", palette), 3, 6, 10), expected)
    bits = Image.fromarray(GREY > 100)
    np.testing.assert_array_equal(read_image(save(tmp_path / "b.png", bits), 1, 6, 10)[0], (GREY > 100) * 255)


def test_of_a_jpeg_with_several_pictures_the_first_counts(tmp_path: Path):
    """Telephones write such files."""
    first, second = Image.new("L", (10, 6), 200), Image.new("L", (10, 6), 20)
    path = save(tmp_path / "a.jpg", first, format="MPO", save_all=True, append_images=[second])
    assert read_image(path, 1, 6, 10).mean() == pytest.approx(200, abs=1)


PALETTE = Image.fromarray(COLOUR).quantize(4)


@pytest.mark.parametrize(
    ("name", "image", "options", "message"),
    [
        ("a.png", COLOUR, {}, "colours, where data.channels: 1 asks for grey"),
        ("a.png", with_alpha(COLOUR, 254), {}, "transparent pixels"),
        ("a.png", Image.fromarray(GREY).convert("LA").point(lambda value: value // 2), {}, "transparent pixels"),
        ("a.png", PALETTE, {"transparency": 0}, "transparent pixels"),
        ("a.png", GREY.astype(np.uint16) * 257, {}, "pixels of the kind I;16"),
        ("a.tif", GREY.astype(np.float32), {}, "pixels of the kind F"),
        ("a.jpg", Image.fromarray(COLOUR).convert("CMYK"), {}, "pixels of the kind CMYK"),
        ("a.gif", PALETTE, {"save_all": True, "append_images": [PALETTE.rotate(180)]}, "2 frames"),
    ],
)
def test_what_cannot_be_shown_without_loss_is_refused(tmp_path: Path, name: str, image, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read_image(save(tmp_path / name, image, **options), 1, 6, 10)


@pytest.mark.parametrize("ending", ["png", "jpg"])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, ending: str):
    path = save(tmp_path / f"a.{ending}", RNG.integers(0, 256, (60, 60), dtype=np.uint8))
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(OSError, match="truncated"):
        read_image(path, 1, 6, 10)


def test_a_file_is_no_image_because_of_its_name(tmp_path: Path):
    """Neither text nor a format that is a program (PostScript) is opened under the name of an image."""
    (tmp_path / "a.png").write_text("no image")
    save(tmp_path / "b.eps", COLOUR)
    for path in (tmp_path / "a.png", (tmp_path / "b.eps").rename(tmp_path / "b.png")):
        with pytest.raises(OSError, match="cannot identify image file"):
            read_image(path, 3, 6, 10)

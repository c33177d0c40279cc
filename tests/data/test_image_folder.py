"""Folders of images: what is found in them, what is refused, and what the cache of decoded pixels keeps."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from fewstep.data.image_folder import ImageFolder, ImageFolderSection
from fewstep.errors import UserError


def put(path: Path, value: int, size: tuple[int, int] = (4, 4)) -> None:
    """A grey image of one value; its value tells the images apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", size, value).save(path, format="png")


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Two classes, 2 + 3 images, with everything beside them that folders of images have."""
    folder = tmp_path / "pets"
    put(folder / "dog" / "b.png", 21)
    put(folder / "dog" / "a.png", 20)
    put(folder / "dog" / "old" / "deep" / "c.PNG", 22, size=(9, 5))
    put(folder / "cat" / "2.png", 11)
    put(folder / "cat" / "10.png", 10)
    for junk in ("cat/.hidden.png", "cat/captions.txt", "dog/Thumbs.db", ".git/x.png", "README.md"):
        put(folder / junk, 99)
    return folder


def section(folder: Path, **settings) -> ImageFolderSection:
    cache = str(folder.parent / "cache")
    return ImageFolderSection(**{"path": str(folder), "size": 4, "channels": 1, "batch": 2, "cache": cache, **settings})


def values(dataset: ImageFolder) -> list[int]:
    """The value of every image, by id."""
    pixels = dataset.items(range(len(dataset))).pixels
    assert torch.equal(pixels, pixels[..., :1, :1].expand_as(pixels))
    return pixels[:, 0, 0, 0, 0].tolist()


def test_ids_follow_the_class_names_and_the_paths(pets: Path):
    dataset = ImageFolder(section(pets))
    assert dataset.classes == ("cat", "dog")
    assert values(dataset) == [10, 11, 20, 21, 22]
    assert dataset.items(range(5)).label.tolist() == [0, 0, 1, 1, 1]


def test_items_have_the_shape_that_was_asked_for(pets: Path):
    dataset = ImageFolder(section(pets, size=[6, 3], channels=3))
    items = dataset.items(torch.tensor([4, 0]))
    assert dataset.shape == (1, 3, 6, 3)
    assert items.pixels.shape == (2, 1, 3, 6, 3)
    assert items.pixels.dtype == torch.uint8
    assert items.pixels[:, 0, 2, 5, 2].tolist() == [22, 10]
    assert items.label.tolist() == [1, 0]


def test_what_is_returned_can_be_changed_without_changing_the_data(pets: Path):
    dataset = ImageFolder(section(pets))
    dataset.items([0]).pixels.zero_()
    assert values(dataset) == [10, 11, 20, 21, 22]


@pytest.mark.parametrize(
    "setting", [{"size": 0}, {"size": [4]}, {"size": [4, 0]}, {"channels": 2}, {"on_broken": "ask"}]
)
def test_settings_out_of_range_are_refused(pets: Path, setting: dict):
    with pytest.raises(ValidationError, match=next(iter(setting))):
        section(pets, **setting)


def test_every_broken_file_is_found_before_training_and_the_first_are_named(pets: Path):
    """PITFALLS 'latent cache': broken items are named and counted, never a later crash."""
    for number in range(7):
        (pets / "cat" / f"x{number}.png").write_text("no image")
    Image.new("RGB", (4, 4), (1, 2, 3)).save(pets / "cat" / "0.png")
    (pets / "dog" / "gone.jpg").symlink_to(pets / "absent.jpg")
    with pytest.raises(UserError) as caught:
        ImageFolder(section(pets))
    message = str(caught.value)
    assert f"data.path: 9 of the 14 images in '{pets}' cannot be used:" in message
    assert "cat/0.png: colours, where data.channels: 1 asks for grey" in message
    assert "cat/x3.png: cannot identify image file" in message
    assert "x4.png" not in message
    assert "and 4 more" in message
    assert "write data.on_broken=skip" in message


def test_broken_files_are_left_out_with_a_warning_if_the_user_wishes(pets: Path):
    (pets / "cat" / "11.png").write_text("no image")
    for _ in range(2):  # decoded, then from the cache
        with pytest.warns(UserWarning, match=r"1 of the 6 images .*\n  cat/11.png: cannot identify"):
            dataset = ImageFolder(section(pets, on_broken="skip"))
        assert values(dataset) == [10, 11, 20, 21, 22]
        assert dataset.items(range(5)).label.tolist() == [0, 0, 1, 1, 1]


def test_a_class_of_broken_files_alone_is_refused(pets: Path):
    for name in ("2.png", "10.png"):
        (pets / "cat" / name).write_text("no image")
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(UserError, match=r"no image that can be used in 1 class folders .*\(cat\)"),
    ):
        ImageFolder(section(pets, on_broken="skip"))


def test_a_folder_of_broken_files_alone_is_refused(tmp_path: Path):
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    (tmp_path / "pets" / "cat" / "a.png").write_text("no image")
    with pytest.warns(UserWarning, match="left out"), pytest.raises(UserError, match="no image that can be used"):
        ImageFolder(section(tmp_path / "pets", on_broken="skip"))


def test_empty_class_folders_are_named(pets: Path):
    (pets / "bird").mkdir()
    (pets / "ant").mkdir()
    (pets / "ant" / "notes.txt").write_text("no ants yet")
    with pytest.raises(UserError, match=r"2 class folders of .* \(ant, bird\); add images \(\.png \.jpg"):
        ImageFolder(section(pets))


def test_a_folder_without_classes_is_refused(pets: Path):
    with pytest.raises(
        UserError, match=r"data\.path: '.*old/deep' has no sub-folders; put the images into one sub-folder"
    ):
        ImageFolder(section(pets / "dog" / "old" / "deep"))


def test_images_beside_the_classes_are_refused(pets: Path):
    put(pets / "stray.png", 1)
    with pytest.raises(UserError, match=r"data\.path: 1 images stand beside the class folders of .* \(stray\.png\)"):
        ImageFolder(section(pets))


@pytest.mark.parametrize("name", ["absent", "README.md"])
def test_a_path_that_is_no_folder_is_refused(pets: Path, name: str):
    with pytest.raises(UserError, match=rf"data\.path: '{pets / name}' is not a folder that can be read"):
        ImageFolder(section(pets, path=str(pets / name)))


@pytest.mark.parametrize(("link", "target"), [("dog/loop", "dog"), ("dog/old/loop", ""), ("loop", "")])
def test_a_loop_of_symbolic_links_is_named(pets: Path, link: str, target: str):
    (pets / link).symlink_to(pets / target)
    with pytest.raises(
        UserError, match=f"'{pets / link}' is a symbolic link to a folder that contains it; remove the link"
    ):
        ImageFolder(section(pets))


def test_links_to_other_folders_are_followed(pets: Path, tmp_path: Path):
    put(tmp_path / "elsewhere" / "d.png", 23)
    (pets / "dog" / "z").symlink_to(tmp_path / "elsewhere")
    assert values(ImageFolder(section(pets))) == [10, 11, 20, 21, 22, 23]


def test_a_link_to_itself_is_a_broken_file(pets: Path):
    (pets / "cat" / "a.png").symlink_to("a.png")
    with pytest.raises(UserError, match=r"1 of the 6 images .*\n  cat/a\.png: .*symbolic links"):
        ImageFolder(section(pets))


@pytest.mark.parametrize("name", [b"cat/\xff.png", b"dog/\xff/a.png", b"\xff/a.png"], ids=("file", "folder", "class"))
def test_names_that_are_no_text_are_refused_in_words_that_can_be_printed(pets: Path, name: bytes):
    put(pets / os.fsdecode(name), 12)
    shown = r"(cat|dog)?/?\\xff(\.png|/a\.png)?"
    with pytest.raises(UserError, match=rf"data\.path: 1 names in .* not valid UTF-8 \({shown}\); rename") as caught:
        ImageFolder(section(pets))
    str(caught.value).encode()


def test_names_beyond_ascii_are_names_like_others(pets: Path):
    put(pets / "\u00e9l\u00e9phant" / "\u732b \\xff.png", 30)
    assert ImageFolder(section(pets)).classes == ("cat", "dog", "\u00e9l\u00e9phant")


def test_evaluation_compares_with_the_test_folder_if_there_is_one(pets: Path, tmp_path: Path):
    put(tmp_path / "held_out" / "cat" / "a.png", 30)
    put(tmp_path / "held_out" / "dog" / "a.png", 31)
    settings = section(pets, test_path=str(tmp_path / "held_out"))
    assert values(ImageFolder(settings, "test")) == [30, 31]
    assert len(ImageFolder(settings, "train")) == 5
    assert len(ImageFolder(section(pets), "test")) == 5


def test_a_test_folder_of_other_classes_is_refused(pets: Path, tmp_path: Path):
    put(tmp_path / "held_out" / "cat" / "a.png", 30)
    with pytest.raises(UserError, match=r"data\.test_path: .*held_out' must have the same class folders"):
        ImageFolder(section(pets, test_path=str(tmp_path / "held_out")), "test")


def stored(folder: Path) -> dict[str, int]:
    """The caches beside ``folder``, with the inode of each one's pixels, which tells whether they were written anew."""
    return {path.name: (path / "pixels").stat().st_ino for path in (folder.parent / "cache" / "images").iterdir()}


def test_the_pixels_are_decoded_once(pets: Path):
    ImageFolder(section(pets))
    before = stored(pets)
    assert values(ImageFolder(section(pets, batch=5))) == [10, 11, 20, 21, 22]
    assert stored(pets) == before
    assert len(before) == 1


@pytest.mark.parametrize("change", ["content", "added", "removed", "renamed"])
def test_a_changed_folder_never_meets_old_pixels(pets: Path, change: str):
    """PITFALLS 'latent cache'."""
    ImageFolder(section(pets))
    path = pets / "dog" / "b.png"
    {
        "content": lambda: put(path, 25),
        "added": lambda: put(path.with_name("e.png"), 25),
        "removed": path.unlink,
        "renamed": lambda: path.rename(path.with_name("z.png")),
    }[change]()
    expected = {"content": [20, 25, 22], "added": [20, 21, 25, 22], "removed": [20, 22], "renamed": [20, 22, 21]}
    assert values(ImageFolder(section(pets))) == [10, 11, *expected[change]]


def test_a_folder_that_was_replaced_never_meets_old_pixels(pets: Path):
    """Same names, same sizes, same times of change of the content."""
    ImageFolder(section(pets))
    times = {path: path.stat() for path in pets.rglob("*.png")}
    for path in times:
        put(path, 77)
    for path, stat in times.items():
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert values(ImageFolder(section(pets)))[:4] == [77, 77, 77, 77]


@pytest.mark.parametrize("setting", [{"size": 5}, {"channels": 3}])
def test_another_shape_never_meets_old_pixels(pets: Path, setting: dict):
    ImageFolder(section(pets))
    assert values(ImageFolder(section(pets, **setting))) == [10, 11, 20, 21, 22]
    assert len(stored(pets)) == 2


@pytest.mark.parametrize("damage", ["pixels cut", "pixels gone", "list cut"])
def test_a_damaged_cache_is_made_again(pets: Path, damage: str):
    ImageFolder(section(pets))
    (place,) = (pets.parent / "cache" / "images").iterdir()
    {
        "pixels cut": lambda: os.truncate(place / "pixels", 70),
        "pixels gone": (place / "pixels").unlink,
        "list cut": lambda: os.truncate(place / "broken.json", 1),
    }[damage]()
    assert values(ImageFolder(section(pets))) == [10, 11, 20, 21, 22]
    assert len(stored(pets)) == 1


def test_a_file_that_could_not_be_used_is_tried_again(pets: Path):
    """A disk that failed for a moment leaves nothing behind."""
    ImageFolder(section(pets))
    (place,) = (pets.parent / "cache" / "images").iterdir()
    (place / "broken.json").write_text('[[1, "Input/output error"]]')
    os.truncate(place / "pixels", 4 * 16)
    assert values(ImageFolder(section(pets))) == [10, 11, 20, 21, 22]


def test_a_cache_that_cannot_be_written_is_named(pets: Path):
    (pets.parent / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"data\.cache: '.*cache/images' cannot be used .* set data\.cache to another"):
        ImageFolder(section(pets))


def test_a_disk_that_is_too_small_is_found_before_the_images_are_decoded(pets: Path):
    gib = 2 * shutil.disk_usage(pets).free / 2**30
    side = int((gib * 2**30 / 5) ** 0.5) + 1
    with pytest.raises(UserError, match=rf"data\.cache: .* the decoded pixels need {5 * side**2 / 2**30:.1f} GiB"):
        ImageFolder(section(pets, size=side))
    assert stored(pets) == {}


def test_colours_keep_their_channels(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "pets" / "cat" / "a.png")
    found = ImageFolder(section(tmp_path / "pets", channels=3)).items([0]).pixels[0, 0]
    np.testing.assert_array_equal(found.numpy(), pixels.transpose(2, 0, 1))

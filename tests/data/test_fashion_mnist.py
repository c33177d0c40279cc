"""Fashion-MNIST: where it is found, what is refused, and that the pixels are the published ones."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d, pad

from fewstep.data import fashion_mnist
from fewstep.data.fashion_mnist import DEBIAN_FOLDER, SHA256, FashionMnist, FashionMnistSection, download, find_folder
from fewstep.data.idx import read_idx
from fewstep.errors import UserError

needs_debian_package = pytest.mark.skipif(
    not (DEBIAN_FOLDER / "train-images-idx3-ubyte.gz").exists(), reason="dataset-fashion-mnist is not installed"
)


def section(**settings) -> FashionMnistSection:
    return FashionMnistSection(**{"size": 28, "batch": 2, **settings})


@pytest.fixture
def no_debian_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "absent")


@pytest.mark.parametrize("size", [16, 28, 32])
def test_pixels_are_framed_and_averaged(clothes: Path, size: int):
    dataset = FashionMnist(section(path=str(clothes), size=size))
    raw = torch.from_numpy(read_idx(clothes / "train-images-idx3-ubyte", 3).astype(np.float64))
    expected = {28: raw, 32: pad(raw, (2, 2, 2, 2)), 16: (avg_pool2d(pad(raw, (2, 2, 2, 2)), 2) + 0.5).floor()}[size]
    items = dataset.items([6, 0, 0])
    assert dataset.shape == (1, 1, size, size)
    assert items.pixels.dtype == torch.uint8
    assert torch.equal(items.pixels[:, 0, 0].double(), expected[[6, 0, 0]])


def test_items_come_in_the_order_asked_for_with_their_labels(clothes: Path):
    dataset = FashionMnist(section(path=str(clothes)))
    labels = read_idx(clothes / "train-labels-idx1-ubyte", 1)
    assert len(dataset) == 7
    assert dataset.items([5, 2]).label.tolist() == [labels[5], labels[2]]
    assert torch.equal(dataset.items(torch.tensor([5, 2])).pixels, dataset.items([5, 2]).pixels)


def test_what_is_returned_can_be_changed_without_changing_the_data(clothes: Path):
    dataset = FashionMnist(section(path=str(clothes)))
    before = dataset.items(range(7)).pixels
    dataset.items(range(7)).pixels.zero_()
    assert torch.equal(dataset.items(range(7)).pixels, before)


def test_the_test_split_is_another_file(clothes: Path):
    assert len(FashionMnist(section(path=str(clothes)), "test")) == 3


@needs_debian_package
@pytest.mark.parametrize(("split", "count", "first"), [("train", 60_000, [9, 0, 0]), ("test", 10_000, [9, 2, 1])])
def test_the_real_images_are_the_published_ones(split: str, count: int, first: list[int]):
    """Class counts, first labels, and (training) the mean and standard deviation that are everywhere quoted."""
    dataset = FashionMnist(section(), split)
    items = dataset.items(range(count))
    assert len(dataset) == count
    assert items.label[:3].tolist() == first
    assert dataset.classes[9] == "Ankle boot"
    assert torch.bincount(items.label).tolist() == [count // 10] * 10
    if split == "train":
        pixels = items.pixels.float() / 255
        assert pixels.mean().item() == pytest.approx(0.2860, abs=5e-5)
        assert pixels.std().item() == pytest.approx(0.3530, abs=5e-5)


@needs_debian_package
def test_the_checksums_of_the_download_are_those_of_the_debian_package():
    for name, expected in SHA256.items():
        content = gzip.decompress((DEBIAN_FOLDER / f"{name}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == expected


@needs_debian_package
def test_without_a_path_the_debian_package_is_used_even_if_a_download_is_allowed():
    assert find_folder(section(download=True)) == DEBIAN_FOLDER


@pytest.mark.usefixtures("no_debian_package")
def test_without_any_copy_the_error_lists_the_three_ways():
    with pytest.raises(UserError, match=r"data\.path .*apt install dataset-fashion-mnist.*data\.download=true"):
        find_folder(section())


def test_a_path_that_lacks_files_is_refused_and_names_them(clothes: Path):
    """Another copy never steps in silently for the one that was asked for."""
    (clothes / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(UserError, match=rf"data\.path: the folder '{clothes}' lacks t10k-labels-idx1-ubyte \(raw or"):
        FashionMnist(section(path=str(clothes)))


@needs_debian_package
@pytest.mark.usefixtures("no_debian_package")
def test_a_download_is_unpacked_checked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first mirror is out of order; files that are there already are not fetched again."""
    mirrors = ((tmp_path / "nothing").as_uri() + "/", DEBIAN_FOLDER.as_uri() + "/")
    folder = download(tmp_path / "cache" / "fashion-mnist", mirrors)
    assert sorted(path.name for path in folder.iterdir()) == sorted(SHA256)
    monkeypatch.setattr(fashion_mnist, "MIRRORS", ())
    dataset = FashionMnist(section(download=True, cache=str(tmp_path / "cache")), "test")
    assert torch.equal(
        dataset.items([8]).pixels, FashionMnist(section(path=str(DEBIAN_FOLDER)), "test").items([8]).pixels
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"something else"), "not the published one"),
        (gzip.compress(b"something else")[:-3], "ended before"),
        (b"<html>", "a gzipped file"),
        (None, "No such file"),
    ],
)
def test_a_download_of_something_else_is_refused_and_not_kept(tmp_path: Path, content: bytes | None, message: str):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    if content is not None:
        (mirror / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(UserError, match=rf"data\.download: train-images-idx3-ubyte\.gz .*{message}.* set data\.path"):
        download(tmp_path / "cache", [mirror.as_uri() + "/"])
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=rf"data\.cache: '{tmp_path / 'cache'}' cannot be used"):
        download(tmp_path / "cache", [])


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("images-idx3", np.zeros((7, 32, 28), np.uint8), "images of 32x28 pixels, not 28x28"),
        ("images-idx3", np.zeros((6, 28, 28), np.uint8), "6 images but 7 labels of the split 'train'"),
        ("labels-idx1", np.full(7, 10, np.uint8), "the label 10; there are 10 classes"),
        ("labels-idx1", np.zeros((7, 1), np.uint8), "is not an idx file of bytes with 1 axes"),
    ],
)
def test_files_that_do_not_fit_are_refused(clothes: Path, write_idx, name: str, array: np.ndarray, message: str):
    write_idx(clothes / f"train-{name}-ubyte", array)
    with pytest.raises(UserError, match=message):
        FashionMnist(section(path=str(clothes)))


def test_a_data_set_without_images_is_refused(clothes: Path, write_idx):
    write_idx(clothes / "train-images-idx3-ubyte", np.zeros((0, 28, 28), np.uint8))
    write_idx(clothes / "train-labels-idx1-ubyte", np.zeros(0, np.uint8))
    with pytest.raises(UserError, match="0 images but 0 labels"):
        FashionMnist(section(path=str(clothes)))

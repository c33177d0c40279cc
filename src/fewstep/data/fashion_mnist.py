"""Fashion-MNIST (Xiao et al., arXiv:1708.07747): 70,000 grey images of clothes, 28x28 pixels, ten classes."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import urllib.request
import zlib
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fewstep.data.api import DatasetSection, Items, Split
from fewstep.data.idx import read_idx
from fewstep.errors import UserError

CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where the Debian and Ubuntu package ``dataset-fashion-mnist`` puts the files."""

MIRRORS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)
"""The authors' own addresses, tried in this order; what comes is checked, so that the second needs no https."""

SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""Of the unpacked files; a packed file differs with the program that packed it."""

_PREFIX = {"train": "train", "test": "t10k"}
_MAX_BYTES = 2**26


class FashionMnistSection(DatasetSection):
    """Fashion-MNIST: from ``path``, else the Debian package ``dataset-fashion-mnist``, else a download if allowed."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    path: str | None = None
    """Folder with the four idx files, raw or as .gz; if it is given, no other place is searched."""
    download: bool = False
    """Whether to fetch the files from the authors (30 MB, checked, kept in ``cache``) if there is no other copy."""
    size: Literal[16, 28, 32]
    """Height and width in pixels: 28 as published, 32 with a black frame of two pixels, 16 the halved 32."""


class FashionMnist:
    """One split of Fashion-MNIST, in memory: ``train`` with 60,000 images or ``test`` with 10,000.

    Raises UserError if no copy is found, or if the one found is damaged or no such data set.
    """

    classes: tuple[str, ...] = CLASSES

    def __init__(self, section: FashionMnistSection, split: Split = "train"):
        folder = find_folder(section)
        images_path, labels_path = (
            _file(folder, f"{_PREFIX[split]}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")
        )
        images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
        if images.shape[1:] != (28, 28):
            raise UserError(f"{images_path} holds images of {images.shape[1]}x{images.shape[2]} pixels, not 28x28")
        if not len(labels) or len(images) != len(labels):
            raise UserError(f"{folder} holds {len(images)} images but {len(labels)} labels of the split '{split}'")
        if labels.max() >= len(CLASSES):
            raise UserError(f"{labels_path} holds the label {labels.max()}; there are {len(CLASSES)} classes, from 0")
        self._pixels = torch.from_numpy(resize(images, section.size))[:, None, None]
        self._labels = torch.from_numpy(labels.astype(np.int64))
        self.shape = (1, 1, section.size, section.size)

    def __len__(self) -> int:
        return len(self._labels)

    def items(self, ids: Sequence[int] | Tensor) -> Items:
        """The items ``ids`` in that order."""
        index = torch.as_tensor(ids, dtype=torch.int64)
        return Items(self._pixels[index], self._labels[index])


def resize(images: np.ndarray, size: Literal[16, 28, 32]) -> np.ndarray:
    """Images ``[n, 28, 28]`` as ``[n, size, size]``: 32 adds a black frame, 16 is the mean of every 2x2 pixels of that,
    halves rounded up."""
    if size == 28:
        return images.copy()
    framed = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    if size == 32:
        return framed
    return ((framed.reshape(-1, 16, 2, 16, 2).sum((2, 4), np.uint16) + 2) // 4).astype(np.uint8)


def find_folder(section: FashionMnistSection) -> Path:
    """The folder with the four files: the section's ``path`` and no other if it is set, else the Debian package's, else
    a download. Raises UserError, naming all three ways, if none is left."""
    if section.path is not None:
        folder = Path(section.path).expanduser()
        missing = [name for name in SHA256 if not _file(folder, name).is_file()]
        if missing:
            raise UserError(
                f"data.path: the folder '{section.path}' lacks {', '.join(missing)} (raw or as .gz); "
                "give the folder that holds all four files, or leave data.path out to use the Debian package"
            )
        return folder
    if all(_file(DEBIAN_FOLDER, name).is_file() for name in SHA256):
        return DEBIAN_FOLDER
    if section.download:
        return download(Path(section.cache).expanduser() / "fashion-mnist")
    raise UserError(
        "data: Fashion-MNIST is not on this machine; there are three ways to get it: "
        "set data.path to a folder with its four idx files; "
        "install the Debian or Ubuntu package (apt install dataset-fashion-mnist); "
        "or write data.download=true to fetch 30 MB from the authors"
    )


def download(folder: Path, mirrors: Sequence[str] = MIRRORS) -> Path:
    """``folder`` with the four files, unpacked; those it lacks are fetched, and kept only if their sha256 is right.

    Raises UserError if no mirror gives a file, or if one gives something else.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in SHA256:
            if not (folder / name).is_file():
                _write(folder / name, _fetch(name, mirrors))
    except OSError as error:
        raise UserError(f"data.cache: '{folder}' cannot be used ({error}); set data.cache to another one") from error
    return folder


def _fetch(name: str, mirrors: Sequence[str]) -> bytes:
    """The unpacked content of the file ``name``, checked."""
    failures = []
    for mirror in mirrors:
        try:
            with urllib.request.urlopen(f"{mirror}{name}.gz", timeout=60) as answer:
                packed = answer.read(_MAX_BYTES)
            content = gzip.GzipFile(fileobj=io.BytesIO(packed)).read(_MAX_BYTES)
        except (OSError, HTTPException, EOFError, zlib.error) as error:
            failures.append(f"{mirror}: {error}")
            continue
        if hashlib.sha256(content).hexdigest() == SHA256[name]:
            return content
        failures.append(f"{mirror}: the content is not the published one (its sha256 differs)")
    raise UserError(
        f"data.download: {name}.gz could not be fetched ({'; '.join(failures)}); "
        "fetch the four files by other means and set data.path to their folder"
    )


def _write(path: Path, content: bytes) -> None:
    """All of the file or nothing, even if two processes write it at once."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    part.replace(path)


def _file(folder: Path, name: str) -> Path:
    """The raw file if there is one, else the packed one, there or not."""
    return folder / name if (folder / name).is_file() else folder / f"{name}.gz"

"""Images in folders: every sub-folder is a class, its name the class's name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fewstep.data.api import DatasetSection, Items, Split
from fewstep.data.pixel_cache import decoded
from fewstep.data.still_image import SUFFIXES
from fewstep.errors import UserError

_Side = Annotated[int, Field(ge=1)]
_NAMED = 5


class ImageFolderSection(DatasetSection):
    """Images in class sub-folders, ``path/<class>/.../<image>``; they are decoded once, into ``cache``."""

    name: Literal["image_folder"] = "image_folder"
    path: str
    """Folder whose sub-folders, searched to any depth, are the classes, in the order of their names."""
    test_path: str | None = None
    """Folder with the same classes that evaluation compares with; without it, that is ``path`` itself."""
    size: _Side | tuple[_Side, _Side]
    """Height and width in pixels, one number for both or [height, width]; images are cut to this shape and resized."""
    channels: Literal[1, 3]
    """1 for grey (images with colours are refused), 3 for RGB (grey images become RGB)."""
    on_broken: Literal["refuse", "skip"] = "refuse"
    """What to do if some files cannot be used: refuse to start and name them, or leave them out with a warning."""


class ImageFolder:
    """The images below a folder, decoded, cut and resized when it is first opened (``still_image``, ``pixel_cache``).

    Ids follow the classes by name, and the files of a class by path. The decoded images take n x channels x height x
    width bytes of the section's ``cache``. Other files, and hidden ones, are passed over.

    Raises UserError if there are no classes, a class without images, images outside the classes, names that are not
    valid UTF-8, or files that cannot be used (all are tried here, and the message names them).
    """

    def __init__(self, section: ImageFolderSection, split: Split = "train"):
        of_test = split == "test" and section.test_path is not None
        self._place = "data.test_path" if of_test else "data.path"
        self._folder = Path((section.test_path if of_test else None) or section.path).expanduser()
        self.classes = class_names(self._folder, self._place)
        if of_test and self.classes != class_names(Path(section.path).expanduser(), "data.path"):
            raise UserError(f"data.test_path: '{self._folder}' must have the same class folders as '{section.path}'")
        height, width = (section.size, section.size) if isinstance(section.size, int) else section.size
        self.shape = (1, section.channels, height, width)

        files = [(path, label) for label, name in enumerate(self.classes) for path in self._images_of(name)]
        _check_names([str(path.relative_to(self._folder)) for path, _ in files], self._folder, self._place)
        cache = Path(section.cache).expanduser() / "images"
        self._pixels, broken = decoded([path for path, _ in files], (section.channels, height, width), cache)
        if broken:
            self._report({files[index][0]: reason for index, reason in broken.items()}, len(files), section.on_broken)
        self._labels = torch.tensor(
            [label for index, (_, label) in enumerate(files) if index not in broken], dtype=torch.int64
        )
        self._check_classes()

    def __len__(self) -> int:
        return len(self._labels)

    def items(self, ids: Sequence[int] | Tensor) -> Items:
        """The items ``ids`` in that order."""
        index = torch.as_tensor(ids, dtype=torch.int64)
        pixels = torch.from_numpy(np.asarray(self._pixels[index.numpy()]))
        return Items(pixels[:, None], self._labels[index])

    def _images_of(self, name: str) -> list[Path]:
        try:
            return [Path(path) for path in _walk(str(self._folder / name), (os.path.realpath(self._folder),))]
        except OSError as error:
            raise UserError(f"{self._place}: '{self._folder / name}' cannot be listed ({error})") from error

    def _report(self, broken: dict[Path, str], num_files: int, on_broken: str) -> None:
        named = [f"{_text(path.relative_to(self._folder))}: {reason}" for path, reason in broken.items()][:_NAMED]
        rest = [f"and {len(broken) - _NAMED} more"] if len(broken) > _NAMED else []
        message = (
            f"{self._place}: {len(broken)} of the {num_files} images in '{self._folder}' cannot be used:\n  "
            + "\n  ".join(named + rest)
        )
        if on_broken == "refuse":
            raise UserError(f"{message}\nMend or remove them, or set data.on_broken: skip to leave them out.")
        warnings.warn(f"{message}\nThey are left out.", stacklevel=3)

    def _check_classes(self) -> None:
        counts = torch.bincount(self._labels, minlength=len(self.classes)).tolist()
        empty = [name for name, count in zip(self.classes, counts, strict=True) if not count]
        if empty:
            raise UserError(
                f"{self._place}: no image that can be used in {len(empty)} class folders of '{self._folder}' "
                f"({_some(empty)}); add images ({' '.join(SUFFIXES)}) or remove the folders"
            )


def class_names(folder: Path, place: str) -> tuple[str, ...]:
    """The sorted names of the class folders in ``folder``. Raises UserError, beginning with the key ``place`` of the
    recipe, if there are none, if a name is not valid UTF-8, or if images stand beside them."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise UserError(f"{place}: '{folder}' is not a folder that can be read ({error.strerror})") from error
    classes = [name for name in names if (folder / name).is_dir()]
    strays = [name for name in names if name not in classes and _is_image(name)]
    if not classes:
        raise UserError(f"{place}: '{folder}' has no sub-folders; put the images into one sub-folder for each class")
    if strays:
        raise UserError(
            f"{place}: {len(strays)} images stand beside the class folders of '{folder}' ({_some(strays)}); "
            "move them into a class folder"
        )
    _check_names(classes, folder, place)
    return tuple(classes)


def _check_names(names: Sequence[str], folder: Path, place: str) -> None:
    """Raises UserError if the bytes of a name are not text: no recipe, checkpoint or picture could hold it."""
    odd = [name for name in names if _text(Path(name)).encode() != os.fsencode(name)]
    if odd:
        raise UserError(
            f"{place}: {len(odd)} names in '{folder}' are not valid UTF-8 ({_some(odd)}); rename them, for instance by "
            "convmv"
        )


def _walk(folder: str, above: tuple[str, ...]) -> Iterator[str]:
    """The images below ``folder`` by path; symbolic links are followed, but not to a folder ``above``."""
    here = os.path.realpath(folder)
    if here in above:
        raise UserError(f"'{folder}' is a symbolic link to a folder that contains it; remove the link")
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith("."):
            continue
        if os.path.isdir(path):
            yield from _walk(path, (*above, here))
        elif _is_image(name) and (os.path.isfile(path) or os.path.islink(path)):
            yield path


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _some(names: Sequence[str]) -> str:
    return ", ".join(_text(Path(name)) for name in names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _text(path: Path) -> str:
    """A path that can be printed, whatever bytes its name is made of."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")

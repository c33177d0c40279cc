"""Files in folders: every sub-folder is a class, its name the class's name."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fewstep.data.api import DatasetSection, Items, Split
from fewstep.data.pixel_cache import decoded
from fewstep.errors import UserError

_Side = Annotated[int, Field(ge=1)]
_NAMED = 5


class ClassFoldersSection(DatasetSection):
    """What folders of images and folders of videos have in common."""

    path: str
    """Folder whose sub-folders, searched to any depth, are the classes, in the order of their names."""
    test_path: str | None = None
    """Folder with the same classes that evaluation compares with; without it, that is ``path`` itself."""
    size: _Side | tuple[_Side, _Side]
    """Height and width in pixels, one number for both or [height, width]; files are cut to this shape and resized."""
    channels: Literal[1, 3]
    """1 for grey (files with colours are refused), 3 for RGB (grey files become RGB)."""
    on_broken: Literal["refuse", "skip"] = "refuse"
    """What to do if some files cannot be used: refuse to start and name them, or leave them out with a warning."""

    @property
    def height_width(self) -> tuple[int, int]:
        """Of what is read, in pixels."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size


@dataclass(frozen=True)
class FileKind:
    """The files that are looked for and how they are read."""

    name: str
    """What messages call one file."""
    suffixes: tuple[str, ...]
    """Of the names that are taken for such files, in small letters."""
    read: Callable[[Path], np.ndarray]
    """The pixels of a file, uint8 ``[f, c, h, w]``; raises an error that says why there are none."""
    version: str
    """Changes whenever ``read`` returns something else for the same file, beside the shape."""

    def fits(self, name: str) -> bool:
        """Whether a file of this name is one."""
        return name.lower().endswith(self.suffixes)


class ClassFolders:
    """The files below a folder, decoded, cut and resized when it is first opened (``pixel_cache``).

    Ids follow the classes by name, and the files of a class by path. The decoded files take n x frames x channels x
    height x width bytes of the section's ``cache``. Files of other kinds, and hidden ones, are passed over.

    Raises UserError if there are no classes, a class without files, files outside the classes, names that are not
    valid UTF-8, or files that cannot be used (all are tried here, and the message names them).
    """

    def __init__(self, section: ClassFoldersSection, split: Split, kind: FileKind, frames: int):
        of_test = split == "test" and section.test_path is not None
        self._kind, self._place = kind, "data.test_path" if of_test else "data.path"
        self._folder = Path((section.test_path if of_test else None) or section.path).expanduser()
        self.classes = class_names(self._folder, self._place, kind)
        if of_test and self.classes != class_names(Path(section.path).expanduser(), "data.path", kind):
            raise UserError(f"data.test_path: '{self._folder}' must have the same class folders as '{section.path}'")
        self.shape = (frames, section.channels, *section.height_width)

        files = [(path, label) for label, name in enumerate(self.classes) for path in self._files_of(name)]
        _check_names([str(path.relative_to(self._folder)) for path, _ in files], self._folder, self._place)
        cache = Path(section.cache).expanduser() / f"{kind.name}s"
        self._pixels, broken = decoded([path for path, _ in files], self.shape, cache, kind.read, kind.version)
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
        return Items(torch.from_numpy(np.asarray(self._pixels[index.numpy()])), self._labels[index])

    def _files_of(self, name: str) -> list[Path]:
        above = (os.path.realpath(self._folder),)
        try:
            return [Path(path) for path in _walk(str(self._folder / name), above, self._kind)]
        except OSError as error:
            raise UserError(f"{self._place}: '{self._folder / name}' cannot be listed ({error})") from error

    def _report(self, broken: dict[Path, str], num_files: int, on_broken: str) -> None:
        named = [f"{_text(path.relative_to(self._folder))}: {reason}" for path, reason in broken.items()][:_NAMED]
        rest = [f"and {len(broken) - _NAMED} more"] if len(broken) > _NAMED else []
        files = f"{num_files} {self._kind.name}s in '{self._folder}'"
        message = f"{self._place}: {len(broken)} of the {files} cannot be used:\n  " + "\n  ".join(named + rest)
        if on_broken == "refuse":
            raise UserError(f"{message}\nMend or remove them, or write data.on_broken=skip to leave them out.")
        warnings.warn(f"{message}\nThey are left out.", stacklevel=4)

    def _check_classes(self) -> None:
        counts = torch.bincount(self._labels, minlength=len(self.classes)).tolist()
        empty = [name for name, count in zip(self.classes, counts, strict=True) if not count]
        if empty:
            name, suffixes = self._kind.name, " ".join(self._kind.suffixes)
            raise UserError(
                f"{self._place}: no {name} that can be used in {len(empty)} class folders of '{self._folder}' "
                f"({_some(empty)}); add {name}s ({suffixes}) or remove the folders"
            )


def class_names(folder: Path, place: str, kind: FileKind) -> tuple[str, ...]:
    """The sorted names of the class folders in ``folder``. Raises UserError, beginning with the key ``place`` of the
    recipe, if there are none, if a name is not valid UTF-8, or if files of this ``kind`` stand beside them."""
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        raise UserError(f"{place}: '{folder}' is not a folder that can be read ({error.strerror})") from error
    classes = [name for name in names if (folder / name).is_dir()]
    strays = [name for name in names if name not in classes and kind.fits(name)]
    if not classes:
        raise UserError(
            f"{place}: '{folder}' has no sub-folders; put the {kind.name}s into one sub-folder for each class"
        )
    if strays:
        raise UserError(
            f"{place}: {len(strays)} {kind.name}s stand beside the class folders of '{folder}' ({_some(strays)}); "
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


def _walk(folder: str, above: tuple[str, ...], kind: FileKind) -> Iterator[str]:
    """The files below ``folder`` by path; symbolic links are followed, but not to a folder ``above``."""
    here = os.path.realpath(folder)
    if here in above:
        raise UserError(f"'{folder}' is a symbolic link to a folder that contains it; remove the link")
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if name.startswith("."):
            continue
        if os.path.isdir(path):
            yield from _walk(path, (*above, here), kind)
        elif kind.fits(name) and (os.path.isfile(path) or os.path.islink(path)):
            yield path


def _some(names: Sequence[str]) -> str:
    return ", ".join(_text(Path(name)) for name in names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")


def _text(path: Path) -> str:
    """A path that can be printed, whatever bytes its name is made of."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")

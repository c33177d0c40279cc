"""Checkpoints: one atomic folder for everything that a run needs to go on.

``iteration-000300/`` holds one safetensors file for each named group of tensors (``student``, ``student.optimizer``,
``ema``, ``critic``, ...), ``meta.json``, and the marker ``complete.json``, which lists every file with its size and
SHA-256. Groups are opaque here: what goes into which is the engine's affair.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from safetensors import SafetensorError
from torch import Tensor

from fewstep.checkpoint.atomic import REPLACED, dead_partials, remove_folder, written_aside
from fewstep.checkpoint.tensor_file import Later, Named, in_file_order, read_tensors, write_tensors
from fewstep.errors import UserError
from fewstep.section import Section

MARKER = "complete.json"
META = "meta.json"
_FOLDER = re.compile(rf"iteration-(\d+)({re.escape(REPLACED)})?")
_GROUP = re.compile(r"\w[\w.-]*")


class CheckpointSection(Section):
    """When checkpoints are written, and which ones stay."""

    every: int = Field(ge=1)
    """Iterations from one checkpoint to the next; the end of a run and an interruption write one too."""
    keep_last: int = Field(default=2, ge=1)
    """Newest checkpoints that stay."""
    keep_every: int | None = Field(default=None, ge=1)
    """Checkpoints at multiples of this many iterations stay as well; a multiple of ``every``."""
    asynchronous: bool = False
    """Whether training goes on while a checkpoint is written, from a copy in host memory that is as large as the
    checkpoint; else one tensor at a time is held there."""

    @model_validator(mode="after")
    def _kept_ones_are_written(self) -> CheckpointSection:
        if self.keep_every is not None and self.keep_every % self.every:
            raise ValueError(f"'keep_every' must be a multiple of 'every' ({self.every}), got {self.keep_every}")
        return self


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint. The tensors stay on the disk until they are asked for."""

    path: Path
    iteration: int
    meta: dict[str, Any]
    """What ``meta.json`` holds; ``Meta.from_json`` reads it strictly."""
    groups: tuple[str, ...]

    def tensors(self, group: str) -> dict[str, Tensor]:
        """The tensors of one group, on the CPU, bit for bit as saved; names that shared one tensor share one again.

        Raises UserError if there is no such group, or its file is not the one that was written.
        """
        if group not in self.groups:
            raise UserError(f"{self.path} has no group '{group}'; it holds {', '.join(self.groups)}")
        file = self.path / f"{group}.safetensors"
        _verify(file)
        return read_tensors(file)


def save_checkpoint(
    checkpoints: Path,
    iteration: int,
    tensors: Mapping[str, Named],
    meta: Mapping[str, Any],
    keep: CheckpointSection,
) -> Path:
    """Writes the checkpoint of ``iteration``, then removes those that ``keep`` does not keep.

    tensors: by group, then by name; any device; of those that come ``Later`` one at a time is held. meta: whatever JSON
    can hold, without NaN; ``Meta.to_json()`` in a run.
    Returns the folder. Raises UserError if the disk is full or fails: nothing of the new checkpoint stays, and no other
    is touched.
    """
    for group in tensors:
        if not _GROUP.fullmatch(group):
            raise ValueError(f"a group of tensors cannot be called {group!r}: its name becomes that of a file")
    needed = sum(tensor.nbytes for named in tensors.values() for tensor in named.values())
    with checkpoint_folder(checkpoints, iteration, meta, keep, needed) as partial:
        write_groups(partial, tensors)
    return checkpoints / f"iteration-{iteration:06d}"


def write_groups(partial: Path, tensors: Mapping[str, Named]) -> None:
    """Writes a file for each group of tensors into a checkpoint folder that is not complete yet."""
    for group, named in tensors.items():
        write_tensors(partial / f"{group}.safetensors", named)


@contextmanager
def checkpoint_folder(
    checkpoints: Path, iteration: int, meta: Mapping[str, Any], keep: CheckpointSection, needed: int
) -> Iterator[Path]:
    """Yields the folder into which the groups of tensors are written, ``needed`` bytes in all, by whichever processes
    hold them; when the block ends it is completed and put in its place. The rest is as in :func:`save_checkpoint`."""
    folder = checkpoints / f"iteration-{iteration:06d}"
    try:
        with written_aside(folder) as partial:
            yield partial
            (partial / META).write_text(json.dumps(dict(meta), indent=1, allow_nan=False))
            (partial / MARKER).write_text(json.dumps({"iteration": iteration, "files": _inventory(partial)}, indent=1))
    except (OSError, SafetensorError) as error:
        free = _free_bytes(checkpoints) / 2**30
        raise UserError(
            f"{folder}: the checkpoint could not be written: {error}. It needs {needed / 2**30:.3g} GiB, {free:.3g} "
            "GiB are free; make room, or lower checkpoint.keep_last. The older checkpoints are intact"
        ) from error
    _retain(checkpoints, keep)


def take_part(tensors: Mapping[str, Named]) -> None:
    """What every other process calls while one calls ``save_checkpoint``, with tensors of the same names."""
    for named in tensors.values():
        for name in in_file_order(named):
            tensor = named[name]
            if isinstance(tensor, Later):
                tensor.make()


def newest_complete(checkpoints: Path, *, verified: bool = False) -> Path | None:
    """The newest complete checkpoint, or None. Warns of every newer one that was cut off or is broken, by name.

    verified: whether the content of every file must be what was written (SHA-256), which reads them all.
    """
    for partial in dead_partials(checkpoints):
        warnings.warn(f"{partial}: a save that was cut off, ignored", stacklevel=2)
    for _, path in reversed(_listing(checkpoints)):
        flaw = _flaw(path) or (_damage(path) if verified else None)
        if flaw is None:
            return path
        warnings.warn(f"{path}: this checkpoint is broken and skipped: {flaw}", stacklevel=2)
    return None


def load_checkpoint(path: Path) -> Checkpoint:
    """Opens one checkpoint folder. Raises UserError if it is not there or not complete, and says which one is."""
    flaw = _flaw(path) if path.is_dir() else "there is no such folder"
    if flaw is not None:
        others = [str(other) for _, other in _listing(path.parent) if other != path and _flaw(other) is None]
        instead = f"the newest complete one is {others[-1]}" if others else "there is no complete one beside it"
        raise UserError(f"{path}: this checkpoint cannot be used: {flaw}; {instead}")
    _verify(path / META)
    iteration, files = _read_marker(path)
    groups = tuple(file.removesuffix(".safetensors") for file in files if file.endswith(".safetensors"))
    return Checkpoint(path, iteration, json.loads((path / META).read_text()), groups)


def _inventory(folder: Path) -> dict[str, dict[str, Any]]:
    return {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())}


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _verify(file: Path) -> None:
    _, files = _read_marker(file.parent)
    if _sha256(file) != files[file.name]["sha256"]:
        raise UserError(f"{file}: its content is not what was written (SHA-256 differs); use another checkpoint")


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free


def _read_marker(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """The iteration, and what is known of every file."""
    marker = json.loads((path / MARKER).read_text())
    return marker["iteration"], marker["files"]


def _flaw(path: Path) -> str | None:
    """What is wrong with a checkpoint folder, as far as names and sizes tell; None if nothing is."""
    try:
        iteration, entries = _read_marker(path)
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except FileNotFoundError:
        return f"it has no {MARKER}, so its save never ended"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {MARKER} is damaged"
    if not isinstance(iteration, int) or META not in files or not any(name.endswith(".safetensors") for name in files):
        return f"its {MARKER} does not list {META} and tensors, so it is damaged"
    for name, (expected, _) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected:
            return f"{name} has {file.stat().st_size} bytes instead of {expected}"
    return None


def _damage(path: Path) -> str | None:
    """What is wrong with the content of a checkpoint in which names and sizes are right; None if nothing is."""
    for name, entry in _read_marker(path)[1].items():
        try:
            found = _sha256(path / name)
        except OSError as error:
            return f"{name} cannot be read ({error})"
        if found != entry["sha256"]:
            return f"the content of {name} is not what was written (SHA-256 differs)"
    return None


def _listing(checkpoints: Path) -> list[tuple[int, Path]]:
    """Every checkpoint folder by iteration, broken ones too; of one iteration, one that was replaced comes first."""
    found = []
    for path in checkpoints.glob("iteration-*"):
        match = _FOLDER.fullmatch(path.name)
        if match:
            found.append((int(match[1]), match[2] is None, path))
    return [(iteration, path) for iteration, _, path in sorted(found)]


def _retain(checkpoints: Path, keep: CheckpointSection) -> None:
    """Removes the complete checkpoints that nothing keeps; broken ones stay for whoever wants to look at them."""
    complete = [(iteration, path) for iteration, path in _listing(checkpoints) if _flaw(path) is None]
    best = dict(complete)
    newest = sorted(best)[-keep.keep_last :]
    for iteration, path in complete:
        wanted = iteration in newest or (keep.keep_every is not None and iteration % keep.keep_every == 0)
        if not wanted or path != best[iteration]:
            remove_folder(path)

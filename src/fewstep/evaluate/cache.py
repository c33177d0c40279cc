"""Tensors that follow from data, kept by the hash of what they follow from; and files that are whole or not there."""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fewstep.errors import UserError
from fewstep.evaluate.api import LabelledClips

_CHUNK = 4096


def cached(folder: Path, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors ``name`` of the folder; where they are missing or damaged (which warns) they are made and kept.

    ``name`` must contain a hash of everything that ``make`` depends on. Several processes may do this at once: the last
    one to finish wins. Raises UserError if the folder cannot be written.
    """
    path = folder / f"{name}.safetensors"
    if path.exists():
        try:
            return read_checked(path)
        except (SafetensorError, OSError, ValueError) as error:
            warnings.warn(f"{path} is damaged ({error}); it is made again", stacklevel=2)
    tensors = {key: tensor.cpu().contiguous() for key, tensor in make().items()}
    try:
        write_checked(path, tensors)
    except OSError as error:
        raise UserError(f"the cache '{folder}' cannot be written ({error}); name another folder as 'cache'") from error
    return tensors


def write_checked(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file with a hash of its tensors beside ``metadata``."""
    with written_whole(path) as part:
        save_file(dict(tensors), part, metadata={**(metadata or {}), "content": tensor_hash(tensors)})


def read_checked(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by :func:`write_checked`. Raises SafetensorError, OSError or ValueError where damaged."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        written = (file.metadata() or {}).get("content")
    if written != tensor_hash(tensors):
        raise ValueError("its content is not what was written")
    return tensors


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a file to write to, which becomes ``path`` when the block ends and vanishes when it raises.

    Raises UserError where ``path`` is a folder, a device or anything else that a file must not replace.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"'{path}' is not a regular file and is not replaced by one; give the path of a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def tensor_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, types, shapes and values, whatever the order and the device."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        _update(digest, repr((name, str(tensor.dtype), tuple(tensor.shape))).encode(), tensor)
    return digest.hexdigest()


def data_hash(dataset: LabelledClips, ids: Tensor | None = None) -> str:
    """SHA-256 of the classes, the shape, and the pixels and labels of the items ``ids`` (all when left out)."""
    ids = torch.arange(len(dataset)) if ids is None else ids
    digest = hashlib.sha256(repr((tuple(dataset.classes), tuple(dataset.shape), len(ids))).encode())
    for chunk in ids.split(_CHUNK):
        items = dataset.items(chunk)
        _update(digest, b"items", items.pixels)
        _update(digest, b"label", items.label)
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", header: bytes, tensor: Tensor) -> None:
    digest.update(header)
    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)

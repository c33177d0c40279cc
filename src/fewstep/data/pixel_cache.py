"""Decoded images in a file, mapped into memory: they are decoded once, in threads, and shared by all processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import PIL

from fewstep.data.still_image import read_image
from fewstep.errors import UserError

_REVISION = 1  # to be raised when read_image returns something else for the same file
_CHUNK = 512

Shape = tuple[int, int, int]


def decoded(paths: Sequence[Path], shape: Shape, cache: Path) -> tuple[np.ndarray, dict[int, str]]:
    """The images that can be used, uint8 ``[n, c, h, w]`` in the order of ``paths``, read-only; and for each of the
    others its index in ``paths`` with the reason.

    ``shape`` is (channels, height, width). The cache's name is a hash of the shape and of every file's path, size and
    times of change, so that another list, another shape or a changed file never meets old pixels. Files that could not
    be used are tried again each time. Raises UserError if the cache cannot be written.
    """
    place = cache / _name(paths, shape)
    try:
        if not _is_current(place, paths, shape):
            shutil.rmtree(place, ignore_errors=True)
            cache.mkdir(parents=True, exist_ok=True)
            _build(place, paths, shape)
        broken = _broken(place)
        size = (len(paths) - len(broken), *shape)
        pixels = np.memmap(place / "pixels", np.uint8, "r", shape=size) if size[0] else np.empty(size, np.uint8)
    except OSError as error:
        raise UserError(f"data.cache: '{cache}' cannot be used ({error}); set data.cache to another folder") from error
    return pixels, broken


def _name(paths: Sequence[Path], shape: Shape) -> str:
    digest = hashlib.sha256(repr((_REVISION, PIL.__version__, shape)).encode())
    for path in paths:
        try:
            stat = path.stat()
            stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        except OSError:
            stamp = None
        digest.update(repr((os.path.abspath(path), stamp)).encode())
    return digest.hexdigest()[:32]


def _is_current(place: Path, paths: Sequence[Path], shape: Shape) -> bool:
    """Whether the cache is there, whole, and as good as one made now."""
    try:
        broken = _broken(place)
        num_bytes = (place / "pixels").stat().st_size
    except (OSError, ValueError):
        return False
    whole = num_bytes == (len(paths) - len(broken)) * math.prod(shape)
    return whole and all(isinstance(_try(paths[index], shape), str) for index in broken)


def _broken(place: Path) -> dict[int, str]:
    return dict(json.loads((place / "broken.json").read_text()))


def _build(place: Path, paths: Sequence[Path], shape: Shape) -> None:
    """Writes aside and renames; if another process was faster, its cache stays."""
    needed, free = len(paths) * math.prod(shape), shutil.disk_usage(place.parent).free
    if needed > free:
        raise UserError(
            f"data.cache: '{place.parent}' has {free / 2**30:.1f} GiB free, the decoded images need "
            f"{needed / 2**30:.1f} GiB; set data.cache to a folder with more room, or a smaller data.size"
        )
    aside = Path(tempfile.mkdtemp(dir=place.parent, prefix="part-"))
    try:
        broken = []
        with (aside / "pixels").open("wb") as file:
            for index, image in enumerate(_decode(paths, shape)):
                if isinstance(image, str):
                    broken.append((index, image))
                else:
                    file.write(image.tobytes())
        (aside / "broken.json").write_text(json.dumps(broken))
        try:
            aside.rename(place)
        except OSError:
            if not place.exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _decode(paths: Sequence[Path], shape: Shape) -> Iterator[np.ndarray | str]:
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(paths), _CHUNK):
            yield from pool.map(lambda path: _try(path, shape), paths[start : start + _CHUNK])


def _try(path: Path, shape: Shape) -> np.ndarray | str:
    """The pixels, or why there are none."""
    try:
        return read_image(path, *shape)
    except Exception as error:  # Pillow's plugins raise errors of many types for damaged files
        return str(error) or type(error).__name__

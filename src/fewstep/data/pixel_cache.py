"""Decoded images and videos in a file, mapped into memory: decoded once, in threads, and shared by all processes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fewstep.errors import UserError

_CHUNK, _CHUNK_BYTES = 512, 2**30  # items, and bytes of pixels, that wait in memory to be written

Shape = tuple[int, int, int, int]
Read = Callable[[Path], np.ndarray]


def decoded(
    paths: Sequence[Path], shape: Shape, cache: Path, read: Read, version: str
) -> tuple[np.ndarray, dict[int, str]]:
    """The files that can be used, uint8 ``[n, f, c, h, w]`` in the order of ``paths``, read-only; and for each of the
    others its index in ``paths`` with the reason.

    ``shape`` is (frames, channels, height, width); ``read`` gives a file's pixels in this shape or raises an error that
    says why not. The cache's name is a hash of the shape, of the ``version`` of ``read``, and of every file's path,
    size and times of change, so that another list, another shape or a changed file never meets old pixels. Files that
    could not be used are tried again each time. Raises UserError if the cache cannot be written.
    """
    place = cache / _name(paths, shape, version)
    try:
        if not _is_current(place, paths, shape, read):
            shutil.rmtree(place, ignore_errors=True)
            cache.mkdir(parents=True, exist_ok=True)
            _build(place, paths, shape, read)
        broken = _broken(place)
        size = (len(paths) - len(broken), *shape)
        pixels = np.memmap(place / "pixels", np.uint8, "r", shape=size) if size[0] else np.empty(size, np.uint8)
    except OSError as error:
        raise UserError(f"data.cache: '{cache}' cannot be used ({error}); set data.cache to another folder") from error
    return pixels, broken


def _name(paths: Sequence[Path], shape: Shape, version: str) -> str:
    digest = hashlib.sha256(repr((version, shape)).encode())
    for path in paths:
        try:
            stat = path.stat()
            stamp = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        except OSError:
            stamp = None
        digest.update(repr((os.path.abspath(path), stamp)).encode())
    return digest.hexdigest()[:32]


def _is_current(place: Path, paths: Sequence[Path], shape: Shape, read: Read) -> bool:
    """Whether the cache is there, whole, and as good as one made now."""
    try:
        broken = _broken(place)
        num_bytes = (place / "pixels").stat().st_size
    except (OSError, ValueError):
        return False
    whole = num_bytes == (len(paths) - len(broken)) * math.prod(shape)
    return whole and all(isinstance(_try(paths[index], read), str) for index in broken)


def _broken(place: Path) -> dict[int, str]:
    return dict(json.loads((place / "broken.json").read_text()))


def _build(place: Path, paths: Sequence[Path], shape: Shape, read: Read) -> None:
    """Writes aside and renames; if another process was faster, its cache stays."""
    needed, free = len(paths) * math.prod(shape), shutil.disk_usage(place.parent).free
    if needed > free:
        raise UserError(
            f"data.cache: '{place.parent}' has {free / 2**30:.1f} GiB free, the decoded pixels need "
            f"{needed / 2**30:.1f} GiB; set data.cache to a folder with more room, or a smaller data.size"
        )
    aside = Path(tempfile.mkdtemp(dir=place.parent, prefix="part-"))
    try:
        broken = []
        with (aside / "pixels").open("wb") as file:
            for index, pixels in enumerate(_decode(paths, shape, read)):
                if isinstance(pixels, str):
                    broken.append((index, pixels))
                else:
                    file.write(pixels.tobytes())
        (aside / "broken.json").write_text(json.dumps(broken))
        try:
            aside.rename(place)
        except OSError:
            if not place.exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _decode(paths: Sequence[Path], shape: Shape, read: Read) -> Iterator[np.ndarray | str]:
    chunk = min(_CHUNK, max(1, _CHUNK_BYTES // math.prod(shape)))
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(paths), chunk):
            yield from pool.map(lambda path: _try(path, read), paths[start : start + chunk])


def _try(path: Path, read: Read) -> np.ndarray | str:
    """The pixels, or why there are none."""
    try:
        return read(path)
    except Exception as error:  # decoders raise errors of many types for damaged files
        return str(error) or type(error).__name__

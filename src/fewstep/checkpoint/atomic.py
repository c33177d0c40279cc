"""Folders that appear complete or not at all, and disappear the same way.

A folder is written beside its place under a name that starts with ``.partial-``, brought to the disk, and renamed. A
process that is killed on the way leaves such a partial folder, or a ``.removing-`` one, and never a folder that looks
finished; the next write into the same parent clears both. A partial folder is locked by its writer, so that those of
other living processes are left alone.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fewstep.errors import named

PARTIAL = ".partial-"
REMOVING = ".removing-"
REPLACED = ".replaced"


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to write into, which becomes ``folder`` when the block ends and vanishes when it raises.

    A ``folder`` that exists is replaced: for the moment between two renames it stands under its name with ``.replaced``
    behind it, and a crash in that moment leaves it there, complete. Raises OSError where the disk does.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder.parent)
    partial, lock = _claim(folder)
    try:
        yield partial
        _sync(partial)
        _put_in_place(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def replace_text(file: Path, text: str) -> None:
    """Writes a file that is never seen half-written: what stood there before stays until all of it is on the disk."""
    aside = file.with_name(f"{PARTIAL}{file.name}-{secrets.token_hex(4)}")
    with named(file):
        try:
            with aside.open("w") as opened:
                opened.write(text)
                opened.flush()
                os.fsync(opened.fileno())
            aside.replace(file)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def remove_folder(folder: Path) -> None:
    """Removes a folder, if it is there; a crash half-way leaves nothing under its name."""
    doomed = folder.with_name(f"{REMOVING}{folder.name}-{secrets.token_hex(4)}")
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed, ignore_errors=True)


def dead_partials(parent: Path) -> list[Path]:
    """The partial folders whose writer is gone."""
    found = []
    for partial in sorted(parent.glob(f"{PARTIAL}*")):
        with _locked_if_dead(partial) as dead:
            if dead:
                found.append(partial)
    return found


def clear_leftovers(parent: Path) -> None:
    """Removes what dead processes left half-written or half-removed in ``parent``."""
    for doomed in parent.glob(f"{REMOVING}*"):
        shutil.rmtree(doomed, ignore_errors=True)
    for partial in parent.glob(f"{PARTIAL}*"):
        with _locked_if_dead(partial) as dead:
            if dead:
                shutil.rmtree(partial, ignore_errors=True)


def _claim(folder: Path) -> tuple[Path, int]:
    """A new partial folder, and the descriptor that holds its lock until it is closed or the process ends."""
    while True:
        partial = folder.with_name(f"{PARTIAL}{folder.name}-{os.getpid()}-{secrets.token_hex(4)}")
        partial.mkdir()
        try:
            lock = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:  # cleared by another process before the lock was taken
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: nobody can prove the folder dead, so nobody clears it
            return partial, lock
        if partial.exists():
            return partial, lock
        os.close(lock)


@contextmanager
def _locked_if_dead(partial: Path) -> Iterator[bool]:
    """Whether the writer of ``partial`` is gone; where it is, its lock is held inside the block."""
    try:
        descriptor = os.open(partial, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        dead = True
    except OSError:
        dead = False
    try:
        yield dead
    finally:
        os.close(descriptor)


def _put_in_place(partial: Path, folder: Path) -> None:
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        remove_folder(replaced)
        folder.rename(replaced)
    partial.rename(folder)
    _sync_one(folder.parent)
    remove_folder(replaced)


def _sync(folder: Path) -> None:
    """Brings every file and folder below ``folder``, and itself, to the disk."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync_one(Path(root) / name)
        _sync_one(Path(root))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

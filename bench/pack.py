"""What of a bench another machine needs to go on: figures, and weights that runs still start from, in a few files.

A run whose weights travel becomes an export: the averaged weights, which is what other runs start from, in bfloat16. A
GPU computes in bfloat16, so a teacher scores exactly as before; a student, or a critic, starts from rounded weights and
trains in float32 on. Of every other finished run only the figures travel. Runs that were stopped on the way stay behind
and begin anew.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.runs import Run, unfinished
from fewstep.checkpoint.export import export
from fewstep.checkpoint.source import open_source

KEPT = ("recipe.yaml", "environment.json", "evaluation.json")


def pack(runs: Sequence[Run], root: Path, file: Path, max_mib: float) -> list[Path]:
    """Writes ``<file>.1of3``, ``<file>.2of3``, ... of at most ``max_mib`` MiB each, and returns them. ``root``: the
    folder that all runs are in. Parts of an earlier pack of this name are removed."""
    _, needed = unfinished(runs)
    packed = io.BytesIO()
    with TemporaryDirectory() as aside, tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as tar:
        for run in runs:
            place = str(run.folder.relative_to(root))
            if run.trained.exists() and (run.folder in needed or not run.evaluation.exists()):
                tar.add(export(open_source(run.folder), Path(aside) / place, dtype="bfloat16"), place)
                tar.add(run.trained, f"{place}/trained")
            elif not run.evaluation.exists():
                continue
            for name in KEPT:
                if (run.folder / name).exists():
                    tar.add(run.folder / name, f"{place}/{name}")
    for old in parts_of(file):
        old.unlink()
    content, size = packed.getbuffer(), int(max_mib * 2**20)
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    parts = [file.with_name(f"{file.name}.{place}of{len(pieces)}") for place in range(1, len(pieces) + 1)]
    file.parent.mkdir(parents=True, exist_ok=True)
    for part, piece in zip(parts, pieces, strict=True):
        part.write_bytes(piece)
    return parts


def unpack(file: Path, root: Path) -> None:
    """Puts the runs of ``<file>.1of3``, ... into ``root``; those that are trained there are left as they are. Raises
    SystemExit if a part is missing."""
    parts = parts_of(file)
    if not parts or [part.suffix for part in parts] != [f".{place + 1}of{len(parts)}" for place in range(len(parts))]:
        raise SystemExit(f"{file}: parts are missing; there are {', '.join(map(str, parts)) or 'none'}")
    root.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    with TemporaryDirectory(dir=root) as aside, tarfile.open(fileobj=packed, mode="r:gz") as tar:
        tar.extractall(aside, filter="data")
        for recipe in sorted(Path(aside).glob("**/recipe.yaml")):
            folder = root / recipe.parent.relative_to(aside)
            if not (folder / "trained").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.parent.mkdir(parents=True, exist_ok=True)
                recipe.parent.rename(folder)


def parts_of(file: Path) -> list[Path]:
    """The parts that are there, in their order."""
    return sorted(file.parent.glob(f"{file.name}.*of*"), key=lambda part: int(part.suffix[1:].partition("of")[0]))

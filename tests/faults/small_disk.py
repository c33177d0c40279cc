"""A file system of a few MiB that fills up for real: a tmpfs, mounted in a namespace of its own where this user may,
else by root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SmallDisk:
    """inside: its folder as the commands that stand behind ``around`` see it. here: the same folder as this process
    sees it."""

    inside: Path
    here: Path
    around: tuple[str, ...]

    @property
    def ballast(self) -> Path:
        return self.here / "ballast"

    def fill(self, but: int = 0) -> None:
        """Takes all the room that is left, but for so many bytes."""
        with self.ballast.open("wb", buffering=0) as file:
            for size in (65536, 4096, 512, 1):
                try:
                    while True:
                        file.write(b"\1" * size)
                except OSError:
                    continue
            file.truncate(file.tell() - but)

    def empty(self) -> None:
        self.ballast.unlink()


@contextmanager
def small_disk(place: Path, size_mib: int) -> Iterator[SmallDisk | None]:
    """The disk, or None where none can be had."""
    place.mkdir()
    options = f"size={size_mib}m"
    script = f"mount -t tmpfs -o {options} tmpfs '{place}' && echo ready && exec sleep 3600"
    holder = None
    if shutil.which("unshare") and shutil.which("nsenter"):
        command = ["unshare", "-rm", "sh", "-c", script]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert holder.stdout is not None
        if holder.stdout.readline() == "ready\n":
            around = ("nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials", "--")
            try:
                yield SmallDisk(place, Path(f"/proc/{holder.pid}/root{place}"), around)
            finally:
                holder.kill()
                holder.wait()
            return
        holder.wait()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]).returncode:
        yield None
        return
    try:
        yield SmallDisk(place, place, ())
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)

"""What is looked at before several ranks train together: programs, clocks, memory, the run folder, and the links.

Every rank reports, the first one judges and tells all of them; together that takes well under a second.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.cuda import nccl

from fewstep import __version__
from fewstep.checkpoint.run_folder import SEEN
from fewstep.engines.links import Links, measure
from fewstep.engines.mesh import Mesh, RankError
from fewstep.errors import UserError, UserErrors, named

GIB = 2**30
MOST_SKEW_S = 1.0
SEEN_WITHIN_S = 5.0
"""How long a shared file system may take until all machines see a new file."""
ROUNDS = 3


@dataclass(frozen=True)
class Needs:
    """What a run asks of its ranks. same: what must be equal on all of them beside the programs, by name. memory:
    bytes of weights, gradients and moments on each. folder: where the run is written, or None."""

    same: Mapping[str, str] = field(default_factory=dict)
    memory: int = 0
    folder: Path | None = None


@dataclass(frozen=True)
class Health:
    """What was found. line: in one sentence."""

    line: str
    warnings: tuple[str, ...] = ()


def examine(mesh: Mesh, device: torch.device, needs: Needs) -> Health:
    """Looks at the ranks; each of them calls this.

    Raises UserErrors on rank 0 that name the ranks that differ, lack memory or do not see the run folder; on the others
    RankError.
    """
    began = time.monotonic()
    with token(mesh, needs.folder) as sees:
        report: dict[str, Any] = {
            "name": str(mesh.ranks),
            "same": versions() | dict(needs.same),
            "free": free_memory(device, mesh.ranks.local),
            "device": kind_of(device),
            "sees": sees,
        }
        report["late_s"] = lateness(mesh)
        links = measure(mesh, device)
        report["shift_s"] = links.shift_s
        reports = [json.loads(text) for text in mesh.heard(json.dumps(report))]
    found = judged(reports, needs, links) if mesh.ranks.first else ([], [], "")
    errors, warnings, line = json.loads(mesh.told(json.dumps(found)))
    if errors and mesh.ranks.first:
        raise UserErrors(errors)
    if errors:
        raise RankError(f"{mesh.ranks} stops: the ranks cannot train together, for what rank 0 says")
    return Health(f"{line}; looked at in {time.monotonic() - began:.2f} s", tuple(warnings))


def judged(reports: list[dict[str, Any]], needs: Needs, links: Links) -> tuple[list[str], list[str], str]:
    """Errors, warnings, and the whole in one line."""
    errors = [*unlike(reports), *blind(reports, needs), *short_of_memory(reports, needs)]
    warnings = [*mixed(reports), *late(reports), *tight(reports, needs), *links.complaints(reports)]
    hosts = Counter(report["name"].rpartition(" on ")[2] for report in reports)
    skew = max(abs(report["late_s"]) for report in reports)
    free = min(report["free"] for report in reports) / GIB
    line = (
        f"{len(reports)} ranks on {len(hosts)} machine{'s' * (len(hosts) > 1)}: same programs, clocks within "
        f"{1000 * skew:.0f} ms, {free:.1f} GiB free on each, {links}"
    )
    return errors, warnings, line


def unlike(reports: list[dict[str, Any]]) -> Iterator[str]:
    """What is not the same on all ranks, and who differs from most."""
    names = dict.fromkeys(name for report in reports for name in report["same"])
    for name in names:
        values = [report["same"].get(name, "missing") for report in reports]
        usual = Counter(values).most_common(1)[0][0]
        odd = [f"{report['name']} has {value}" for report, value in zip(reports, values, strict=True) if value != usual]
        if odd:
            yield f"{name} differs between the ranks: most have {usual}, {some(odd)}; make it the same everywhere"


def blind(reports: list[dict[str, Any]], needs: Needs) -> Iterator[str]:
    """Ranks that do not see what rank 0 wrote into the run folder."""
    odd = [report["name"] for report in reports if not report["sees"]]
    if odd:
        yield (
            f"{needs.folder}: the run needs a shared folder, and {some(odd)} does not see what rank 0 writes there; "
            "name one that all machines share, by its whole path (--run)"
        )


def short_of_memory(reports: list[dict[str, Any]], needs: Needs) -> Iterator[str]:
    """Ranks on which weights, gradients and moments alone do not fit."""
    odd = [f"{r['name']} has {r['free'] / GIB:.1f} GiB free" for r in reports if r["free"] < needs.memory]
    if odd:
        yield (
            f"memory: weights, gradients and moments take {needs.memory / GIB:.1f} GiB on each rank, {some(odd)}; end "
            "what else runs there, take more ranks, or smaller networks"
        )


def tight(reports: list[dict[str, Any]], needs: Needs) -> Iterator[str]:
    """Ranks on which little is left for activations."""
    odd = [
        f"{r['name']} has {r['free'] / GIB:.1f} GiB free"
        for r in reports
        if needs.memory <= r["free"] < 1.2 * needs.memory
    ]
    if odd:
        yield (
            f"memory: weights, gradients and moments take {needs.memory / GIB:.1f} GiB on each rank, {some(odd)}: "
            "little is left for activations; engine.recompute=true or a smaller engine.micro_batch needs less"
        )


def mixed(reports: list[dict[str, Any]]) -> Iterator[str]:
    kinds = Counter(report["device"] for report in reports)
    if len(kinds) > 1:
        yield f"the ranks run on different devices ({', '.join(kinds)}): the slowest sets the pace"


def late(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Clocks that would put the lines of logs in a wrong order."""
    odd = [f"that of {r['name']} by {r['late_s']:+.1f} s" for r in reports if abs(r["late_s"]) > MOST_SKEW_S]
    if odd:
        yield f"clocks differ from that of rank 0, {some(odd)}: logs of several machines do not compare; set up NTP"


def some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def versions() -> dict[str, str]:
    """Of the programs that must be the same on all ranks."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "fewstep": __version__}
    if torch.cuda.is_available():
        found |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, nccl.version()))}
        driver = Path("/proc/driver/nvidia/version")
        number = re.search(r"\s(\d+\.\d+(\.\d+)*)\s", driver.read_text()) if driver.is_file() else None
        found |= {"the NVIDIA driver": number[1]} if number else {}
    return found


def free_memory(device: torch.device, local: int) -> int:
    """Bytes that this rank can have: of its GPU, or its share of the host's memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo, sharers = Path("/proc/meminfo"), int(os.environ.get("LOCAL_WORLD_SIZE", local + 1))
    if not meminfo.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // sharers
    available = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    return int(available[1]) * 1024 // sharers if available else 0


def kind_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def lateness(mesh: Mesh) -> float:
    """By how many seconds this rank's clock is ahead of rank 0's; what the message took is in it, some milliseconds."""
    found = []
    for _ in range(ROUNDS):
        mesh.any(False)  # all wait for the message when it is sent
        sent = float(mesh.told(repr(time.time())))
        found.append(time.time() - sent)
    return 0.0 if mesh.ranks.first else min(found, key=abs)


@contextmanager
def token(mesh: Mesh, folder: Path | None) -> Iterator[bool]:
    """Whether this rank reads what rank 0 has just written into ``folder``; it is there inside the block only."""
    if folder is None:
        yield True
        return
    name = f"{SEEN}{secrets.token_hex(8)}" if mesh.ranks.first else ""
    if mesh.ranks.first:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{SEEN}*"):
            left.unlink(missing_ok=True)
        with named(folder):
            (folder / name).write_text(name)
    file = folder / mesh.told(name)
    try:
        yield appears(file)
    finally:
        if mesh.ranks.first:
            file.unlink(missing_ok=True)


def appears(file: Path) -> bool:
    until = time.monotonic() + SEEN_WITHIN_S
    while True:
        try:
            return file.read_text() == file.name
        except OSError:
            if time.monotonic() > until:
                return False
            time.sleep(0.1)


def refuse_full_disk(folder: Path, checkpoint: int, keep: int) -> str | None:
    """Raises UserError if the disk of ``folder`` has no room for one checkpoint of so many bytes; returns a warning if
    it has none for those that are kept and the next one."""
    here = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free, there = shutil.disk_usage(here).free, len(list(folder.glob("checkpoints/iteration-*")))
    sizes = f"a checkpoint takes {checkpoint / GIB:.3g} GiB, {free / GIB:.3g} GiB are free"
    if free < checkpoint:
        raise UserError(f"{folder}: {sizes}; make room, or name another folder by --run")
    missing = max(keep + 1 - there, 1)
    if free < missing * checkpoint:
        return (
            f"{folder}: {sizes}, and {keep} are kept while another is written; make room, or lower checkpoint.keep_last"
        )
    return None

"""How fast the ranks talk to each other: measured in a moment, and held against what the links could do."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fewstep.engines.mesh import Mesh

BYTES = {"cuda": 64 * 2**20, "cpu": 2 * 2**20}
"""Of the tensor that is summed."""
REPEATS = 3
SLOW = 4.0
"""So many times as long as most ranks take for a message makes a rank slow."""
FAR_BELOW = 0.1
"""Share of a link's peak below which something is wrong; messages of this size do not reach the peak itself."""
NVLINK_GB_S = {"B300": 900, "B200": 900, "H200": 450, "H100": 450, "H800": 200, "A100": 300, "A800": 200}
"""One direction of all links of one GPU, by name."""


@dataclass(frozen=True)
class Links:
    """gb_s: bus bandwidth of a sum over all ranks, 1e9 bytes a second, 2 (n - 1) / n of the bytes over the time.
    peak_gb_s: of the link that bounds it, None where that is not known. shift_s: what this rank took to hand a message
    on."""

    gb_s: float
    shift_s: float
    peak_gb_s: float | None
    link: str

    def __str__(self) -> str:
        of = f" of at most {self.peak_gb_s:.3g} ({self.link})" if self.peak_gb_s else ""
        return f"sums at {self.gb_s:.3g} GB/s{of}"

    def complaints(self, reports: list[dict[str, Any]]) -> Iterator[str]:
        """What is wrong with the speed, by what all ranks report."""
        if self.peak_gb_s and self.gb_s < FAR_BELOW * self.peak_gb_s:
            yield (
                f"the ranks sum at {self.gb_s:.3g} GB/s, far below the {self.peak_gb_s:.3g} of {self.link}; "
                "NCCL_DEBUG=INFO says which way they talk"
            )
        usual = statistics.median(report["shift_s"] for report in reports)
        slow = [r for r in reports if len(reports) > 2 and r["shift_s"] > max(SLOW * usual, 0.01)]
        if slow:
            names = ", ".join(f"{r['name']} ({1000 * r['shift_s']:.1f} ms)" for r in slow[:4])
            yield f"slow links: a message takes {1000 * usual:.1f} ms between most neighbours, more from {names}"


def measure(mesh: Mesh, device: torch.device) -> Links:
    """The best of a few sums over all ranks, and of a few messages from each to the next. Every rank calls this."""
    kind = device.type
    values = torch.ones(BYTES[kind] // 4, device=device)
    world, rank = mesh.ranks.world, mesh.ranks.rank
    total_s = min(timed(lambda: dist.all_reduce(values), device) for _ in range(1 + REPEATS))
    part, came = values[: len(values) // 4], torch.empty_like(values[: len(values) // 4])

    def shift() -> None:
        ways = [dist.P2POp(dist.isend, part, (rank + 1) % world), dist.P2POp(dist.irecv, came, (rank - 1) % world)]
        for work in dist.batch_isend_irecv(ways):
            work.wait()

    shift_s = min(timed(shift, device) for _ in range(1 + REPEATS))
    peak, link = peak_of(device, several_machines(mesh))
    return Links(2 * (world - 1) / world * values.nbytes / total_s / 1e9, shift_s, peak, link)


def timed(work: Any, device: torch.device) -> float:
    """Seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def several_machines(mesh: Mesh) -> bool:
    """Whether some rank's machine is not that of another, as far as their local numbers tell."""
    return mesh.any(mesh.ranks.local != mesh.ranks.rank)


def peak_of(device: torch.device, several: bool) -> tuple[float | None, str]:
    """1e9 bytes a second of the link that bounds a sum, and its name: between machines of their network, inside one of
    NVLink. (None, "") where it is not known."""
    if several:
        rate = network_gb_s()
        return (rate, "the network") if rate else (None, "")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    found = [rate for kind, rate in NVLINK_GB_S.items() if kind in name and "PCIe" not in name]
    return (float(found[0]), f"NVLink of {name}") if found else (None, "")


def network_gb_s(root: Path = Path("/sys/class")) -> float | None:
    """Of the fastest InfiniBand or RoCE adapter, else of the fastest network card that is up."""
    rates = [float(found[1]) for file in root.glob("infiniband/*/ports/*/rate") if (found := first_number(file))]
    speeds = [float(found[1]) / 1000 for file in root.glob("net/*/speed") if (found := first_number(file))]
    gbit = max(rates or speeds, default=0.0)
    return gbit / 8 if gbit > 0 else None


def first_number(file: Path) -> re.Match[str] | None:
    try:
        return re.match(r"(\d+(?:\.\d+)?)", file.read_text())
    except OSError:  # of a card that is down
        return None

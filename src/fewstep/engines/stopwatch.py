"""How long each kind of phase takes, and how much memory there is of what: numbers for the log, taken without making
the device wait."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

MIB = 2**20


class Stopwatch:
    """Laps, one after the other, each of a kind. On a GPU they are times of its stream, between events that are read
    together when somebody asks; the host never waits in between."""

    def __init__(self, device: torch.device):
        self.device = device
        self._marks: list[tuple[str | None, Any]] = []
        self.iterations = 0
        """Ended since the last reading."""

    def lap(self, kind: str | None) -> None:
        """The lap before ends here, and one of ``kind`` begins; None: until the next one, nothing is timed."""
        if self.device.type == "cuda":
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self.device))
        else:
            mark = time.perf_counter()
        self._marks.append((kind, mark))

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Inside, a lap of ``kind``; afterwards nothing is timed."""
        self.lap(kind)
        try:
            yield
        finally:
            self.lap(None)

    def read(self) -> dict[str, float]:
        """Seconds of each kind for an iteration, a mean since the last reading.

        On a GPU this waits for the last lap.
        """
        marks, iterations = self._marks, max(self.iterations, 1)
        self._marks, self.iterations = [], 0
        if self.device.type == "cuda" and marks:
            marks[-1][1].synchronize()
        found: dict[str, float] = {}
        for (kind, begin), (_, end) in pairwise(marks):
            if kind is not None:
                took_s = begin.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - begin
                found[kind] = found.get(kind, 0.0) + took_s / iterations
        return found


def phase_times(watch: Stopwatch) -> dict[str, float]:
    """What the watch has read, as metrics."""
    return {f"phase/time_s.{kind}": seconds for kind, seconds in watch.read().items()}


def memory(device: torch.device) -> dict[str, float]:
    """What the device holds and held at most, in MiB: tensors on a GPU; on a CPU the process, whose most alone is
    known."""
    if device.type == "cuda":
        now, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return {"memory/allocated_mib": now / MIB, "memory/peak_mib": peak / MIB}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory/peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB}


def memory_of_roles(
    roles: Mapping[str, Any], optimizers: Mapping[str, Any], ema: Any | None = None
) -> dict[str, float]:
    """Of every role on this rank, in MiB: its weights, and of a trained one the moments and, for the student, the
    average. A role that is another one seen differently has none of its own."""
    owners = {id(role.network): name for name, role in reversed(list(roles.items()))}
    found = {
        f"{name}/weights_mib": mib(role.network.parameters())
        for name, role in roles.items()
        if owners[id(role.network)] == name
    }
    found |= {f"{name}/optimizer_mib": mib(one.state().values()) for name, one in optimizers.items()}
    return found | ({"student/ema_mib": mib(ema.state().values())} if ema is not None else {})


def mib(tensors: Any) -> float:
    """Of the parts of the tensors that are on this rank."""
    return sum(_local(tensor).numel() * tensor.element_size() for tensor in tensors) / MIB


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor

"""What ranks send each other: parts of weights and gradients (FSDP2), copies of them (HSDP), tokens of a clip.

Transfers run beside the computation, and count where they take longer than it. Rates are those of the makers, less what
NCCL leaves; of the coefficients here none was fitted, since few runs of several GPUs are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fewstep.costs.states import Counts
from fewstep.costs.trace import PhaseCost, Sized
from fewstep.costs.work import Work
from fewstep.devices import DeviceKind

REACHED = 0.7
"""Share of a link's rate that collectives reach: 315 GB/s of 450 were measured between two H200."""
STEP_S = {"host": 4e-6, "network": 15e-6}
"""Of one step of a ring inside a host, and between hosts."""
COLLECTIVE_KERNELS = 6
"""Kernels that the host launches around a collective of FSDP2: copies in and out, and events."""


@dataclass(frozen=True)
class Links:
    """What connects ``shards`` ranks that hold all weights together, ``replicas`` of such groups, and ``sequence``
    ranks that share a clip; host_gpus GPUs of a host stand beside each other."""

    kind: DeviceKind
    host_gpus: int
    shards: int
    replicas: int = 1
    sequence: int = 1

    def gather_s(self, num_bytes: float) -> float:
        """Until every rank has all of what each has a part of; as long for the sum of what each has whole."""
        if self.shards == 1:
            return 0.0
        hosts = -(-self.shards // self.host_gpus)
        here = min(self.shards, self.host_gpus)
        inside = num_bytes * (self.shards - 1) / self.shards / (self.kind.nvlink_bytes_per_s * REACHED)
        between = num_bytes * (hosts - 1) / hosts / (self.kind.network_bytes_per_s * here * REACHED)
        return max(inside, between) + (here - 1) * STEP_S["host"] + (hosts - 1) * STEP_S["network"]

    def agree_s(self, num_bytes: float) -> float:
        """Until the replicas have the sum of a part of the gradients."""
        if self.replicas == 1:
            return 0.0
        share = 2 * (self.replicas - 1) / self.replicas
        inside = self.shards * self.replicas <= self.host_gpus
        rate = self.kind.nvlink_bytes_per_s if inside else self.kind.network_bytes_per_s
        step = STEP_S["host" if inside else "network"]
        return share * num_bytes / (rate * REACHED) + 2 * (self.replicas - 1) * step

    def exchange_s(self, num_bytes: float) -> float:
        """Until each of the ranks that share a clip has sent its part of something to all others."""
        if self.sequence == 1:
            return 0.0
        share = (self.sequence - 1) / self.sequence**2
        return share * num_bytes / (self.kind.nvlink_bytes_per_s * REACHED) + self.sequence * STEP_S["host"]

    def launches(self, works: Mapping[Work, float]) -> float:
        """Seconds of the host for the collectives of the works, by a kernel's five microseconds."""
        if self.shards == 1:
            return 0.0
        return 5e-6 * COLLECTIVE_KERNELS * sum(count for work, count in works.items() if work.kind != "outside")

    def seconds(
        self, cost: PhaseCost, counts: Mapping[str, Counts], sizes: Mapping[str, Sized], rows: int, once: bool
    ) -> float:
        """Of one piece of the phase. once: weights were gathered before it."""
        total = 0.0
        for work, count in cost.works.items():
            if work.kind == "outside":
                continue
            block, trained = counts[work.role].block, sizes[work.role].trained
            total += 0.0 if once else count * self.gather_s((4 if trained else 2) * block)
            if work.backward and work.weights:
                total += count * (self.gather_s(4 * block) + self.agree_s(4 * block / self.shards))
            if work.kind == "block":
                total += count * self.exchange_s(self._tokens(work) * rows)
        return total

    def _tokens(self, work: Work) -> float:
        """Queries, keys, values and what attention makes of them, in bfloat16."""
        shape: Any = work.shape
        return 4 * 2.0 * work.rows * work.tokens * shape.dim

"""How long counted work takes on one GPU: a roofline whose few coefficients were fitted to measured runs.

A phase takes as long as the GPU is busy, or as the host needs to launch its kernels, whichever is longer. Coefficients
and the errors on runs that they were not fitted to: ``bench/calibrate_plan.py``, docs/scaling.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files

import torch

from fewstep.costs.trace import PhaseCost
from fewstep.costs.work import Work, attention_flops, io_bytes, kernels, matmul_flops, traffic
from fewstep.devices import DeviceKind


@dataclass(frozen=True)
class Coefficients:
    """Fitted; shares are of the device's peak."""

    matmul: float
    """Share that large matrix products reach."""
    half_tokens: float
    """Tokens at which matrix products and attention reach half of what they reach with many."""
    attention: float
    """Share that attention without a mask reaches, forward."""
    masked_attention: float
    """The same with a mask."""
    backward_attention: float
    """Rate of the backward pass of attention, relative to the forward pass."""
    memory: float
    """Share of the memory's rate that elementwise work reaches."""
    launch_s: float
    """Of the host, for a kernel."""
    joined: float
    """Share of the memory inside a block that compiled blocks need."""


@cache
def coefficients() -> Coefficients:
    """Those that come with fewstep."""
    found = json.loads(files("fewstep.costs").joinpath("coefficients.json").read_text())
    return Coefficients(**{field.name: found[field.name] for field in fields(Coefficients)})


@dataclass(frozen=True)
class Machine:
    """One GPU, and how networks run on it. graphs: replayed, so that the host launches nothing. sequence: ranks that
    share the tokens of a clip."""

    kind: DeviceKind
    fitted: Coefficients
    precision: torch.dtype = torch.bfloat16
    graphs: bool = False
    sequence: int = 1

    @property
    def flops_per_s(self) -> float:
        """At the peak."""
        return self.kind.bf16_flops_per_s if self.precision == torch.bfloat16 else self.kind.fp32_flops_per_s

    def busy_s(self, work: Work) -> float:
        """How long the GPU computes."""
        work = self._share(work)
        return self.matmul_s(work) + self.attention_s(work) + traffic(work) / self._bytes_per_s

    def matmul_s(self, work: Work) -> float:
        """Of it, matrix products: operations, or the reading and writing of their inputs and outputs."""
        return max(matmul_flops(work) / (self._filled(work) * self.fitted.matmul), io_bytes(work) / self._bytes_per_s)

    def attention_s(self, work: Work) -> float:
        """Of it, attention."""
        fitted = self.fitted
        share = fitted.masked_attention if work.masked else fitted.attention
        share *= fitted.backward_attention if work.backward else 1.0
        return attention_flops(work) / (self._filled(work) * share)

    def host_s(self, work: Work) -> float:
        """How long the host launches kernels, which does not depend on the rows."""
        return 0.0 if self.graphs else kernels(work) * self.fitted.launch_s

    def _filled(self, work: Work) -> float:
        """The peak, as far as so many tokens can fill the GPU."""
        tokens = work.rows * max(work.tokens, 1)
        return self.flops_per_s * tokens / (tokens + self.fitted.half_tokens)

    @property
    def _bytes_per_s(self) -> float:
        return self.kind.memory_bytes_per_s * self.fitted.memory

    def _share(self, work: Work) -> Work:
        if self.sequence == 1 or work.kind == "told":
            return work
        share = 1 / self.sequence
        return replace(work, tokens=work.tokens * share, keys=work.keys * share, pairs=work.pairs * share)  # type: ignore[arg-type]


def seconds(works: Mapping[Work, float], machine: Machine, rows: int = 1) -> tuple[float, float]:
    """How long the GPU computes, and how long the host launches, for so many rows at once."""
    busy = sum(machine.busy_s(work.of_rows(rows)) * count for work, count in works.items())
    return busy, sum(machine.host_s(work) * count for work, count in works.items())


PHASE_KERNELS = {False: 60, True: 250}
"""Kernels of a phase outside the networks, by whether it trains: batches, losses, and of training the norm, the update
and the counters."""
DRAW_KERNELS = 46
"""Of a tensor of random numbers."""
KERNEL_S = 3e-6
"""Of the GPU, for a kernel that has next to nothing to do."""
UPDATE_BYTES = {"student": 64, "other": 40}
"""Bytes that an update moves for each parameter: gradient norm, clipping, AdamW and, for the student, its average."""


def own_kernels(cost: PhaseCost) -> float:
    """Of a phase, outside the networks."""
    return PHASE_KERNELS[bool(cost.trains)] + DRAW_KERNELS * cost.draws

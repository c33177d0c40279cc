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
    """One GPU, and how networks run on it. sequence: ranks that share the tokens of a clip."""

    kind: DeviceKind
    fitted: Coefficients
    precision: torch.dtype = torch.bfloat16
    compile: str | None = None
    sequence: int = 1

    @property
    def flops_per_s(self) -> float:
        """At the peak."""
        return self.kind.bf16_flops_per_s if self.precision == torch.bfloat16 else self.kind.fp32_flops_per_s

    def busy_s(self, work: Work) -> float:
        """How long the GPU computes."""
        work = self._share(work)
        fitted, tokens = self.fitted, work.rows * max(work.tokens, 1)
        filled = self.flops_per_s * tokens / (tokens + fitted.half_tokens)
        rate = self.kind.memory_bytes_per_s * fitted.memory
        seconds = max(matmul_flops(work) / (filled * fitted.matmul), io_bytes(work) / rate)
        attention = fitted.masked_attention if work.masked else fitted.attention
        attention *= fitted.backward_attention if work.backward else 1.0
        return seconds + attention_flops(work) / (filled * attention) + traffic(work, compiled=self._compiled) / rate

    def host_s(self, work: Work) -> float:
        """How long the host launches kernels, which does not depend on the rows."""
        if self.compile == "graphs":
            return 0.0
        return kernels(work, compiled=self._compiled) * self.fitted.launch_s

    @property
    def _compiled(self) -> bool:
        return self.compile is not None

    def _share(self, work: Work) -> Work:
        if self.sequence == 1 or work.kind == "told":
            return work
        share = 1 / self.sequence
        return replace(work, tokens=work.tokens * share, keys=work.keys * share, pairs=work.pairs * share)  # type: ignore[arg-type]


def seconds(works: Mapping[Work, float], machine: Machine, rows: int = 1) -> tuple[float, float]:
    """How long the GPU computes, and how long the host launches, for so many rows at once."""
    busy = sum(machine.busy_s(work.of_rows(rows)) * count for work, count in works.items())
    return busy, sum(machine.host_s(work) * count for work, count in works.items())


PHASE_KERNELS = {False: 150, True: 300}
"""Kernels of a phase outside the networks, by whether it trains: noise, losses, and of training the norm and the
update."""
UPDATE_BYTES = {"student": 64, "other": 40}
"""Bytes that an update moves for each parameter: gradient norm, clipping, AdamW and, for the student, its average."""

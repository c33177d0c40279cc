"""The contract of an engine: it runs the phases that a method declares, on roles, records and batches.

An engine decides where a role lives, how its weights are kept, and how a record gets from one role to another; the
method decides everything else.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from pydantic import Field
from torch import Tensor

from fewstep.section import Section


class EngineSection(Section):
    """Where and how the phases run; nothing here changes what is learnt beyond rounding."""

    name: Literal["process"] = "process"
    """``process``: this one process."""
    device: str = "auto"
    """``auto`` takes the GPU where there is one; else ``cpu``, ``cuda``, ``cuda:1``."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """What the networks compute in; ``auto`` is bfloat16 on a GPU, else float32. Trained weights stay float32."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Most rows that run at once; the batch is cut into pieces of this size, with the same result."""
    compile: bool = False
    """Compile every block of the networks (GPU; the first iterations are slow)."""


@runtime_checkable
class Engine(Protocol):
    """Runs iterations and holds all state that a checkpoint must keep."""

    def run(self, iteration: int) -> dict[str, Tensor]:
        """All phases of one iteration; returns its metrics as 0-dim tensors, not yet fetched from the device."""
        ...

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Groups of tensors (``student``, ``student.optimizer``, ``ema``, ...); :meth:`load` goes on from them."""
        ...

    def load(self, state: dict[str, dict[str, Tensor]]) -> None: ...

"""The contract of an engine: it runs the phases that a method declares, on roles, records and batches.

An engine decides where a role lives, how its weights are kept, and how a record gets from one role to another; the
method decides everything else.
"""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from pydantic import Field, model_validator
from torch import Tensor

from fewstep.section import Section


class EngineSection(Section):
    """Where and how the phases run; nothing here changes what is learnt beyond rounding."""

    name: Literal["process"] = "process"
    """``process``: this one process; or all those that torchrun started, each of which holds a part of every role and
    trains on its rows of every batch."""
    device: str = "auto"
    """``auto`` takes the GPU where there is one, each process of a machine its own; else ``cpu``, ``cuda``, and for one
    process ``cuda:1``."""
    replicas: int = Field(default=1, ge=1)
    """Groups of processes that each hold all weights; 1 cuts every weight over all processes. With more, weights are
    gathered inside a group alone (a machine, say), at the price of as many times the memory. It must divide the number
    of processes."""
    sequence: int = Field(default=1, ge=1)
    """Processes that share the rows of a batch, and divide the tokens of every frame among them: for clips whose
    activations one GPU cannot hold. It must divide the number of processes, heads, and tokens of a frame."""
    gather_once: bool = True
    """Whether several processes gather the weights of a network once for a whole rollout, or validation, and keep them
    until its end: much less traffic, for the memory of one network. Else each call gathers them block by block."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long a process waits for the others before the run ends with an error that names the one that is missing."""
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """What the networks compute in; ``auto`` is bfloat16 on a GPU, else float32. Trained weights stay float32."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Most rows that run at once; the batch is cut into pieces of this size, with the same result."""
    recompute: bool = False
    """Whether a backward pass computes every block of a network again instead of keeping what is inside: much less
    memory for a third more time."""
    offload: bool = False
    """Whether what a phase does not use, weights of other roles, moments, the average, waits in the host's memory:
    less memory of the GPU, for the time that copies take."""
    compile: Literal["blocks", "graphs"] | None = None
    """``blocks`` compiles block by block, for large networks; ``graphs`` whole networks, replayed as CUDA graphs, for
    small ones. The first iterations take minutes."""

    @model_validator(mode="after")
    def _graphs_take_whole_batches(self) -> EngineSection:
        if self.compile == "graphs" and self.micro_batch is not None:
            raise ValueError(
                "'compile: graphs' runs whole batches; leave out 'micro_batch', or write 'compile: blocks'"
            )
        return self

    @model_validator(mode="after")
    def _graphs_keep_addresses(self) -> EngineSection:
        if self.compile == "graphs" and self.offload:
            raise ValueError(
                "'compile: graphs' needs weights that stay where they are; leave out 'offload', or write "
                "'compile: blocks'"
            )
        return self


@runtime_checkable
class Engine(Protocol):
    """Runs iterations and holds all state that a checkpoint must keep."""

    def run(self, iteration: int) -> dict[str, Tensor]:
        """All phases of one iteration; returns its metrics as 0-dim tensors, not yet fetched from the device."""
        ...

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Groups of tensors (``student``, ``student.optimizer``, ``ema``, ..., and ``carry.0``, ... where rollouts go
        on); :meth:`load` goes on from them."""
        ...

    def load(self, state: dict[str, dict[str, Tensor]]) -> None: ...

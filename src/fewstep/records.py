"""What passes from phase to phase: frozen dataclasses of detached tensors with the sample axis first.

A conditioning record of a model family obeys the same rule (every tensor leaf has the sample axis first), so that any
record can be cut into micro-batches, moved and joined by the functions at the foot without knowing what it holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from fewstep.shapes import Keys, Latents, PerSample, Sigma

R = TypeVar("R")


@dataclass(frozen=True)
class Trajectory:
    """A teacher's path from noise to data: ``states`` at the k noise levels of the student's ladder, and the
    ``endpoint`` at noise level 0. ``key`` is the trajectory's number in its collection, which names its noise."""

    key: Keys
    states: Float[Tensor, "b k f c h w"]
    endpoint: Latents


@dataclass(frozen=True)
class Batch:
    """Rows of the data. ``x0`` is None for text-only data, ``uncond`` None where no guidance is possible,
    ``trajectory`` None where no teacher was run beforehand."""

    key: Keys
    x0: Latents | None
    cond: Any
    uncond: Any | None
    trajectory: Trajectory | None = None


@dataclass(frozen=True)
class Rollout:
    """The student's samples, stopped on the way: ``stop`` is the index into the ladder, ``x_stop`` the state there, at
    noise level ``sigma_stop``, and ``x0`` the student's prediction. The first ``given`` frames are not the student's:
    they were handed to it, clean. Teacher and critic see the first ``clean`` of them clean too; the others, which a
    chunk of a stream has from the one before it, are noised there like the student's.

    Of causal students: ``history`` is the frames as later blocks saw them, where that was not ``x0``. ``windows`` says
    how many blocks were denoised together, window after window, where it was not one by one."""

    key: Keys
    stop: int
    x_stop: Latents
    sigma_stop: Sigma
    x0: Latents
    given: int = 0
    clean: int = 0
    history: Latents | None = None
    windows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scores:
    """``gradient`` is numel x d loss / d x0 of each sample, in float32 (numel: elements of one sample), so that a
    distribution-matching gradient enters unchanged; ``losses`` are values for the log, one a sample."""

    key: Keys
    gradient: Latents
    losses: dict[str, PerSample]


@dataclass(frozen=True)
class Pair:
    """Two neighbours on a path of the teacher: ``x_t`` at noise level ``sigma``, one step on ``x_next`` at
    ``sigma_next``."""

    key: Keys
    x_t: Latents
    sigma: Sigma
    x_next: Latents
    sigma_next: Sigma


@dataclass(frozen=True)
class Target:
    """The clean latents that the student is to predict."""

    key: Keys
    x0: Latents


def map_tensors(function: Callable[[Tensor], Tensor], record: R) -> R:
    """The record with ``function`` applied to every tensor leaf (dataclasses, dicts, tuples and lists are entered)."""
    if isinstance(record, Tensor):
        return function(record)  # type: ignore[return-value]
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        fields = {f.name: map_tensors(function, getattr(record, f.name)) for f in dataclasses.fields(record)}
        return dataclasses.replace(record, **fields)
    if isinstance(record, dict):
        return {name: map_tensors(function, value) for name, value in record.items()}  # type: ignore[return-value]
    if isinstance(record, tuple) and hasattr(record, "_fields"):
        return type(record)(*(map_tensors(function, value) for value in record))
    if isinstance(record, (tuple, list)):
        return type(record)(map_tensors(function, value) for value in record)  # type: ignore[call-arg]
    return record


def leaves(record: Any) -> list[Tensor]:
    """Every tensor of the record, in field order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, record)
    return found


def rows(record: R, index: slice | Tensor) -> R:
    """The rows of the record that ``index`` names."""
    return map_tensors(lambda tensor: tensor[index], record)


def concat(records: Sequence[R]) -> R:
    """The records of several micro-batches as one, rows in the order given."""
    columns = [iter(leaves(record)) for record in records]
    return map_tensors(lambda _: torch.cat([next(column) for column in columns]), records[0])


def select(mask: Tensor, there: R, elsewhere: R) -> R:
    """Row by row, ``there`` where ``mask`` ([b], bool) is true, else ``elsewhere``."""
    others = iter(leaves(elsewhere))

    def pick(tensor: Tensor) -> Tensor:
        wide = mask.view(-1, *[1] * (tensor.ndim - 1))
        return torch.where(wide, tensor, next(others))

    return map_tensors(pick, there)


def assert_detached(record: Any, name: str) -> None:
    """Raises RuntimeError if a tensor of the record carries a graph: records end gradients, by contract."""
    if any(tensor.requires_grad for tensor in leaves(record)):
        raise RuntimeError(f"the record '{name}' carries a gradient graph; a phase that gives a record must detach it")

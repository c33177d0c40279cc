"""The contract of a training method: it declares phases, an engine runs them.

A method never sees an optimizer, a device or a rank. What passes between phases is a record (``fewstep.records``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from fewstep.models.api import FlowModel
from fewstep.records import Batch, Rollout
from fewstep.rng import Draw
from fewstep.rollout.carry import Carry
from fewstep.shapes import Latents, PerSample


@dataclass(frozen=True)
class Phase:
    """One step of an iteration.

    ``run`` is bound by parameter name: a role (``student``, ``teacher``, ...), a record given by an earlier phase
    (``rollout``), ``batch``, ``draw`` and ``carry``. A phase without ``trains`` runs without gradient and returns the
    record named ``gives``. A training phase returns ``{"role/name": loss of shape [b]}``; the engine takes the mean
    over the global batch, sums the terms, and steps every role in ``trains``.
    """

    name: str
    """Unique in the iteration; names the random streams too."""
    run: Callable[..., Any]
    gives: str | None = None
    trains: tuple[str, ...] = ()
    batch: int = 0
    """Which batch of the iteration the phase and its records belong to."""
    part: tuple[int, int] = (0, 1)
    """(k, K): the phase sees the k-th of K equal parts of the global batch's rows."""
    carries: bool = False
    """Whether the phase returns a pair: the record that it gives, and the ``Carry`` (or None) that all phases of the
    same batch are handed as ``carry`` in the next iteration. It stands in the checkpoint."""


@runtime_checkable
class StudentRollout(Protocol):
    """How the student makes samples in training; the sampler's own steps, stopped on the way."""

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The noise levels that it walks down."""
        ...

    @property
    def stream_chunks(self) -> int:
        """Iterations for which a rollout goes on; where it is 1, there is nothing to carry. A longer one is made by
        ``chunk(student, batch, draw, carry)``, which returns the samples and the carry of the next iteration."""
        ...

    def __call__(self, student: FlowModel, batch: Batch, draw: Draw) -> Rollout:
        """Samples without gradient, stopped at a step that is the same for the whole job."""
        ...

    def again(self, student: FlowModel, rollout: Rollout, batch: Batch, carry: Carry | None = None) -> Latents:
        """The rollout's ``x0`` once more, with gradient; valid while the student's weights have not moved. ``carry`` is
        what the rollout went on from."""
        ...


@runtime_checkable
class Method(Protocol):
    """A training method. ``roles`` are those that must exist, ``trained`` those that own an optimizer.

    Every method class also names its recipe section (``Section``, whose ``name`` is the method's) and is made from it
    by ``of(section, rollout)``.
    """

    roles: tuple[str, ...]
    trained: tuple[str, ...]
    num_batches: int
    """Batches that one iteration reads."""
    row_parts: int
    """The number of equal parts into which a phase cuts the global batch; it must divide the batch."""

    def phases(self, iteration: int) -> Iterator[Phase]:
        """The schedule of one iteration, written once; it changes during a warm-up and not after."""
        ...


def descend(x0: Latents, gradient: Latents) -> PerSample:
    """A loss whose gradient with respect to ``x0`` is ``gradient`` / numel of a sample.

    Taken as a product in float32 (or wider): the value is meaningless, the gradient exact.
    """
    wide = torch.promote_types(x0.dtype, torch.float32)
    return (x0.to(wide) * gradient.to(wide).detach()).flatten(1).mean(1)


def input_gradient(loss_of: Callable[[Latents], PerSample], x0: Latents) -> tuple[Latents, PerSample]:
    """numel x d loss / d x0 of every sample, and the loss of every sample, both detached.

    The one autograd call that a method makes: it ends in a record, and no parameter receives a gradient.
    """
    with torch.enable_grad():
        leaf = x0.detach().requires_grad_()
        loss = loss_of(leaf)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.to(wide) * leaf[0].numel(), loss.detach()

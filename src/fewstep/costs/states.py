"""What the roles keep between iterations: weights, gradients, moments, the average; in bytes, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fewstep.costs.trace import Sized
from fewstep.models.discriminator import Discriminator
from fewstep.models.families import build


@dataclass(frozen=True)
class State:
    """Of one role on one GPU."""

    weights: float
    gradients: float = 0.0
    """There from the backward pass to the update."""
    optimizer: float = 0.0
    ema: float = 0.0

    @property
    def kept(self) -> float:
        """All but the gradients."""
        return self.weights + self.optimizer + self.ema

    def cut(self, shards: int) -> State:
        """One rank's part."""
        return State(*(value / shards for value in (self.weights, self.gradients, self.optimizer, self.ema)))


@dataclass(frozen=True)
class Counts:
    """Parameters of a role's network: all, and those of one block."""

    all: int
    block: int


def counts_of(sizes: Mapping[str, Sized]) -> dict[str, Counts]:
    """Of all roles."""
    found: dict[str, Counts] = {}
    widths: dict[str, int] = {}
    for name, size in sizes.items():
        if size.section is not None:
            network = build(size.section, "meta")
            blocks = sum(p.numel() for p in network.blocks[0].parameters())
            found[name], widths[name] = Counts(sum(p.numel() for p in network.parameters()), blocks), network.width
    for name, size in sizes.items():
        if size.section is None:
            with torch.device("meta"):
                head = Discriminator(widths[size.reads], size.num_features)
            count = sum(p.numel() for p in head.parameters())
            found[name] = Counts(count, count)
    return found


def state_of(name: str, count: int, trained: bool, precision: torch.dtype) -> State:
    """Of a role with so many parameters, whole."""
    master = float(torch.promote_types(precision, torch.float32).itemsize * count)
    if not trained:
        return State(float(precision.itemsize * count))
    return State(master, master, 2 * master, master if name == "student" else 0.0)

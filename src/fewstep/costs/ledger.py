"""What is written down while phases run without computing: the work that was asked for, and the memory that was held.

Memory is what tensors on the meta device would take. They live and die as on a GPU, since the code that makes and
drops them is the same; so copies of histories, what waits for a backward pass and what overlaps are found, not assumed.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fewstep.costs.work import Work


class Held(NamedTuple):
    """Bytes that are there at one moment, for one row.

    activations: what grows with the rows, histories among them. joined: the same inside compiled blocks, by a count
    that a coefficient corrects. cut: gradients, and second sets of weights, which are divided among the ranks. whole:
    copies of weights that every rank has.
    """

    activations: int
    joined: int = 0
    cut: int = 0
    whole: int = 0

    def covers(self, other: Held) -> bool:
        return all(mine >= its for mine, its in zip(self, other, strict=True))


class Ledger(TorchDispatchMode):
    """Inside, meta tensors are counted from their making to their end, in the part of :class:`Held` that ``holding``
    names."""

    def __init__(self) -> None:
        super().__init__()
        self.works: Counter[Work] = Counter()
        self.peaks: list[Held] = []
        """Moments that no other moment covers."""
        self.history = 0
        """Most bytes of histories, two at once where one is copied."""
        self.calls: Counter[str] = Counter()
        """Calls of each role's network."""
        self.draws = 0
        """Tensors of random numbers."""
        self.heads: set[tuple[int, ...]] = set()
        """(heads, width of a head) of the networks, by which keys and values are known."""
        self._now = {"activations": 0, "joined": 0, "cut": 0, "whole": 0, "history": 0}
        self._part = "activations"
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return made

    def begin(self) -> None:
        """Another phase: what is held stays held, peaks and work begin anew."""
        self.works, self.calls, self.peaks, self.history, self.draws = Counter(), Counter(), [], 0, 0

    def add(self, work: Work) -> None:
        self.works[work] += 1

    def hold(self, num_bytes: float, part: str = "activations") -> Tensor:
        """Memory that is held as long as the tensor is."""
        with self.holding(part):
            return torch.empty(math.ceil(num_bytes), dtype=torch.uint8, device="meta")

    @contextmanager
    def holding(self, part: str) -> Iterator[None]:
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def spike(self, num_bytes: float, part: str = "activations") -> None:
        """Memory that is there for a moment, beside what is held."""
        self._now[part] += math.ceil(num_bytes)
        self._look()
        self._now[part] -= math.ceil(num_bytes)

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or tensor.device.type != "meta":
            return
        part, size, now = self._part, storage.nbytes(), self._now
        parts = (part, "history") if tuple(tensor.shape[2:]) in self.heads and part == "activations" else (part,)

        def end(_: Any) -> None:
            self._known.pop(key, None)
            for name in parts:
                now[name] -= size

        self._known[key] = weakref.ref(storage, end)
        for name in parts:
            now[name] += size
        self.history = max(self.history, now["history"])
        self._look()

    def _look(self) -> None:
        here = Held(*(self._now[part] for part in Held._fields))
        if not any(peak.covers(here) for peak in self.peaks):
            self.peaks = [peak for peak in self.peaks if not here.covers(peak)] + [here]

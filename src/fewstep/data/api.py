"""The contract of a data set: pixels and labels by item id; all order and all batching are elsewhere (``order.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Int64, UInt8
from torch import Tensor


@dataclass(frozen=True)
class Items:
    """Rows of a data set: ``pixels`` 0 to 255, ``label`` the index of the class."""

    pixels: UInt8[Tensor, "b f c h w"]
    label: Int64[Tensor, "b"]


class Dataset(Protocol):
    """A data set whose every problem (missing, unreadable, wrong size) was found when it was opened."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int, int]
    """Of one item: frames, channels, height, width."""

    def __len__(self) -> int: ...

    def items(self, ids: Sequence[int]) -> Items:
        """The items ``ids`` in that order, on the CPU."""
        ...

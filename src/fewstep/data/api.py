"""The contract of a data set: pixels and labels by item id; all order and all batching are elsewhere (``order.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from jaxtyping import Float, Int64, UInt8
from pydantic import Field
from torch import Tensor

from fewstep.section import Section
from fewstep.shapes import Latents

Pixels = UInt8[Tensor, "b f c h w"]
"""Brightness of every pixel, 0 black to 255 white. An image has f = 1."""

Labels = Int64[Tensor, "b"]
"""The index of every item's class in ``Dataset.classes``."""

Split = Literal["train", "test"]


class DatasetSection(Section):
    """What every kind of data has in common."""

    batch: int = Field(ge=1)
    """Rows of one batch of the whole run, over all processes and micro-batches together."""
    cache: str = "~/.cache/fewstep"
    """Folder for downloads and decoded images; it may be deleted at any time and is made again when it is needed."""


@dataclass(frozen=True)
class Items:
    """Rows of a data set: ``pixels`` 0 to 255, ``label`` the index of the class."""

    pixels: Pixels
    label: Labels

    def __iter__(self) -> Iterator[Tensor]:
        """What the codec encodes, then what the network is told."""
        return iter((self.pixels, self.label))


@dataclass(frozen=True)
class LatentItems:
    """Rows of a data set that was encoded before: ``latents`` as the VAE gives them, and embeddings of the texts."""

    latents: Latents
    text: Float[Tensor, "b l d"]

    def __iter__(self) -> Iterator[Tensor]:
        """What the codec normalises, then what the network is told."""
        return iter((self.latents, self.text))


@runtime_checkable
class Dataset(Protocol):
    """A data set whose every problem (missing, unreadable, wrong size) was found when it was opened."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; a label is an index into them. Empty where texts take the place of classes."""
        ...

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of one item: frames, channels, height, width."""
        ...

    def __len__(self) -> int: ...

    def items(self, ids: Sequence[int] | Tensor) -> Items:
        """The items ``ids`` (each from 0 to the length of the data set less 1) in that order, on the CPU."""
        ...

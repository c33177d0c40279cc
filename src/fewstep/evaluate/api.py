"""The contract of this folder: what judges samples, and the real data that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

PixelValues = Float[Tensor, "b f c h w"]
"""Decoded pixels in [-1, 1], -1 black."""

Features = Float[Tensor, "b d"]
"""What an extractor sees in an image, float32: the space in which samples and real data are compared."""

Logits = Float[Tensor, "b k"]
"""One number for every class; the largest is the class that the extractor sees."""


@runtime_checkable
class Extractor(Protocol):
    """A frozen network that turns pixels into features. No training ever sees it."""

    @property
    def id(self) -> str:
        """The architecture and a hash of the weights; distances compare only under one id."""
        ...

    @property
    def num_features(self) -> int:
        """The width d of the features."""
        ...

    @property
    def num_classes(self) -> int | None:
        """The number k of classes that ``logits`` tells apart; None where the network has no classes of the data."""
        ...

    def features(self, pixels: PixelValues) -> Features:
        """On the device of ``pixels``, without gradient."""
        ...

    def logits(self, features: Features) -> Logits | None:
        """Of the classes of the data set, in its order; None where the network has none."""
        ...


@runtime_checkable
class LabelledImages(Protocol):
    """A data set as this folder reads it; every ``fewstep.data`` data set is one."""

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of one item: frames, channels, height, width."""
        ...

    def __len__(self) -> int: ...

    def items(self, ids: Sequence[int] | Tensor) -> Any:
        """The items ``ids`` in that order, on the CPU: ``pixels`` uint8 [b f c h w] and ``label`` int64 [b]."""
        ...

"""The contract of this folder: what judges samples, and the real data that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor

PixelValues = Float[Tensor, "b f c h w"]
"""Decoded pixels in [-1, 1], -1 black. An image has f = 1."""

Features = Float[Tensor, "b d"]
"""What an extractor sees in an image or a clip, float32: the space in which samples and real data are compared."""

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
class LabelledClips(Protocol):
    """A data set of images or clips as this folder reads it; every ``fewstep.data`` data set is one."""

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


Positions = Float[Tensor, "b f 2"]
"""Where something is in every frame: (y, x) in pixels from the upper left corner; the middle of the first pixel is at
(0.5, 0.5)."""


@runtime_checkable
class Physics(Protocol):
    """How a square box moves through a square frame and never leaves it, when it moves as its motion says."""

    @property
    def size(self) -> int:
        """Height and width of a frame in pixels."""
        ...

    @property
    def item_size(self) -> int:
        """Height and width of the box in pixels."""
        ...

    @property
    def speed(self) -> float:
        """Pixels that the box's centre moves from frame to frame, walls apart."""
        ...

    def step(self, previous: Positions, current: Positions, motion: Int64[Tensor, "b"]) -> Positions:
        """The centres of the box that follow ``current`` one frame later, where ``previous`` came one frame before."""
        ...


@runtime_checkable
class MovingClips(LabelledClips, Protocol):
    """Clips of one bright item each on black, which moves by known physics.

    A class is called "item, motion", as in "Sneaker, bounce"; the classes are all pairs, the motion fastest.
    """

    @property
    def motion(self) -> Physics: ...

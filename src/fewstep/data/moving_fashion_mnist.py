"""Moving Fashion-MNIST: clips of one item of clothing each, which bounces or circles as ``motion`` says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int64, UInt8
from pydantic import Field, model_validator
from torch import Tensor

from fewstep.data.api import DatasetSection, Items, Labels, Pixels, Split
from fewstep.data.fashion_mnist import FashionMnist, FashionMnistSection
from fewstep.data.motion import MOTIONS, Motion, Path
from fewstep.rng import Draw

_CHUNK = 4096  # frames that are drawn at once, so that long and large clips need little memory

ItemImages = UInt8[Tensor, "b k k"]
"""Items of k x k pixels, 0 black to 255 white."""


class MovingFashionMnistSection(DatasetSection):
    """Clips made from Fashion-MNIST, one for each of its images: every item bounces or circles in a black frame."""

    name: Literal["moving_fashion_mnist"] = "moving_fashion_mnist"
    path: str | None = None
    """Folder with the four idx files of Fashion-MNIST, raw or as .gz; if it is given, no other place is searched."""
    download: bool = False
    """Whether to fetch the files from the authors (30 MB, checked, kept in ``cache``) if there is no other copy."""
    frames: int = Field(ge=1)
    """Frames of a clip."""
    size: int = 16
    """Height and width of a frame in pixels, above ``item_size``."""
    item_size: Literal[4, 8, 16, 32] = 8
    """Height and width of the item in pixels: the image in its black frame of 32 x 32 pixels, averaged down."""
    speed: float = 1.0
    """Pixels that the item moves from frame to frame, above 0 and at most ``size`` - ``item_size``."""

    @model_validator(mode="after")
    def _possible(self) -> MovingFashionMnistSection:
        _ = self.motion
        return self

    @property
    def motion(self) -> Motion:
        """The physics of the clips."""
        return Motion(self.size, self.item_size, self.speed)


class MovingFashionMnist:
    """One split of the clips, drawn when they are asked for; as many as Fashion-MNIST has images.

    Clip i shows image i of the split. Where it starts and in which direction depends on the split and on i alone, not
    on the seed of a run. The images of a class of Fashion-MNIST bounce and circle in turn, so that its two classes here
    are equally frequent. Class ``2 * item + motion`` is called, for instance, "Sneaker, bounce".

    The item stands between pixels, shared among them by bilinear interpolation. So a frame's brightness is the item's,
    and its centre of brightness is ``centres`` plus a constant of the item: where the item's own centre of brightness
    lies in its box. Both hold to the rounding of the pixels.

    Raises UserError if no copy of Fashion-MNIST is found, or if the one found is damaged.
    """

    def __init__(self, section: MovingFashionMnistSection, split: Split = "train"):
        source = FashionMnist(
            FashionMnistSection(
                batch=section.batch, cache=section.cache, path=section.path, download=section.download, size=32
            ),
            split,
        )
        images = source.items(range(len(source)))
        self._images, self._split = _average_down(images.pixels[:, 0, 0], section.item_size), split
        self._labels = 2 * images.label + _alternate(images.label, len(source.classes))
        self.classes = tuple(f"{item}, {motion}" for item in source.classes for motion in MOTIONS)
        self.shape = (section.frames, 1, section.size, section.size)
        self.motion = section.motion
        """The physics of the clips."""

    def __len__(self) -> int:
        return len(self._labels)

    def items(self, ids: Sequence[int] | Tensor) -> Items:
        """The clips ``ids`` in that order."""
        index = torch.as_tensor(ids, dtype=torch.int64)
        return Items(place(self._images[index], self.centres(index), self.motion.size), self._labels[index])

    def centres(self, ids: Sequence[int] | Tensor) -> Path:
        """The true centre of the item's box in every frame of the clips ``ids``, float64, as ``motion`` counts them."""
        index = torch.as_tensor(ids, dtype=torch.int64)
        draw = Draw(0, f"data.moving_fashion_mnist.{self._split}", 0, index)
        start = self.motion.item_size / 2 + self.motion.room * draw.uniform("start", (2,), torch.float64)
        angle = 2 * math.pi * draw.uniform("angle", (), torch.float64)
        return self.motion.path(motion_of(self._labels[index]), start, angle, self.shape[0])


def item_of(label: Labels) -> Labels:
    """The class of Fashion-MNIST that a clip of class ``label`` shows, 0 to 9."""
    return label // len(MOTIONS)


def motion_of(label: Labels) -> Labels:
    """How the item of a clip of class ``label`` moves, an index into ``MOTIONS``."""
    return label % len(MOTIONS)


def place(images: ItemImages, centres: Path, size: int) -> Pixels:
    """Clips of black frames of ``size`` x ``size`` pixels with each item at its ``centres``, bilinear between pixels;
    values are rounded, halves upwards."""
    clips = torch.arange(len(images)).repeat_interleave(centres.shape[1])
    corners = (centres - images.shape[-1] / 2).flatten(0, 1)
    parts = zip(clips.split(_CHUNK), corners.split(_CHUNK), strict=True)
    frames = torch.cat([_place(images[clip], corner, size) for clip, corner in parts])
    return frames.view(*centres.shape[:2], 1, size, size)


def _place(images: ItemImages, corners: Float[Tensor, "b 2"], size: int) -> UInt8[Tensor, "b size size"]:
    """One frame for each image, whose upper left corner is at ``corners``."""
    rows, columns = (_shares(corner, images.shape[-1], size) for corner in corners.unbind(1))
    return (rows @ images.to(corners.dtype) @ columns.mT + 0.5).to(torch.uint8)


def _shares(corner: Float[Tensor, "b"], width: int, size: int) -> Float[Tensor, "b size width"]:
    """What each pixel of a frame takes of each pixel of an item that begins at ``corner``, along one axis."""
    pixel = torch.arange(size, dtype=corner.dtype, device=corner.device)
    part = corner[:, None] + torch.arange(width, dtype=corner.dtype, device=corner.device)
    return (1 - (pixel[:, None] - part[:, None]).abs()).clamp(min=0)


def _average_down(images: UInt8[Tensor, "b 32 32"], size: int) -> ItemImages:
    """The mean of every square of pixels, halves rounded up."""
    factor = 32 // size
    sums = images.reshape(-1, size, factor, size, factor).sum((2, 4), dtype=torch.int32)
    return ((sums + factor**2 // 2) // factor**2).to(torch.uint8)


def _alternate(labels: Labels, num_classes: int) -> Int64[Tensor, "b"]:
    """0, 1, 0, 1, ... along the images of each class."""
    members = torch.nn.functional.one_hot(labels, num_classes)
    rank = members.cumsum(0).gather(1, labels[:, None])[:, 0] - 1
    return rank % len(MOTIONS)

"""Real data and an exact model at tiny size: striped pictures of three classes, and the velocity that fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewstep.data.api import Items
from fewstep.data.motion import Motion
from fewstep.data.moving_fashion_mnist import place
from fewstep.evaluate.extractor import ExtractorSection
from fewstep.models.api import Geometry
from fewstep.models.wan.conditioner import LabelCond

SHAPE = (1, 1, 8, 10)
STD = 0.2


def means() -> Tensor:
    """[3 f c h w] in [-1, 1]: rows, columns, or a corner bright."""
    pictures = torch.full((3, *SHAPE), -0.5)
    pictures[0, :, :, ::3, :] = 0.5
    pictures[1, :, :, :, ::3] = 0.5
    pictures[2, :, :, :4, :5] = 0.5
    return pictures


class Stripes:
    """``num`` pictures of three classes in turn: the mean of the class, and noise of standard deviation 0.2."""

    classes = ("rows", "columns", "corner")
    shape = SHAPE

    def __init__(self, num: int, seed: int):
        noise = torch.randn(num, *SHAPE, generator=torch.Generator().manual_seed(seed))
        self.label = torch.arange(num) % 3
        self.pixels = ((means()[self.label] + STD * noise).clamp(-1, 1) + 1).mul(127.5).round().to(torch.uint8)

    def __len__(self) -> int:
        return len(self.label)

    def items(self, ids: Sequence[int] | Tensor) -> Items:
        index = torch.as_tensor(ids, dtype=torch.int64)
        return Items(self.pixels[index], self.label[index])


@dataclass
class StripesConditioner:
    """Labels, and 3 for "none"."""

    def condition(self, label: Tensor) -> LabelCond:
        return LabelCond(label)

    def null(self, num: int, device: torch.device | str = "cpu") -> LabelCond:
        return LabelCond(torch.full((num,), 3, device=device))


class StripesModel:
    """The expected velocity of the stripes: data N(mean of the class, 0.2^2), without a class N(0, 0.2^2)."""

    geometry = Geometry(channels=1, patch=(1, 1, 1))
    num_layers, width = 0, 1

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        mean = torch.cat([means(), torch.zeros(1, *SHAPE)])[cond.label].to(x_t)
        s = sigma[:, :, None, None, None]
        variance = (1 - s) ** 2 * STD**2 + s**2
        return (s - (1 - s) * STD**2) / variance * (x_t - (1 - s) * mean) - mean

    def features(self, x_t: Tensor, sigma: Tensor, cond: Any, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        return ()


def section(cache: Any, **settings: Any) -> ExtractorSection:
    """A classifier trained for a fraction of a second."""
    return ExtractorSection(**({"cache": str(cache), "updates": 12} | settings))


PHYSICS = Motion(size=16, item_size=4, speed=1.0)
MOVING_SHAPE = (6, 1, 16, 16)


def shapes() -> Tensor:
    """Two items of 4x4 pixels, neither with its centre of brightness in the middle: a corner, and two bars."""
    items = torch.zeros(2, 4, 4, dtype=torch.uint8)
    items[0, :, 0] = items[0, 3] = 250
    items[1, :, 0] = items[1, :, 3] = 200
    items[1, 0] = 120
    return items


class Moving:
    """``num`` clips of two items that bounce or circle, in turn; ``centres`` are those of their boxes."""

    classes = ("corner, bounce", "corner, circle", "bars, bounce", "bars, circle")
    motion = PHYSICS

    def __init__(self, num: int, seed: int, frames: int = MOVING_SHAPE[0]):
        rng = torch.Generator().manual_seed(seed)
        start, angle = 2 + 12 * torch.rand(num, 2, generator=rng), 6.2832 * torch.rand(num, generator=rng)
        self.label = torch.arange(num) % 4
        self.centres = PHYSICS.path(self.label % 2, start, angle, frames)
        self.pixels = place(shapes()[self.label // 2], self.centres, PHYSICS.size)
        self.shape = (frames, *MOVING_SHAPE[1:])

    def __len__(self) -> int:
        return len(self.label)

    def items(self, ids: Sequence[int] | Tensor) -> Items:
        index = torch.as_tensor(ids, dtype=torch.int64)
        return Items(self.pixels[index], self.label[index])

    @property
    def values(self) -> Tensor:
        """The pixels in [-1, 1]."""
        return self.pixels.float() / 127.5 - 1

"""Real data and an exact model at tiny size: striped pictures of three classes, and the velocity that fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewstep.data.api import Items
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

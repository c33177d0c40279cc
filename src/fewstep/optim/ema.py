"""The exponential moving average of the student: float32 shadows that tick on the student's updates alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor, nn

from fewstep.section import Section


class EMASection(Section):
    """The average that is validated, sampled and exported."""

    decay: float = Field(default=0.99, ge=0, lt=1)
    """Share of the average that is kept at each update of the student."""
    start: int = Field(default=0, ge=0)
    """Updates of the student during which the average simply equals the weights."""


class EMA:
    """After updates ``u <= start`` the shadow is the weight; after each later one,
    ``shadow <- decay shadow + (1 - decay) weight``.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], section: EMASection):
        self.parameters, self.section = dict(parameters), section
        self.shadows = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in self.parameters.items()
        }

    @torch.no_grad()
    def update(self, updates: Tensor, finite: Tensor) -> None:
        """Follows the student's update number ``updates`` (0-dim, counted from 1); nothing moves where ``finite`` is
        false."""
        shadows = list(self.shadows.values())
        whole, part = shadows[0].new_ones(()), shadows[0].new_full((), 1 - self.section.decay)
        weight = torch.where(updates <= self.section.start, whole, part) * finite
        torch._foreach_mul_(shadows, 1 - weight)
        torch._foreach_add_(shadows, torch._foreach_mul([p.detach() for p in self.parameters.values()], weight))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the parameters hold the average; afterwards, whatever was raised, their own values bit for bit."""
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            self._write(self.shadows)
            yield
        finally:
            self._write(kept)

    def state(self) -> dict[str, Tensor]:
        return dict(self.shadows)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises KeyError if a shadow is missing."""
        for name, shadow in self.shadows.items():
            shadow.copy_(tensors[name])

    @torch.no_grad()
    def _write(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])

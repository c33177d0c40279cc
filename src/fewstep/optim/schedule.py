"""Learning-rate schedules, counted in the updates of the role that they belong to."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fewstep.section import Section


class ScheduleSection(Section):
    """Warm-up, a constant stretch, then the decay that ``name`` says."""

    name: Literal["constant", "cosine", "linear"] = "constant"
    """What follows the constant stretch: nothing, half a cosine, or a straight line."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the rate rises in a straight line to its full value."""
    constant: float = Field(default=0.0, ge=0, le=1)
    """Share of all updates (warm-up included) after which the decay begins."""
    final: float = Field(default=0.0, ge=0, le=1)
    """The rate at the last update, as a share of the full one."""

    @model_validator(mode="after")
    def _nothing_unread(self) -> ScheduleSection:
        if self.name == "constant" and (self.constant or self.final):
            raise ValueError(
                "'constant' and 'final' shape a decay, which name: constant has not; write cosine or linear"
            )
        return self


def factor(section: ScheduleSection, updates: Tensor, total: int) -> Tensor:
    """The share of the full rate at which the next update is made.

    updates: 0-dim, the updates made so far, on any device. total: all updates that the role will make. The first update
    is ``updates == 0``; the last one, ``updates == total - 1``, has the rate ``final``.
    """
    done = updates.to(torch.float64)
    rise = ((done + 1) / max(section.warmup_updates, 1)).clamp(max=1.0)
    if section.name == "constant":
        return rise
    begin = max(section.constant * total, section.warmup_updates)
    length = total - 1 - begin
    progress = ((done - begin) / (length if length > 0 else 1)).clamp(0.0, 1.0)
    fall = 1 - progress if section.name == "linear" else (1 + torch.cos(math.pi * progress)) / 2
    return rise * (section.final + (1 - section.final) * fall)

"""Noise levels: the shift, grids and ladders, and the densities from which training draws.

A density maps a uniform draw to a noise level (its inverse distribution function), so that a level is a pure function
of the draw. All arithmetic is in float64; levels are float32 and never leave [0, 1].
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fewstep.errors import UserError
from fewstep.section import Section
from fewstep.shapes import PerSample

Level = TypeVar("Level", float, Tensor)


def shift(u: Level, s: float) -> Level:
    """The shifted noise level ``s u / (1 + (s - 1) u)`` of u in [0, 1] (Stable Diffusion 3, arXiv:2403.03206).

    Written so that 0 and 1 stay where they are exactly, and every u at s = 1. Takes a number or a tensor; a tensor is
    shifted in float64 and comes back in its own type (float32 at least).
    """
    if isinstance(u, Tensor):
        wide = u.double()
        return (s * wide / (s * wide + (1 - wide))).to(torch.promote_types(u.dtype, torch.float32))
    return s * u / (s * u + (1 - u))


def grid(num_nodes: int, s: float) -> tuple[float, ...]:
    """The ``num_nodes`` noise levels of a sampler, descending from 1 to ``s / (num_nodes + s - 1)``; the 0 at which the
    last step ends is not among them. Raises UserError for num_nodes < 1 or s <= 0.

    A node is one division and one shift, so a grid contains, to the last bit, every grid whose number of nodes divides
    its own.
    """
    if num_nodes < 1:
        raise UserError(f"a grid of {num_nodes} nodes holds no noise level: write 1 or more")
    if not s > 0:
        raise UserError(f"shift {s} is not positive: write a number above 0, 1 for no shift")
    return tuple(shift((num_nodes - i) / num_nodes, s) for i in range(num_nodes))


def ladder(steps: int, s: float) -> tuple[float, ...]:
    """The ``sigmas`` of a few-step student: the shifted ``1, (steps - 1) / steps, ..., 1 / steps``, which is the
    grid of as many nodes. Raises UserError for steps < 1 or s <= 0."""
    return grid(steps, s)


class _Bounded(Section):
    """A density between two bounds."""

    name: str
    """The density's name in a recipe."""
    low: float = Field(default=0.0, ge=0, le=1)
    """The lowest noise level, in [0, 1)."""
    high: float = Field(default=1.0, ge=0, le=1)
    """The highest noise level, in (low, 1]."""

    @model_validator(mode="after")
    def _ordered(self):
        if not self.low < self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}: write 0 <= low < high <= 1")
        return self


class Uniform(_Bounded):
    """Every noise level from low to high alike."""

    name: Literal["uniform"] = "uniform"
    """The density's name in a recipe."""

    def sigma(self, u: PerSample) -> PerSample:
        """The noise levels of the uniform draws u in [0, 1)."""
        return (self.low + (self.high - self.low) * u.double()).float()


class LogitNormal(Section):
    """The noise level whose logit is normal, then shifted (Stable Diffusion 3, arXiv:2403.03206)."""

    name: Literal["logit_normal"] = "logit_normal"
    """The density's name in a recipe."""
    mean: float = 0.0
    """Mean of the logit; above 0 the high noise levels are favoured."""
    std: float = Field(default=1.0, gt=0)
    """Standard deviation of the logit."""
    shift: float = Field(default=1.0, gt=0)
    """Shift applied to the drawn level; 1 is none."""

    def sigma(self, u: PerSample) -> PerSample:
        """The noise levels of the uniform draws u in [0, 1); 0 at u = 0."""
        logit = self.mean + self.std * torch.special.ndtri(u.double())
        return shift(torch.sigmoid(logit), self.shift).float()


class Shifted(_Bounded):
    """The shifted uniform density of the scores of distribution matching, kept away from both ends."""

    name: Literal["shifted"] = "shifted"
    """The density's name in a recipe."""
    shift: float = Field(gt=0)
    """Shift of the uniform draw; 1 is none."""
    low: float = Field(default=0.02, ge=0, le=1)
    """The lower bound, in [0, 1)."""
    high: float = Field(default=0.98, ge=0, le=1)
    """The upper bound, in (low, 1]."""
    bounds: Literal["clamped", "index"]
    """What low and high bound: ``clamped`` the shifted level, so that both ends gather what lies beyond them
    (Self-Forcing, arXiv:2506.08009); ``index`` the draw before it is shifted (DMD2, arXiv:2405.14867)."""

    def sigma(self, u: PerSample) -> PerSample:
        """The noise levels of the uniform draws u in [0, 1)."""
        if self.bounds == "clamped":
            return shift(u.double(), self.shift).clamp(self.low, self.high).float()
        return shift(self.low + (self.high - self.low) * u.double(), self.shift).float()


class Grid(_Bounded):
    """One of the nodes of a shifted grid, each alike: those between low and high."""

    name: Literal["grid"] = "grid"
    """The density's name in a recipe."""
    nodes: int = Field(ge=1, le=100_000)
    """Number of nodes of the whole grid, from sigma 1 down; 0 is not among them."""
    shift: float = Field(gt=0)
    """Shift of the grid; 1 is none."""

    @cached_property
    def _inside(self) -> tuple[int, ...]:
        """Indices of the nodes between low and high; neighbours, because the grid descends."""
        return tuple(i for i, node in enumerate(grid(self.nodes, self.shift)) if self.low <= node <= self.high)

    @model_validator(mode="after")
    def _occupied(self):
        if not self._inside:
            lowest = grid(self.nodes, self.shift)[-1]
            raise ValueError(
                f"no node lies between low {self.low} and high {self.high}: {self.nodes} nodes at shift {self.shift} "
                f"run from {lowest:.4g} to 1; widen the bounds or write more nodes"
            )
        return self

    def sigma(self, u: PerSample) -> PerSample:
        """The noise levels of the uniform draws u in [0, 1); the lowest node at u = 0."""
        count = len(self._inside)
        steps_up = (u.double() * count).floor().clamp(max=count - 1)
        return shift((self.nodes - self._inside[-1] + steps_up) / self.nodes, self.shift).float()


SigmaDensity = Annotated[Uniform | LogitNormal | Shifted | Grid, Field(discriminator="name")]
"""The density of a noise level in a recipe, told apart by its name."""

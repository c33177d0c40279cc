"""How an item moves through a square frame: two motions whose next position is known from two positions in succession.

Positions are centres of the item's square box, (y, x) in pixels from the upper left corner of the frame, y downwards;
the middle of the pixel in row i and column j is at (i + 0.5, j + 0.5). Time is counted in frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

MOTIONS = ("bounce", "circle")
"""``bounce``: a straight line at constant speed, reflected at the walls. ``circle``: around the centre of the frame,
clockwise for who looks at it. A motion is an index into these names."""

Path = Float[Tensor, "b f 2"]
"""The centre of the item's box in every frame."""


@dataclass(frozen=True)
class Motion:
    """The physics of boxes of ``item_size`` pixels in frames of ``size`` pixels, at ``speed`` pixels a frame.

    A box never leaves the frame. Raises ValueError unless ``item_size`` < ``size`` and 0 < ``speed`` <= ``size`` -
    ``item_size``: a faster box could meet both walls between two frames, and its next position would not be known.
    """

    size: int
    item_size: int
    speed: float

    def __post_init__(self):
        if not 0 < self.item_size < self.size:
            raise ValueError(
                f"item_size: an item of {self.item_size} pixels has no room to move in frames of size {self.size}; "
                "write an item_size below size"
            )
        if not 0 < self.speed <= self.room:
            raise ValueError(
                f"speed: {self.speed} pixels a frame is not above 0 and at most size - item_size = {self.room}; "
                "write a speed in this range"
            )

    @property
    def room(self) -> int:
        """Pixels that a box can move in each direction, from wall to wall."""
        return self.size - self.item_size

    @property
    def radius(self) -> float:
        """Of the circle that a box's centre describes; it touches all four walls."""
        return self.room / 2

    @property
    def turn(self) -> float:
        """Radians a frame of the circle; along it the speed is ``speed``."""
        return self.speed / self.radius

    def path(
        self, motion: Int64[Tensor, "b"], start: Float[Tensor, "b 2"], angle: Float[Tensor, "b"], frames: int
    ) -> Path:
        """The true centres of ``frames`` frames, in the type of ``start``.

        start: the first centre of a bounce, within the walls; a circle does not use it. angle: radians from the x axis
        clockwise, the direction in which a bounce starts, or the place on the circle where a circle starts.
        """
        time = torch.arange(frames, dtype=start.dtype, device=start.device)
        along = _direction(angle)[:, None] * (self.speed * time)[:, None]
        bounce = self._reflect(start[:, None] + along)
        circle = self.size / 2 + self.radius * _direction(angle[:, None] + self.turn * time)
        return torch.where(_is_circle(motion), circle, bounce)

    def step(self, previous: Path, current: Path, motion: Int64[Tensor, "b"]) -> Path:
        """The centres that follow ``current`` one frame later, where ``previous`` came one frame before it.

        All frames of a clip are independent pairs: ``step(path[:, :-2], path[:, 1:-1], motion)`` is ``path[:, 2:]``.
        A circle turns ``current`` about the centre of the frame, at the distance that it has. A bounce goes on with the
        velocity of the last frame; if there was a reflection in between, that is told from the speed: the velocity is
        taken from the mirror image of ``previous`` in no, one or two walls that makes it most nearly ``speed``.
        """
        offset = current - self.size / 2
        sine, cosine = math.sin(self.turn), math.cos(self.turn)
        turned = torch.stack(
            [offset[..., 1] * sine + offset[..., 0] * cosine, offset[..., 1] * cosine - offset[..., 0] * sine], dim=-1
        )
        bounced = self._reflect(current + self._velocity(previous, current))
        return torch.where(_is_circle(motion), self.size / 2 + turned, bounced)

    def _velocity(self, previous: Path, current: Path) -> Path:
        """Of a bounce at ``current``."""
        low, high = self.item_size / 2, self.size - self.item_size / 2
        images = torch.stack([previous, 2 * low - previous, 2 * high - previous])
        choices = current - images
        velocities = torch.stack(
            [torch.stack([y[..., 0], x[..., 1]], dim=-1) for y in choices for x in choices], dim=-2
        )
        best = (velocities.norm(dim=-1) - self.speed).abs().argmin(dim=-1)
        return velocities.take_along_dim(best[..., None, None], dim=-2).squeeze(-2)

    def _reflect(self, centres: Path) -> Path:
        """Positions as if there were no walls, folded back to between them."""
        low = self.item_size / 2
        return low + self.room - (torch.remainder(centres - low, 2 * self.room) - self.room).abs()


def _direction(angle: Tensor) -> Float[Tensor, "... 2"]:
    return torch.stack([angle.sin(), angle.cos()], dim=-1)


def _is_circle(motion: Int64[Tensor, "b"]) -> Tensor:
    return (motion == MOTIONS.index("circle"))[:, None, None]

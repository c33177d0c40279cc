"""Motion against the known physics: how far an item is, frame by frame, from where the two frames before it send it.

The item's place is its centre of brightness. It differs from the centre of the item's box, which the physics moves, by
a constant of the item; that constant is fitted for each clip, within a quarter of the box, so that the clip's own
errors are least. It matters at walls and on a circle, where two coordinates cannot excuse a whole clip.

Real test clips of moving Fashion-MNIST (12 frames of 16x16 pixels, one pixel a frame) are at 0.04 pixels on average, 99
of 100 below 0.13: what is left out as nearly black is not quite the same in all frames. Frozen clips are at 0.8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fewstep.evaluate.api import Physics, PixelValues, Positions
from fewstep.evaluate.picture import to_uint8

BLACK = 8
"""Brightness of 255 up to which a pixel counts as black, and above which as so much less bright: the faint noise of
generated frames would draw their centre of brightness to the middle."""

_GRIDS = ((4, 1 / 16), (2, 1 / 64), (2, 1 / 256))
"""The search for the item's constant: steps to each side, and their length in boxes."""
_CLIPS = 64
"""That are searched at once."""


def motion_errors(
    pixels: PixelValues, motion: Int64[Tensor, "b"], physics: Physics
) -> Float[Tensor, "b frames_less_2"]:
    """The error in pixels of every frame but the first two; entry t is that of frame t + 2. Float64, on the CPU.

    Two lengths at a right angle: from the place that follows from the two frames before, and from the known speed. The
    first alone would forgive an item that stands still. A frame without anything bright counts as one with the item in
    its middle. Raises ValueError for clips of fewer than three frames.
    """
    if pixels.shape[1] < 3:
        raise ValueError(f"motion is judged by three frames in succession, and the clips have {pixels.shape[1]}")
    parts = zip(centroids(pixels).split(_CLIPS), motion.cpu().split(_CLIPS), strict=True)
    return torch.cat([_least_errors(*part, physics) for part in parts])


def centroids(pixels: PixelValues) -> Positions:
    """The centre of brightness of every frame as an 8-bit picture, float64, on the CPU."""
    brightness = (to_uint8(pixels).cpu().double().mean(2) - BLACK).clamp(min=0)
    height, width = brightness.shape[2:]
    rows, columns = (torch.arange(side, dtype=torch.float64) + 0.5 for side in (height, width))
    total = brightness.sum((2, 3))
    moment = torch.stack([brightness.sum(3) @ rows, brightness.sum(2) @ columns], -1)
    middle = torch.tensor([height / 2, width / 2], dtype=torch.float64)
    return torch.where(total[..., None] > 0, moment / total[..., None].clamp(min=1e-9), middle)


def num_motions(classes: Sequence[str]) -> int:
    """How many motions there are, so that a label is ``item * num_motions + motion``.

    Raises ValueError unless the classes are all pairs "item, motion", the motion fastest.
    """
    items, motions = ([*dict.fromkeys(name.rpartition(", ")[place] for name in classes)] for place in (0, 2))
    if list(classes) != [f"{item}, {motion}" for item in items for motion in motions]:
        raise ValueError(f"classes of moving data are all pairs 'item, motion', not {', '.join(classes)}")
    return len(motions)


def _least_errors(seen: Positions, motion: Int64[Tensor, "b"], physics: Physics) -> Float[Tensor, "b frames_less_2"]:
    """The errors under the constant of each clip that makes their mean least."""
    clip = torch.arange(len(seen))
    constant, errors = torch.zeros(len(seen), 1, 2, dtype=seen.dtype), torch.empty(0)
    for reach, length in _GRIDS:
        places = torch.arange(-reach, reach + 1, dtype=seen.dtype) * length * physics.item_size
        choices = constant + torch.cartesian_prod(places, places)[:, None, None]
        centres = (seen - choices).flatten(0, 1)
        found = _errors(centres, motion.repeat(len(choices)), physics).unflatten(0, choices.shape[:2])
        best = found.mean(2).argmin(0)
        constant, errors = choices[best, clip], found[best, clip]
    return errors


def _errors(centres: Positions, motion: Int64[Tensor, "b"], physics: Physics) -> Float[Tensor, "b frames_less_2"]:
    expected = physics.step(centres[:, :-2], centres[:, 1:-1], motion)
    return torch.hypot((centres[:, 2:] - expected).norm(dim=-1), _speed_errors(centres, physics)[:, 1:])


def _speed_errors(centres: Positions, physics: Physics) -> Float[Tensor, "b frames_less_1"]:
    """How far the way from each frame to the next is from ``speed``; a way that may have met walls is as long as the
    way to the mirror image in them that suits best."""
    low, high = physics.item_size / 2, physics.size - physics.item_size / 2
    current = centres[:, 1:]
    squares = (torch.stack([current, 2 * low - current, 2 * high - current]) - centres[:, :-1]).square()
    ways = (squares[:, None, ..., 0] + squares[None, ..., 1]).sqrt()
    return (ways - physics.speed).abs().amin((0, 1))

"""Clips longer than those of the data, cut into windows as long as these."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fewstep.errors import UserError
from fewstep.evaluate.api import PixelValues


def window_starts(num_frames: int, frames: int, every: int | None = None) -> list[int]:
    """The first frames of windows of ``frames`` frames in a clip of ``num_frames``.

    One begins every ``every`` frames, by default where the one before it ends; the last one ends with the clip, so that
    it may overlap the one before it. Raises UserError where the clip is shorter than a window.
    """
    if num_frames < frames:
        raise UserError(
            f"clips of {num_frames} frames cannot be judged by data of {frames} frames; make clips of {frames} or more"
        )
    last = num_frames - frames
    return [*range(0, last, every or frames), last]


def as_windows(
    pixels: PixelValues, labels: Int64[Tensor, "b"], frames: int
) -> tuple[Float[Tensor, "windows frames c h w"], Int64[Tensor, "windows"]]:
    """All windows of all clips, each with the label of its clip."""
    starts = window_starts(pixels.shape[1], frames)
    return torch.cat([pixels[:, start : start + frames] for start in starts]), labels.repeat(len(starts))

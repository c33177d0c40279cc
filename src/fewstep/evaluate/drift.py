"""Quality against the frame index: clips far longer than those of training, judged window by window."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Int64
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from fewstep.evaluate.api import PixelValues
from fewstep.evaluate.judge import HEADINGS, Judge, Quality, filled
from fewstep.evaluate.windows import window_starts


class Drift(Quality):
    """The quality of one window of long clips."""

    first_frame: int
    """Of the window; it is as long as the clips of the data."""


def drift(pixels: PixelValues, labels: Int64[Tensor, "b"], judge: Judge, every: int | None = None) -> list[Drift]:
    """One row for each window of the clips, in the order of time.

    A window begins every ``every`` frames, by default where the one before it ends; the last one ends with the clip.
    Each is compared with the same real data, as a clip by itself: a clip that goes on as it began has the same figures
    in all rows, but for chance. Where a window holds what is not finite, its row is NaN. Raises UserError for clips
    shorter than those of the data, and for too few of them.
    """
    frames = judge.num_frames
    return [
        Drift(**judge(pixels[:, first : first + frames], labels).model_dump(), first_frame=first)
        for first in window_starts(pixels.shape[1], frames, every)
    ]


def drift_table(rows: Sequence[Drift], name: str = "") -> Table:
    """One line a window; columns that no row fills are left out."""
    table = Table(title=name or None, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    table.add_column("From frame", justify="right")
    shown = filled(rows)
    for metric in shown:
        table.add_column(HEADINGS[metric], justify="right")
    for row in rows:
        values = [getattr(row, metric) for metric in shown]
        table.add_row(str(row.first_frame), *("" if value is None else f"{value:.3g}" for value in values))
    return table

"""Pixels as PNG files: single pictures, grids with the names of rows and columns, and film strips of clips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from fewstep.evaluate.api import PixelValues
from fewstep.evaluate.cache import written_whole

_GAP, _MARGIN, _SMALLEST = 2, 6, 48
_PAPER, _INK = "white", "black"


def to_uint8(pixels: PixelValues) -> UInt8[Tensor, "b f c h w"]:
    """Pixels in [-1, 1] as 0 to 255, rounded to the nearest; outside values are clamped, NaN is black."""
    return ((pixels.float().nan_to_num(-1).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


def class_rows(labels: Int64[Tensor, "n"], num_rows: int, num_columns: int) -> Int64[Tensor, "rows columns"]:
    """Which samples to show, one class a row: the first ``num_columns`` of each of the first ``num_rows`` classes.

    Fewer columns where the rarest of these classes has fewer samples; classes without any are left out.
    """
    classes = labels.unique()[:num_rows]
    found = [(labels == label).nonzero().flatten() for label in classes]
    width = min([num_columns, *map(len, found)])
    return torch.stack([ids[:width] for ids in found])


def save_grid(
    path: Path,
    rows: Sequence[PixelValues],
    row_names: Sequence[str] = (),
    column_names: Sequence[str] = (),
) -> None:
    """One PNG. Each of ``rows`` is a row of pictures of one shape: a class, say, or one model on the same noise.

    The frames of a clip stand side by side. Small pictures are enlarged by a whole number. Raises ValueError for pixels
    that are neither grey nor RGB.
    """
    with written_whole(path) as part:
        draw_grid(rows, row_names, column_names).save(part, format="PNG")


def save_film(path: Path, clips: PixelValues, names: Sequence[str] = (), most: int = 24) -> None:
    """Film strips as one PNG: a clip a row, time to the right, the numbers of the frames above them.

    Of clips of more than ``most`` frames, every second, third, ... frame is shown.
    """
    shown = range(0, clips.shape[1], -(-clips.shape[1] // most))
    rows = [clip[shown.start : shown.stop : shown.step, None] for clip in clips]
    save_grid(path, rows, names, [str(frame) for frame in shown])


def draw_grid(
    rows: Sequence[PixelValues], row_names: Sequence[str] = (), column_names: Sequence[str] = ()
) -> Image.Image:
    """The picture that :func:`save_grid` writes, RGB."""
    pictures = [[draw_frames(sample) for sample in to_uint8(row)] for row in rows]
    width, height = pictures[0][0].size
    row_names = row_names or [""] * len(rows)
    column_names = column_names or [""] * max(map(len, pictures))
    left = max(_text_size(name)[0] for name in row_names)
    left += _MARGIN if left else 0
    top = max(_text_size(name)[1] for name in column_names) + _GAP
    size = (left + len(column_names) * (width + _GAP), top + len(rows) * (height + _GAP))
    grid = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(grid)
    for column, name in enumerate(column_names):
        draw.text((left + column * (width + _GAP), 0), name, _INK, font=ImageFont.load_default())
    for row, (name, line) in enumerate(zip(row_names, pictures, strict=True)):
        y = top + row * (height + _GAP)
        draw.text((_GAP, y + (height - _text_size(name)[1]) // 2), name, _INK, font=ImageFont.load_default())
        for column, picture in enumerate(line):
            grid.paste(picture, (left + column * (width + _GAP), y))
    return grid


def save_pictures(folder: Path, pixels: PixelValues, names: Sequence[str]) -> list[Path]:
    """One PNG a sample at its own size, ``00007-<name>.png`` for sample 7; what is unfit for file names becomes '_'."""
    paths = []
    for number, (sample, name) in enumerate(zip(to_uint8(pixels), names, strict=True)):
        fit = "".join(character if character.isalnum() or character in "-_." else "_" for character in name)
        path = folder / f"{number:05d}-{fit}.png"
        with written_whole(path) as part:
            draw_frames(sample, smallest=1).save(part, format="PNG")
        paths.append(path)
    return paths


def draw_frames(sample: UInt8[Tensor, "f c h w"], smallest: int = _SMALLEST) -> Image.Image:
    """Frames side by side, grey or RGB, enlarged by a whole number to at least ``smallest`` rows. Raises ValueError for
    other than 1 or 3 channels."""
    channels, height = sample.shape[1:3]
    if channels not in (1, 3):
        raise ValueError(f"pixels have 1 or 3 channels, and these have {channels}: decode latents before saving them")
    strip = torch.cat(list(sample), dim=-1)
    array = (strip[0] if channels == 1 else strip.permute(1, 2, 0)).contiguous().cpu().numpy()
    image = Image.fromarray(array)
    scale = -(-smallest // height)
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def _text_size(text: str) -> tuple[int, int]:
    if not text:
        return 0, 0
    _, _, right, bottom = ImageFont.load_default().getbbox(text)
    return int(right) + 1, int(bottom) + 1

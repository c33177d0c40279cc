"""Clips as files that play: GIF by Pillow, mp4 by PyAV (the extra ``video``), one clip or a grid of clips."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from fewstep.errors import UserError
from fewstep.evaluate.cache import written_whole
from fewstep.evaluate.picture import draw_frames, draw_grid, to_uint8

FPS = 8.0
"""Frames per second of what does not say its own."""

Clip = Float[Tensor, "f c h w"]
"""Pixels of one clip in [-1, 1], grey or RGB."""

Clips = Float[Tensor, "_ _ c h w"]
"""A row of clips; another row may hold more or fewer of them, longer or shorter."""

_SMALLEST = 128
_GIF_FPS = 100 / (2**16 - 1), 50.0
"""A frame lasts at most 65535 hundredths of a second: the GIF has two bytes for it. Viewers slow down faster ones."""
_MP4_FPS = 0.001, 100_000.0


def save_gif(path: Path, pixels: Clip, fps: float = FPS) -> None:
    """A GIF that plays for ever. Clips of fewer than 128 rows are enlarged by a whole number.

    Grey is kept exactly; colours are, where a frame has 256 or fewer. A GIF counts time in hundredths of a second: its
    frames begin at the nearest one. Raises UserError for ``fps`` below 0.00153 (a frame lasts at most 655.35 s) or
    above 50, and where one picture stands still for longer than that; ValueError for pixels that are neither grey nor
    RGB.
    """
    _write_gif(path, enlarged(pixels), fps)


def save_mp4(path: Path, pixels: Clip, fps: float = FPS) -> None:
    """An mp4 (H.264, colour at half resolution, nearly lossless in brightness), enlarged like a GIF.

    Raises UserError where PyAV is missing and for ``fps`` below 0.001 or above 100,000, ValueError for pixels that are
    neither grey nor RGB.
    """
    with mp4_writer(path, fps) as write:
        for picture in enlarged(pixels):
            write(picture)


def save_clip_grid(
    path: Path,
    rows: Sequence[Clips],
    row_names: Sequence[str] = (),
    column_names: Sequence[str] = (),
    fps: float = FPS,
) -> None:
    """The grid of ``picture.save_grid``, playing: a GIF or an mp4, by the ending of ``path``.

    Rows whose clips end earlier than others stand still meanwhile. Raises UserError for another ending, and what
    :func:`save_gif` and :func:`save_mp4` raise.
    """
    grey = all(row.shape[2] == 1 for row in rows)

    def picture(frame: int) -> Image.Image:
        now = [row[:, min(frame, row.shape[1] - 1), None] for row in rows]
        grid = draw_grid(now, row_names, column_names)
        return grid.convert("L") if grey else grid

    pictures = map(picture, range(max(row.shape[1] for row in rows)))
    if path.suffix.lower() == ".gif":
        _write_gif(path, pictures, fps)
    elif path.suffix.lower() == ".mp4":
        with mp4_writer(path, fps) as write:
            for one in pictures:
                write(one)
    else:
        raise UserError(f"'{path}': clips are written as .gif or .mp4; write one of these endings")


@contextmanager
def mp4_writer(path: Path, fps: float = FPS) -> Iterator[Callable[[Image.Image], None]]:
    """Yields a function that takes the pictures of an mp4 one by one, all of one size, and holds none of them.

    An odd height or width is filled up by its last row or column. The file is there when the block ends, and not at all
    when it raises. Raises UserError where PyAV is missing and for ``fps`` below 0.001 or above 100,000.
    """
    try:
        import av
    except ImportError:
        raise UserError(
            f"'{path}': mp4 files need the package 'av'; pip install fewstep[video], or write a .gif"
        ) from None
    check_fps(path, fps)
    rate = Fraction(fps).limit_denominator(1001)
    with written_whole(path) as part, av.open(str(part), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "8"})
        stream.pix_fmt = "yuv420p"

        def write(picture: Image.Image) -> None:
            colours = np.asarray(picture.convert("RGB"))
            height, width = colours.shape[:2]
            even = np.pad(colours, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
            if not stream.codec_context.is_open:
                stream.height, stream.width = even.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))

        yield write
        container.mux(stream.encode(None))


def enlarged(pixels: Clip) -> Iterator[Image.Image]:
    """The pictures of a clip as GIF and mp4 show them."""
    return (draw_frames(frame[None], _SMALLEST) for frame in to_uint8(pixels[None])[0])


def _write_gif(path: Path, pictures: Iterable[Image.Image], fps: float) -> None:
    check_fps(path, fps)
    first, *others = pictures
    begins = [round(100 * frame / fps) for frame in range(len(others) + 2)]
    durations_ms = [10 * (end - begin) for begin, end in pairwise(begins)]
    try:
        with written_whole(path) as part:
            first.save(part, format="GIF", save_all=True, append_images=others, duration=durations_ms, loop=0)
    except (OverflowError, struct.error) as error:  # pictures that are the same are written as one, for all their time
        raise UserError(
            f"'{path}': one picture stands still for more than the 655.35 s that a GIF can show it; write an .mp4, or "
            f"more frames a second than {fps:g}"
        ) from error


def check_fps(path: Path, fps: float) -> None:
    """Raises UserError for a number of frames per second that the file at ``path`` cannot have."""
    if not 0 < fps < float("inf"):
        raise UserError(f"fps = {fps}: write frames per second above 0")
    gif = path.suffix.lower() == ".gif"
    least, most = _GIF_FPS if gif else _MP4_FPS
    kind = "a GIF" if gif else "an mp4"
    if fps > most:
        other = "write an .mp4" if gif else "write less"
        raise UserError(f"'{path}': {kind} shows at most {most:.0f} frames a second, not {fps:g}; {other}")
    if fps < least:
        raise UserError(
            f"'{path}': a frame of {kind} lasts at most {1 / least:.2f} s, so that fps = {fps:g} is too low; write "
            f"{math.ceil(1e5 * least) / 1e5:g} or more"
        )

"""The first frames of a video file as pixels of the asked channels and size, or the reason why they cannot be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fewstep.data.still_image import to_pixels

SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif")
"""The names, in capitals too, that are taken for videos."""

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif"
"""What may be in a file, whatever its name says: FFmpeg's names of the formats that hold their pictures themselves
(others, such as playlists, have further files or addresses opened)."""

_TINT = 4  # levels between the channels of a pixel, up to which a lossy codec may have coloured a grey one


def read_clip(path: Path, frames: int, stride: int, channels: int, height: int, width: int) -> np.ndarray:
    """The frames 0, stride, 2 stride, ... of a video, uint8 ``[frames, channels, height, width]``; the rest of the
    file is not read.

    Frames count as they are stored, whatever their times. They are shown as a player shows them (upright, pixels in
    their true proportions), then cut, resized and refused as still images are (``read_image``). For 1 channel, frames
    count as grey whose colours are no stronger than the errors of common codecs.

    Raises ValueError if the video is too short, damaged in the frames that are needed, or of the wrong kind. Needs
    PyAV, the extra ``video``.
    """
    import av

    try:
        with av.open(
            os.path.abspath(path), options={"format_whitelist": FORMATS, "protocol_whitelist": "file"}
        ) as file:
            return _read(file, frames, stride, channels, height, width)
    except av.FFmpegError as error:
        raise ValueError(error.strerror or str(error)) from error


def _read(file: Any, frames: int, stride: int, channels: int, height: int, width: int) -> np.ndarray:
    if not file.streams.video or file.streams.video[0].codec_context is None:
        raise ValueError("no video that can be decoded")
    stream = file.streams.video[0]
    clip, count = [], 0
    for frame in file.decode(stream):
        if frame.is_corrupt:
            raise ValueError(f"frame {count} is damaged")
        if count % stride == 0:
            try:
                image = _as_shown(frame, stream.sample_aspect_ratio)
                clip.append(to_pixels(_untinted(image) if channels == 1 else image, channels, height, width))
            except ValueError as error:
                raise ValueError(f"frame {count}: {error}") from error
        if len(clip) == frames:
            return np.stack(clip)
        count += 1
    needed = (frames - 1) * stride + 1
    raise ValueError(f"{count} frames, where data.frames: {frames} with data.stride: {stride} needs {needed}")


def _as_shown(frame: Any, proportions: Any) -> Image.Image:
    """The frame as a player shows it. ``proportions``: width by height of a pixel, or None where nothing is said."""
    has_alpha = any(component.is_alpha for component in frame.format.components)
    image = Image.fromarray(frame.to_ndarray(format="rgba" if has_alpha else "rgb24"))
    width = round(image.width * (proportions or 1))
    if width != image.width:
        image = image.resize((width, image.height), Image.Resampling.BICUBIC)
    return image.rotate(frame.rotation, expand=True)


def _untinted(image: Image.Image) -> Image.Image:
    """The brightness of an image that is grey but for the errors of a codec; any other as it is."""
    if image.mode != "RGB" or np.ptp(np.asarray(image), axis=-1).max() > _TINT:
        return image
    return image.convert("L")

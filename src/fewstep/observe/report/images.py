"""Pictures inside the page: PNG files as data, made smaller where they would bloat it."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image as Picture

MAX_BYTES = 1_500_000
"""A file beyond this is scaled down and stored as JPEG."""
MAX_SIDE = 1600
"""Longest side of a scaled picture, in pixels."""


@dataclass(frozen=True)
class Image:
    """A picture as a ``data:`` address, with its size in pixels."""

    source: str
    width: int
    height: int


def load_image(path: Path) -> Image:
    """Raises OSError or ValueError where the file is not a whole picture."""
    content = path.read_bytes()
    try:
        with Picture.open(io.BytesIO(content)) as picture:
            picture.load()
            kind, size = "png", picture.size
            if picture.format != "PNG":
                raise ValueError("it is not a PNG file")
            if len(content) > MAX_BYTES:
                content, kind = _smaller(picture), "jpeg"
    except (SyntaxError, Picture.DecompressionBombError) as error:
        raise ValueError(str(error)) from error
    return Image(f"data:image/{kind};base64,{base64.b64encode(content).decode()}", *size)


def _smaller(picture: Picture.Image) -> bytes:
    copy = picture.convert("RGB")
    copy.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    copy.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()

"""One image file as pixels of the asked channels and size, or the reason why it cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "PPM", "GIF")
"""What may be in a file, whatever its name says: formats that are data alone (others, such as EPS, are programs)."""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif")
"""The names, in capitals too, that are taken for images."""

_GREY = ("1", "L", "LA")
_COLOUR = ("P", "PA", "RGB", "RGBA")


def read_image(path: Path, channels: int, height: int, width: int) -> np.ndarray:
    """The image as uint8 ``[channels, height, width]``: turned upright as its Exif data say, cut to the middle part of
    the right proportions, and resized (bicubic, antialiased; smaller images are enlarged).

    Grey becomes RGB where 3 channels are asked for. Nothing that an image shows is dropped: for 1 channel colour is
    refused, unless red, green and blue are equal everywhere; transparency is refused, unless every pixel is opaque; and
    so are other kinds of pixels (CMYK, 16-bit grey) and animations. Of a JPEG with several pictures the first counts.

    Raises ValueError in these cases, and whatever Pillow raises for a damaged file.
    """
    with Image.open(path, formats=FORMATS) as file:
        num_frames = getattr(file, "n_frames", 1)
        if num_frames > 1 and file.format != "MPO":
            raise ValueError(f"{num_frames} frames, where a still image is needed")
        if file.mode not in _GREY + _COLOUR:
            raise ValueError(f"pixels of the kind {file.mode}, where 8-bit grey or RGB is needed")
        image = ImageOps.exif_transpose(file)
    return to_pixels(image, channels, height, width)


def to_pixels(image: Image.Image, channels: int, height: int, width: int) -> np.ndarray:
    """The image as ``read_image`` returns it; raises ValueError for colours or transparency that would be dropped."""
    if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        raise ValueError("transparent pixels; put the image on a background")
    image = image.convert("L" if channels == 1 and image.mode in _GREY else "RGB")
    if channels == 1 and image.mode == "RGB":
        red, green, blue = (band.tobytes() for band in image.split())
        if not red == green == blue:
            raise ValueError("colours, where data.channels: 1 asks for grey; convert the image or set channels to 3")
        image = image.getchannel("R")
    pixels = np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)

"""Small data sets, written where a test needs them."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

WriteIdx = Callable[..., Path]


@pytest.fixture
def write_idx() -> WriteIdx:
    """``write_idx(path, array)``: the array as an idx file, packed if the name ends in .gz."""

    def write(path: Path, array: np.ndarray) -> Path:
        content = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path

    return write


@pytest.fixture
def clothes(tmp_path: Path, write_idx: WriteIdx) -> Path:
    """A folder with 7 training and 3 test images of the form of Fashion-MNIST; training raw, test packed."""
    generator = np.random.default_rng(3)
    folder = tmp_path / "clothes"
    folder.mkdir()
    for prefix, count, ending in (("train", 7, ""), ("t10k", 3, ".gz")):
        images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        write_idx(folder / f"{prefix}-images-idx3-ubyte{ending}", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{ending}", generator.integers(0, 10, count, dtype=np.uint8))
    return folder


@pytest.fixture
def write_video() -> Callable[..., Path]:
    """``write_video(path, frames, codec, pixel_format, proportions=..., **options)``: frames ``[f, h, w]`` grey,
    ``[f, h, w, 3]`` RGB or ``[f, h, w, 4]`` with transparency, as a video of 8 frames a second; without loss unless
    a codec is named."""
    av = pytest.importorskip("av")

    def write(path: Path, frames: np.ndarray, codec="ffv1", pixel_format=None, proportions=None, **options) -> Path:
        kind = frames.shape[3] if frames.ndim == 4 else 1
        given, exact = {1: ("gray", "gray"), 3: ("rgb24", "bgr0"), 4: ("rgba", "bgra")}[kind]
        with av.open(str(path), "w") as file:
            stream = file.add_stream(codec, rate=8, options=options)
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = pixel_format or exact
            if proportions is not None:
                stream.codec_context.sample_aspect_ratio = proportions
            for frame in frames:
                file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format=given)))
            file.mux(stream.encode())
        return path

    return write

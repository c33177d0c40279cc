"""The idx format of the MNIST family: big-endian sizes, then one byte a value."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from fewstep.errors import UserError

_MAX_BYTES = 2**31


def read_idx(path: Path, num_axes: int) -> np.ndarray:
    """The uint8 array of ``num_axes`` axes in an idx file, which may be packed with gzip.

    Nothing of the file is trusted: the sizes that it states must be those of its content. Raises UserError where they
    are not, where the file is cut short or damaged, or holds another type or another number of axes.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(4 + 4 * num_axes)
            if len(header) < 4 + 4 * num_axes or header[:4] != bytes((0, 0, 8, num_axes)):
                raise UserError(
                    f"{path} is not an idx file of bytes with {num_axes} axes; replace it by an intact copy"
                )
            shape = struct.unpack(f">{num_axes}I", header[4:])
            num_bytes = math.prod(shape)
            if num_bytes > _MAX_BYTES:
                raise UserError(f"{path} states the size {shape}, more than {_MAX_BYTES} bytes; it is damaged")
            content = file.read(num_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}); replace it by an intact copy") from error
    if len(content) != num_bytes:
        found = "more" if len(content) > num_bytes else str(len(content))
        raise UserError(f"{path} states {num_bytes} bytes but holds {found}; replace it by an intact copy")
    return np.frombuffer(content, np.uint8).reshape(shape)

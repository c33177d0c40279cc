"""Reading idx files: values, and a clear error for every kind of damage."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fewstep.data.idx import read_idx
from fewstep.errors import UserError

VALUES = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5)


@pytest.mark.parametrize("name", ["raw-ubyte", "packed-ubyte.gz"])
def test_an_idx_file_gives_back_what_was_written(tmp_path: Path, write_idx, name: str):
    found = read_idx(write_idx(tmp_path / name, VALUES), 3)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, VALUES)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "states 30 bytes but holds 29"),
        (lambda content: content + b"x", "states 30 bytes but holds more"),
        (lambda content: content[:10], "is not an idx file of bytes with 3 axes"),
        (lambda content: b"", "is not an idx file of bytes with 3 axes"),
        (lambda content: b"\0\0\x0d\x03" + content[4:], "is not an idx file of bytes with 3 axes"),
        (lambda content: b"\0\0\x08\x01" + content[4:], "is not an idx file of bytes with 3 axes"),
        (lambda content: content[:4] + b"\xff" * 12 + content[16:], "states the size .* it is damaged"),
    ],
)
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_a_file_that_is_not_what_it_states_is_refused(tmp_path: Path, write_idx, damage, message: str, ending: str):
    content = damage(write_idx(tmp_path / "ubyte", VALUES).read_bytes())
    path = tmp_path / f"damaged{ending}"
    path.write_bytes(gzip.compress(content) if ending else content)
    with pytest.raises(UserError, match=f"{path} {message}"):
        read_idx(path, 3)


@pytest.mark.parametrize("damage", ["cut", "flipped", "not packed", "absent"])
def test_a_damaged_packed_file_is_refused(tmp_path: Path, write_idx, damage: str):
    path = write_idx(tmp_path / "x.gz", VALUES)
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    {
        "cut": lambda: path.write_bytes(path.read_bytes()[:-9]),
        "flipped": lambda: path.write_bytes(content),
        "not packed": lambda: path.write_bytes(b"plain text"),
        "absent": path.unlink,
    }[damage]()
    with pytest.raises(UserError, match=f"{path} cannot be read .* replace it by an intact copy"):
        read_idx(path, 3)

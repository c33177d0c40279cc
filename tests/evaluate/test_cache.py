"""Files that are whole or not there, and what they never replace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fewstep.errors import UserError
from fewstep.evaluate.cache import written_whole


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [a_folder, a_pipe, a_link_to_a_device])
def test_what_is_not_a_regular_file_is_not_replaced(tmp_path: Path, make):
    path = tmp_path / "out.png"
    make(path)
    before = path.lstat()
    with pytest.raises(UserError, match=r"out\.png' is not a regular file"), written_whole(path) as part:
        part.write_text("new")
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_when_the_block_ends_and_stays_when_it_raises(tmp_path: Path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), written_whole(path) as part:
        part.with_name("absent").rename(part)
    assert path.read_text() == "old"
    with written_whole(path) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]

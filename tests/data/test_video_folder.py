"""Folders of videos: clips of the asked frames, what is refused before training, and what the cache keeps."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fewstep.data import pixel_cache
from fewstep.data.order import BatchOrder
from fewstep.data.video_folder import VideoFolder, VideoFolderSection
from fewstep.errors import UserError


@pytest.fixture
def put(write_video) -> Callable[..., Path]:
    """``put(path, value, frames)``: a grey video whose frames have the values value, value + 1, ..."""

    def write(path: Path, value: int, frames: int = 5) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.arange(value, value + frames, dtype=np.uint8)
        return write_video(path, values[:, None, None].repeat(4, 1).repeat(6, 2))

    return write


@pytest.fixture
def acts(tmp_path: Path, put) -> Path:
    """Two classes, 2 + 1 videos of 5 frames, with other files beside them."""
    folder = tmp_path / "acts"
    put(folder / "run" / "b.mkv", 20)
    put(folder / "run" / "a.mkv", 10)
    put(folder / "jump" / "slow" / "c.MKV", 30)
    for junk in ("run/.hidden.mkv", "run/poster.png", "README.md"):
        (folder / junk).write_text("no video")
    return folder


def section(folder: Path, **settings) -> VideoFolderSection:
    cache = str(folder.parent / "cache")
    defaults = {"path": str(folder), "size": 4, "channels": 1, "batch": 2, "cache": cache, "frames": 3}
    return VideoFolderSection(**{**defaults, **settings})


def values(dataset: VideoFolder) -> list[list[int]]:
    """The value of every frame of every clip, by id."""
    pixels = dataset.items(range(len(dataset))).pixels
    assert torch.equal(pixels, pixels[..., :1, :1].expand_as(pixels))
    return pixels[:, :, 0, 0, 0].tolist()


def test_ids_follow_the_class_names_and_the_paths_one_clip_a_file(acts: Path):
    dataset = VideoFolder(section(acts))
    assert dataset.classes == ("jump", "run")
    assert values(dataset) == [[30, 31, 32], [10, 11, 12], [20, 21, 22]]
    assert dataset.items(range(3)).label.tolist() == [0, 1, 1]


def test_clips_have_the_shape_and_the_stride_that_were_asked_for(acts: Path):
    dataset = VideoFolder(section(acts, size=[2, 3], channels=3, stride=2))
    items = dataset.items(torch.tensor([2, 0]))
    assert dataset.shape == (3, 3, 2, 3)
    assert items.pixels.shape == (2, 3, 3, 2, 3)
    assert items.pixels.dtype == torch.uint8
    assert items.pixels[:, :, 2, 1, 2].tolist() == [[20, 22, 24], [30, 32, 34]]
    assert items.label.tolist() == [1, 0]


def test_every_video_that_cannot_be_used_is_named_before_training(acts: Path, put):
    """Frame counts that do not fit are refused with both numbers; all files are tried before anything is said."""
    put(acts / "run" / "short.mkv", 40, 4)
    (acts / "jump" / "text.mp4").write_text("no video")
    with pytest.raises(UserError) as caught:
        VideoFolder(section(acts, frames=3, stride=2))
    message = str(caught.value)
    assert f"data.path: 2 of the 5 videos in '{acts}' cannot be used:" in message
    assert "run/short.mkv: 4 frames, where data.frames: 3 with data.stride: 2 needs 5" in message
    assert "jump/text.mp4: Invalid data found" in message
    assert "write data.on_broken=skip" in message


def test_videos_that_cannot_be_used_are_left_out_if_the_user_wishes(acts: Path, put):
    put(acts / "run" / "a2.mkv", 40, 2)
    for _ in range(2):  # decoded, then from the cache
        with pytest.warns(UserWarning, match=r"1 of the 4 videos .*\n  run/a2\.mkv: 2 frames, .*3 .* needs 3\n"):
            dataset = VideoFolder(section(acts, on_broken="skip"))
        assert values(dataset) == [[30, 31, 32], [10, 11, 12], [20, 21, 22]]


def test_messages_speak_of_videos(acts: Path, put):
    (acts / "walk").mkdir()
    with pytest.raises(UserError, match=r"no video that can be used in 1 class folders .*\(walk\); add videos \(\.mp4"):
        VideoFolder(section(acts))
    put(acts / "stray.mkv", 1)
    with pytest.raises(UserError, match=r"data\.path: 1 videos stand beside the class folders of .*\(stray\.mkv\)"):
        VideoFolder(section(acts))
    with pytest.raises(UserError, match="put the videos into one sub-folder for each class"):
        VideoFolder(section(acts / "walk"))


def test_fewer_videos_than_rows_of_a_batch_are_refused_with_both_numbers(acts: Path):
    with pytest.raises(UserError, match=r"data\.batch: 4 rows are more than the 3 items of the data set"):
        BatchOrder(0, len(VideoFolder(section(acts, batch=4))), 4)


def test_evaluation_compares_with_the_test_folder_if_there_is_one(acts: Path, tmp_path: Path, put):
    put(tmp_path / "held_out" / "jump" / "a.mkv", 50)
    put(tmp_path / "held_out" / "run" / "a.mkv", 60)
    settings = section(acts, test_path=str(tmp_path / "held_out"))
    assert values(VideoFolder(settings, "test")) == [[50, 51, 52], [60, 61, 62]]
    assert len(VideoFolder(settings, "train")) == 3
    assert len(VideoFolder(section(acts), "test")) == 3


def stored(folder: Path) -> dict[str, int]:
    """The caches beside ``folder``, with the inode of each one's pixels, which tells whether they were written anew."""
    return {path.name: (path / "pixels").stat().st_ino for path in (folder.parent / "cache" / "videos").iterdir()}


def test_the_clips_are_decoded_once(acts: Path):
    VideoFolder(section(acts))
    before = stored(acts)
    assert values(VideoFolder(section(acts, batch=1))) == [[30, 31, 32], [10, 11, 12], [20, 21, 22]]
    assert stored(acts) == before
    assert len(before) == 1


@pytest.mark.parametrize(
    ("setting", "first"), [({"frames": 2}, [30, 31]), ({"stride": 2}, [30, 32, 34]), ({"channels": 3}, [30, 31, 32])]
)
def test_other_settings_never_meet_old_clips(acts: Path, setting: dict, first: list[int]):
    """PITFALLS 'latent cache'."""
    VideoFolder(section(acts))
    assert values(VideoFolder(section(acts, **setting)))[0] == first
    assert len(stored(acts)) == 2


def test_a_changed_file_never_meets_old_clips(acts: Path, put):
    VideoFolder(section(acts))
    path = acts / "run" / "a.mkv"
    stat = path.stat()
    put(path, 70)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert values(VideoFolder(section(acts)))[1] == [70, 71, 72]


def test_clips_that_fill_the_memory_one_by_one_are_all_decoded(acts: Path, monkeypatch: pytest.MonkeyPatch):
    """Clips larger than what may wait to be written are decoded one at a time."""
    monkeypatch.setattr(pixel_cache, "_CHUNK_BYTES", 20)
    assert values(VideoFolder(section(acts))) == [[30, 31, 32], [10, 11, 12], [20, 21, 22]]


def test_without_pyav_the_error_says_how_to_install_it(acts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"data\.name: video_folder .* PyAV, .* pip install 'fewstep\[video\]'"):
        VideoFolder(section(acts))


def test_a_disk_that_is_too_small_is_found_before_the_videos_are_decoded(acts: Path):
    side = int((2 * shutil.disk_usage(acts).free / 9) ** 0.5) + 1
    with pytest.raises(UserError, match=rf"data\.cache: .* the decoded pixels need {9 * side**2 / 2**30:.1f} GiB"):
        VideoFolder(section(acts, size=side))


@pytest.mark.parametrize("setting", [{"frames": 0}, {"stride": 0}, {"channels": 2}, {"size": 0}, {"clips": 2}])
def test_settings_out_of_range_are_refused(acts: Path, setting: dict):
    with pytest.raises(ValidationError, match=next(iter(setting))):
        section(acts, **setting)

"""Clips as files: what is read back is what was written, at the times that were asked for."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from fewstep.errors import UserError
from fewstep.evaluate.clip import check_fps, mp4_writer, save_clip_grid, save_gif, save_mp4
from fewstep.evaluate.picture import save_film, save_grid, to_uint8


def noise(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


def smooth(frames: int, channels: int, height: int, width: int) -> Tensor:
    """A clip without edges, so that colour at half resolution loses nothing."""
    t, y, x = (torch.linspace(0, 1, size) for size in (frames, height, width))
    ramps = [
        t[:, None, None] * y[:, None] * x,
        (1 - y)[:, None] * x + 0 * t[:, None, None],
        (y[:, None] - x) ** 2 + 0 * t[:, None, None],
    ]
    return 2 * torch.stack(ramps[:channels], 1) - 1


def enlarged(frames: np.ndarray, factor: int) -> np.ndarray:
    return frames.repeat(factor, 1).repeat(factor, 2)


def gif_frames(path: Path, mode: str) -> np.ndarray:
    with Image.open(path) as image:
        return np.stack([np.asarray(frame.convert(mode)) for frame in ImageSequence.Iterator(image)])


def gif_durations(path: Path) -> list[int]:
    with Image.open(path) as image:
        return [frame.info["duration"] for frame in ImageSequence.Iterator(image)]


def mp4_frames(path: Path) -> tuple[np.ndarray, float]:
    av = pytest.importorskip("av")
    with av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]), rate


def test_a_gif_of_a_grey_clip_holds_exactly_its_pixels_enlarged_by_a_whole_number(tmp_path: Path):
    clip = noise(5, 1, 30, 17)
    save_gif(tmp_path / "new" / "clip.gif", clip)
    expected = enlarged(to_uint8(clip[None])[0, :, 0].numpy(), 5)
    assert np.array_equal(gif_frames(tmp_path / "new" / "clip.gif", "L"), expected)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["clip.gif"]


def test_a_gif_of_few_colours_is_exact_and_one_of_many_is_near(tmp_path: Path):
    few = noise(3, 3, 4, 5)
    save_gif(tmp_path / "few.gif", few)
    expected = enlarged(to_uint8(few[None])[0].permute(0, 2, 3, 1).numpy(), 32)
    assert np.array_equal(gif_frames(tmp_path / "few.gif", "RGB"), expected)
    many = smooth(3, 3, 128, 130)
    save_gif(tmp_path / "many.gif", many)
    found, expected = gif_frames(tmp_path / "many.gif", "RGB"), to_uint8(many[None])[0].permute(0, 2, 3, 1).numpy()
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).mean() < 8


def test_a_gif_keeps_time_though_it_counts_in_hundredths_of_a_second(tmp_path: Path):
    save_gif(tmp_path / "clip.gif", noise(12, 1, 4, 4), fps=12.0)
    durations = gif_durations(tmp_path / "clip.gif")
    assert sum(durations) == 1000
    assert set(durations) == {80, 90}
    still = noise(1, 1, 4, 4).expand(10, -1, -1, -1)
    save_gif(tmp_path / "still.gif", still, fps=5.0)
    assert sum(gif_durations(tmp_path / "still.gif")) == 2000, "equal frames may be one, shown longer"
    with Image.open(tmp_path / "clip.gif") as image:
        assert image.info["loop"] == 0, "for ever"


@pytest.mark.parametrize("fps", [0.0, -3.0, float("nan"), float("inf"), 51.0, 0.0015, 1e-9])
def test_a_gif_refuses_frame_rates_that_it_cannot_keep(tmp_path: Path, fps: float):
    with pytest.raises(UserError, match="frame"):
        save_gif(tmp_path / "clip.gif", noise(2, 1, 4, 4), fps=fps)
    assert list(tmp_path.iterdir()) == []


def test_a_frame_of_a_gif_lasts_as_long_as_two_bytes_can_say_and_no_longer(tmp_path: Path):
    """Hundredths of a second: 65535 of them at most, also for a picture that stands still."""
    save_gif(tmp_path / "clip.gif", noise(3, 1, 4, 4), fps=0.00153)
    assert gif_durations(tmp_path / "clip.gif") == [653_590, 653_600, 653_590]
    save_gif(tmp_path / "longest.gif", noise(2, 1, 4, 4), fps=100 / 65535)
    assert gif_durations(tmp_path / "longest.gif") == [655_350] * 2
    with pytest.raises(UserError, match=r"lasts at most 655.35 s, .* fps = 0.0015 is too low; write 0.00153 or more"):
        check_fps(tmp_path / "clip.gif", 0.0015)
    still = noise(1, 1, 4, 4).expand(7, -1, -1, -1)
    with pytest.raises(UserError, match=r"stands still for more than the 655.35 s .* write an .mp4, or more frames"):
        save_gif(tmp_path / "still.gif", still, fps=0.01)
    assert {path.name for path in tmp_path.iterdir()} == {"clip.gif", "longest.gif"}


@pytest.mark.parametrize(
    ("fps", "message"),
    [
        (0.0004, "a frame of an mp4 lasts at most 1000.00 s, so that fps = 0.0004 is too low; write 0.001 or more"),
        (1e12, "an mp4 shows at most 100000 frames a second, not 1e"),
    ],
)
def test_an_mp4_refuses_frame_rates_that_it_cannot_keep(tmp_path: Path, fps: float, message: str):
    pytest.importorskip("av")
    with pytest.raises(UserError, match=message):
        save_mp4(tmp_path / "clip.mp4", noise(2, 1, 4, 4), fps=fps)
    assert list(tmp_path.iterdir()) == []
    for kept in (0.001, 100_000.0):
        save_mp4(tmp_path / f"{kept}.mp4", noise(2, 1, 4, 4), fps=kept)
        assert mp4_frames(tmp_path / f"{kept}.mp4")[1] == kept


def test_an_mp4_of_a_grey_clip_is_the_clip_but_for_rounding(tmp_path: Path):
    pytest.importorskip("av")
    clip = smooth(7, 1, 20, 31)
    save_mp4(tmp_path / "clip.mp4", clip, fps=12.5)
    found, rate = mp4_frames(tmp_path / "clip.mp4")
    expected = enlarged(to_uint8(clip[None])[0, :, 0].numpy(), 7)
    assert rate == 12.5
    assert found.shape == (7, 140, 218, 3), "an odd width has one column more"
    assert np.abs(found[:, :, :217].astype(int) - expected[..., None]).max() <= 6
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_an_mp4_of_a_colour_clip_keeps_its_colours(tmp_path: Path):
    pytest.importorskip("av")
    clip = smooth(4, 3, 128, 160)
    save_mp4(tmp_path / "clip.mp4", clip)
    found, rate = mp4_frames(tmp_path / "clip.mp4")
    expected = to_uint8(clip[None])[0].permute(0, 2, 3, 1).numpy()
    assert rate == 8
    assert np.abs(found.astype(int) - expected).mean() < 3


def test_pictures_reach_an_mp4_one_by_one_and_an_error_leaves_none(tmp_path: Path):
    pytest.importorskip("av")
    with mp4_writer(tmp_path / "clip.mp4") as write:
        for grey in range(0, 250, 50):
            write(Image.new("L", (16, 18), grey))
    found, _ = mp4_frames(tmp_path / "clip.mp4")
    assert found.mean((1, 2, 3)).tolist() == pytest.approx(range(0, 250, 50), abs=2)

    def fail() -> None:
        with mp4_writer(tmp_path / "other.mp4") as write:
            write(Image.new("L", (16, 16)))
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_without_pyav_an_mp4_is_refused_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match=r"pip install fewstep\[video\], or write a \.gif"):
        save_mp4(tmp_path / "clip.mp4", noise(2, 1, 4, 4))
    assert list(tmp_path.iterdir()) == []


def test_the_module_needs_no_pyav_before_an_mp4_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *others: Any, **more: Any) -> Any:
        assert name.split(".")[0] != "av"
        return real(name, *others, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    save_gif(tmp_path / "clip.gif", noise(2, 1, 4, 4))


def test_a_grid_of_clips_plays_the_grid_of_their_frames(tmp_path: Path):
    rows = [noise(2, 4, 1, 16, 12), -noise(2, 4, 1, 16, 12)]
    save_clip_grid(tmp_path / "grid.gif", rows, ["teacher", "student"], ["a", "b"], fps=10.0)
    found = gif_frames(tmp_path / "grid.gif", "L")
    assert len(found) == 4
    for frame in range(4):
        save_grid(tmp_path / "one.png", [row[:, frame : frame + 1] for row in rows], ["teacher", "student"], ["a", "b"])
        assert np.array_equal(found[frame], np.asarray(Image.open(tmp_path / "one.png").convert("L")))
    assert gif_durations(tmp_path / "grid.gif") == [100] * 4


def test_in_a_grid_a_shorter_clip_stands_still_at_its_end(tmp_path: Path):
    long, short = noise(1, 5, 3, 48, 40), noise(1, 2, 3, 48, 40)
    save_clip_grid(tmp_path / "grid.gif", [long, short])
    with_end = torch.cat([short, short[:, -1:].expand(-1, 3, -1, -1, -1)], 1)
    save_clip_grid(tmp_path / "other.gif", [long, with_end])
    assert (tmp_path / "grid.gif").read_bytes() == (tmp_path / "other.gif").read_bytes()


def test_a_grid_of_clips_is_an_mp4_too_and_nothing_else(tmp_path: Path):
    with pytest.raises(UserError, match=r"written as \.gif or \.mp4"):
        save_clip_grid(tmp_path / "grid.webm", [noise(1, 2, 1, 8, 8)])
    pytest.importorskip("av")
    save_clip_grid(tmp_path / "grid.MP4", [smooth(3, 1, 48, 48)[None]] * 2, ["one", "two"])
    found, _ = mp4_frames(tmp_path / "grid.MP4")
    save_clip_grid(tmp_path / "grid.gif", [smooth(3, 1, 48, 48)[None]] * 2, ["one", "two"])
    expected = gif_frames(tmp_path / "grid.gif", "L")
    height, width = expected.shape[1:]
    assert np.abs(found[:, :height, :width].mean(-1) - expected).mean() < 3


def test_a_film_strip_is_a_clip_a_row_with_time_to_the_right(tmp_path: Path):
    clips = noise(2, 5, 1, 16, 16)
    save_film(tmp_path / "film.png", clips, ["one", "two"])
    save_grid(tmp_path / "grid.png", [clip[:, None] for clip in clips], ["one", "two"], ["0", "1", "2", "3", "4"])
    assert (tmp_path / "film.png").read_bytes() == (tmp_path / "grid.png").read_bytes()


def test_of_a_long_clip_a_film_strip_shows_every_so_many_frames(tmp_path: Path):
    clips = noise(1, 23, 1, 16, 16)
    save_film(tmp_path / "film.png", clips, most=8)
    chosen = [0, 3, 6, 9, 12, 15, 18, 21]
    save_grid(tmp_path / "grid.png", [clips[0, chosen, None]], column_names=[str(frame) for frame in chosen])
    assert (tmp_path / "film.png").read_bytes() == (tmp_path / "grid.png").read_bytes()

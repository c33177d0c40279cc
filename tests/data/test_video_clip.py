"""One video file: exact pixels where it is stored without loss, and a reason for everything that cannot be shown."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fewstep.data.video_clip import read_clip

av = pytest.importorskip("av")

RNG = np.random.default_rng(5)
GREY = RNG.integers(0, 256, (7, 6, 10), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (7, 6, 10, 3), dtype=np.uint8)
SMOOTH = np.add.outer(np.arange(9) * 4, np.add.outer(np.arange(64), np.arange(96))).astype(np.uint8)


def test_the_frames_of_a_file_without_loss_are_unchanged(tmp_path: Path, write_video):
    """Frames come first, then channels; rows are the height."""
    found = read_clip(write_video(tmp_path / "a.mkv", COLOUR), 7, 1, 3, 6, 10)
    np.testing.assert_array_equal(found, COLOUR.transpose(0, 3, 1, 2))
    found = read_clip(write_video(tmp_path / "b.mkv", GREY), 7, 1, 1, 6, 10)
    np.testing.assert_array_equal(found, GREY[:, None])
    found = read_clip(write_video(tmp_path / "c.avi", COLOUR, "rawvideo", "bgr24"), 7, 1, 3, 6, 10)
    np.testing.assert_array_equal(found, COLOUR.transpose(0, 3, 1, 2))


def test_grey_becomes_three_equal_channels(tmp_path: Path, write_video):
    found = read_clip(write_video(tmp_path / "a.mkv", GREY), 7, 1, 3, 6, 10)
    np.testing.assert_array_equal(found, GREY[:, None].repeat(3, 1))


@pytest.mark.parametrize(("frames", "stride", "taken"), [(3, 1, [0, 1, 2]), (4, 2, [0, 2, 4, 6]), (3, 3, [0, 3, 6])])
def test_every_stride_th_frame_is_taken_from_the_first_on(tmp_path: Path, write_video, frames, stride, taken):
    """Also where the last one that is needed is the last of the file."""
    found = read_clip(write_video(tmp_path / "a.mkv", GREY), frames, stride, 1, 6, 10)
    np.testing.assert_array_equal(found[:, 0], GREY[taken])


def test_a_faint_tint_is_the_error_of_a_codec_and_a_stronger_one_is_a_colour(tmp_path: Path, write_video):
    """The brightness of a pixel (ITU-R BT.601) stays; for 3 channels nothing is taken away."""
    frames = GREY[..., None].clip(0, 250).repeat(3, -1)
    frames[..., 2] += 4
    path = write_video(tmp_path / "a.mkv", frames)
    brightness = (frames @ np.array([0.299, 0.587, 0.114])).round()
    np.testing.assert_array_equal(read_clip(path, 7, 1, 1, 6, 10)[:, 0], brightness)
    np.testing.assert_array_equal(read_clip(path, 7, 1, 3, 6, 10), frames.transpose(0, 3, 1, 2))
    frames[2, 3, 4, 2] += 1
    with pytest.raises(ValueError, match="frame 2: colours"):
        read_clip(write_video(tmp_path / "b.mkv", frames), 7, 1, 1, 6, 10)


@pytest.mark.parametrize(("codec", "name", "error"), [("mpeg4", "a.mp4", 4), ("libx264", "b.mov", 4)])
def test_common_codecs_keep_the_picture_and_the_order_of_the_frames(tmp_path: Path, write_video, codec, name, error):
    """Grey stays grey in files that store colours; frames that were stored in another order come in the right one."""
    found = read_clip(write_video(tmp_path / name, SMOOTH, codec, "yuv420p"), 9, 1, 1, 64, 96)[:, 0].astype(int)
    assert np.abs(found - SMOOTH).mean() < error
    distances = np.abs(found[:, None] - SMOOTH[None]).mean((2, 3))
    assert distances.argmin(1).tolist() == list(range(9))


def test_an_animated_gif_is_a_video(tmp_path: Path):
    images = [Image.fromarray(frame) for frame in GREY[:3] // 128 * 255]
    images[0].save(tmp_path / "a.gif", save_all=True, append_images=images[1:])
    found = read_clip(tmp_path / "a.gif", 3, 1, 1, 6, 10)
    np.testing.assert_array_equal(found[:, 0], GREY[:3] // 128 * 255)


def test_frames_are_cut_and_resized_as_still_images_are(tmp_path: Path, write_video):
    """The middle square of 6 x 10; a checkerboard becomes its mean."""
    path = write_video(tmp_path / "a.mkv", GREY)
    np.testing.assert_array_equal(read_clip(path, 7, 1, 1, 6, 6)[:, 0], GREY[:, :, 2:8])
    board = np.indices((64, 64)).sum(0)[None].repeat(2, 0) % 2 * 200
    found = read_clip(write_video(tmp_path / "b.mkv", board.astype(np.uint8)), 2, 1, 1, 4, 4)
    assert np.abs(found.astype(int) - 100).max() <= 2


@pytest.mark.parametrize(
    ("matrix", "turned"),
    [
        ((0, 1, 0, -1, 0, 0), lambda frames: np.rot90(frames, -1, (1, 2))),
        ((-1, 0, 0, 0, -1, 0), lambda frames: np.rot90(frames, 2, (1, 2))),
    ],
    ids=("clockwise", "upside down"),
)
def test_videos_of_a_turned_telephone_are_shown_upright(tmp_path: Path, write_video, matrix, turned):
    """The matrix in the track's header says how a player turns the frames."""
    path = write_video(tmp_path / "a.mp4", COLOUR, "libx264rgb", "rgb24", qp="0")
    content = bytearray(path.read_bytes())
    start = content.index(b"tkhd") + 4 + 40
    content[start : start + 36] = struct.pack(">9i", *(value << 16 for value in matrix), 0, 0, 1 << 30)
    path.write_bytes(content)
    expected = turned(COLOUR)
    found = read_clip(path, 7, 1, 3, *expected.shape[1:3])
    np.testing.assert_array_equal(found, expected.transpose(0, 3, 1, 2))


def test_pixels_that_are_not_square_are_stretched(tmp_path: Path, write_video):
    path = write_video(tmp_path / "a.mp4", COLOUR, "libx264rgb", "rgb24", Fraction(2, 1), qp="0")
    expected = np.stack(
        [np.asarray(Image.fromarray(frame).resize((20, 6), Image.Resampling.BICUBIC)) for frame in COLOUR]
    )
    np.testing.assert_array_equal(read_clip(path, 7, 1, 3, 6, 20), expected.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(("frames", "stride", "needed"), [(8, 1, 8), (4, 3, 10)])
def test_a_video_that_is_too_short_is_refused_with_both_numbers(tmp_path, write_video, frames, stride, needed):
    path = write_video(tmp_path / "a.mkv", GREY)
    message = f"^7 frames, where data.frames: {frames} with data.stride: {stride} needs {needed}$"
    with pytest.raises(ValueError, match=message):
        read_clip(path, frames, stride, 1, 6, 10)


def test_colours_and_transparency_are_refused_where_they_would_be_dropped(tmp_path: Path, write_video):
    """A single coloured frame is enough, if it is one of those that are taken."""
    frames = GREY[..., None].repeat(3, -1)
    frames[4] = COLOUR[4]
    path = write_video(tmp_path / "a.mkv", frames)
    with pytest.raises(ValueError, match=r"frame 4: colours, where data\.channels: 1 asks for grey"):
        read_clip(path, 3, 2, 1, 6, 10)
    np.testing.assert_array_equal(read_clip(path, 3, 3, 1, 6, 10)[:, 0], GREY[[0, 3, 6]])
    alpha = np.concatenate([COLOUR, np.full_like(COLOUR[..., :1], 255)], axis=-1)
    np.testing.assert_array_equal(
        read_clip(write_video(tmp_path / "b.mkv", alpha), 7, 1, 3, 6, 10), COLOUR.transpose(0, 3, 1, 2)
    )
    alpha[1, 2, 3, 3] = 254
    with pytest.raises(ValueError, match="frame 1: transparent pixels"):
        read_clip(write_video(tmp_path / "c.mkv", alpha), 7, 1, 3, 6, 10)


@pytest.mark.parametrize("codec", ["mpeg4", "libx264"])
def test_a_damaged_frame_is_refused_if_it_is_needed(tmp_path: Path, write_video, codec: str):
    """A decoder mends such frames from their neighbours, and says so; frames before it can be used."""
    noise = RNG.integers(0, 256, (12, 96, 128), dtype=np.uint8)
    path = write_video(tmp_path / "a.mp4", noise, codec, "yuv420p")
    content = bytearray(path.read_bytes())
    place = int(0.8 * len(content))
    content[place : place + 200] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^frame \d+ is damaged$"):
        read_clip(path, 12, 1, 1, 96, 128)
    assert read_clip(path, 3, 1, 1, 96, 128).shape == (3, 1, 96, 128)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, write_video):
    path = write_video(tmp_path / "a.mp4", SMOOTH, "mpeg4", "yuv420p")
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"no video that can be decoded|Invalid data"):
        read_clip(path, 9, 1, 1, 64, 96)


def test_a_file_is_no_video_because_of_its_name(tmp_path: Path, write_video):
    """Neither text nor a list of other files is opened under the name of a video."""
    other = write_video(tmp_path / "a.mp4", SMOOTH, "mpeg4", "yuv420p")
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{other}\n#EXT-X-ENDLIST\n"
    for content in ("no video", playlist, f"ffconcat version 1.0\nfile {other.name}\n"):
        (tmp_path / "b.mp4").write_text(content)
        with pytest.raises(ValueError, match="Invalid"):
            read_clip(tmp_path / "b.mp4", 1, 1, 1, 64, 96)


def test_a_file_without_pictures_is_refused(tmp_path: Path):
    with av.open(str(tmp_path / "a.mkv"), "w") as file:
        stream = file.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        file.mux(stream.encode(frame))
    with pytest.raises(ValueError, match="no video that can be decoded"):
        read_clip(tmp_path / "a.mkv", 1, 1, 1, 6, 10)

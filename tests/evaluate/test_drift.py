"""Drift: where along a clip it goes wrong is what the rows say."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from fewstep.data.moving_fashion_mnist import place
from fewstep.errors import UserError
from fewstep.evaluate.classifier import as_values
from fewstep.evaluate.drift import Drift, drift, drift_table
from fewstep.evaluate.extractor import build_extractor
from fewstep.evaluate.judge import Judge
from fewstep.evaluate.windows import as_windows, window_starts
from tests.evaluate.small import Moving, Stripes, section, shapes

TRAIN, TEST = Moving(400, seed=0), Moving(160, seed=1)
LONG = Moving(80, seed=2, frames=24)
"""4 times as long as the clips that the judge knows."""


@pytest.fixture(scope="module")
def judge(shared_cache: Path) -> Judge:
    return Judge(build_extractor(section(shared_cache, updates=150), TRAIN, "cpu"), TEST, shared_cache)


@pytest.fixture(scope="module")
def real(judge: Judge) -> list[Drift]:
    """The rows of real clips."""
    return drift(LONG.values, LONG.label, judge)


@pytest.mark.parametrize(
    ("num_frames", "frames", "every", "starts"),
    [
        (24, 6, None, [0, 6, 12, 18]),
        (25, 6, None, [0, 6, 12, 18, 19]),
        (6, 6, None, [0]),
        (7, 6, None, [0, 1]),
        (10, 4, 3, [0, 3, 6]),
        (3, 1, None, [0, 1, 2]),
    ],
)
def test_windows_stand_side_by_side_and_the_last_ends_with_the_clip(num_frames, frames, every, starts):
    assert window_starts(num_frames, frames, every) == starts


def test_a_clip_shorter_than_the_real_ones_is_refused_with_both_numbers(judge: Judge):
    with pytest.raises(UserError, match=r"clips of 5 frames .* data of 6 frames"):
        drift(LONG.values[:, :5], LONG.label, judge)
    with pytest.raises(UserError, match=r"clips of 5 frames .* data of 6 frames"):
        judge(LONG.values[:, :5], LONG.label)


def test_every_window_keeps_the_label_of_its_clip():
    windows, labels = as_windows(LONG.values[:3, :11], LONG.label[:3], 6)
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.equal(windows, torch.cat([LONG.values[:3, 0:6], LONG.values[:3, 5:11]]))


def test_each_row_is_the_judgement_of_its_window_alone(judge: Judge, real: list[Drift]):
    assert [row.first_frame for row in real] == [0, 6, 12, 18]
    for row in real:
        alone = judge(LONG.values[:, row.first_frame : row.first_frame + 6], LONG.label)
        assert row.model_dump(exclude={"first_frame"}) == alone.model_dump()
    assert [row.first_frame for row in drift(LONG.values, LONG.label, judge, every=9)] == [0, 9, 18]


def test_a_long_clip_is_judged_by_all_its_windows_together(judge: Judge):
    whole = judge(LONG.values, LONG.label)
    windows = torch.cat([LONG.values[:, start : start + 6] for start in (0, 6, 12, 18)])
    assert whole == judge(windows, LONG.label.repeat(4))


def test_real_clips_do_not_drift(real: list[Drift]):
    assert all(row.motion_error is not None and row.motion_error < 0.08 for row in real)
    assert all(row.item_accuracy is not None and row.item_accuracy > 0.9 for row in real)
    assert max(row.frechet for row in real) < 3 * min(row.frechet for row in real)


def frozen(clips: Tensor, frame: int) -> Tensor:
    return torch.cat([clips[:, :frame], clips[:, frame - 1 : frame].expand(-1, clips.shape[1] - frame, -1, -1, -1)], 1)


def test_a_clip_that_freezes_is_told_by_its_motion_error_from_there_on(judge: Judge, real: list[Drift]):
    rows = drift(frozen(LONG.values, 12), LONG.label, judge)
    assert rows[:2] == real[:2]
    assert all(row.motion_error is not None and row.motion_error > 0.5 for row in rows[2:])
    assert all(row.frechet > 3 * real[0].frechet for row in rows[2:])


def test_an_item_that_turns_into_the_other_is_told_by_item_accuracy_alone_from_there_on(judge: Judge):
    swapped = as_values(place(shapes()[1 - LONG.label // 2], LONG.centres, 16))
    clips = torch.cat([LONG.values[:, :18], swapped[:, 18:]], 1)
    rows = drift(clips, LONG.label, judge)
    item = [row.item_accuracy for row in rows]
    assert all(value is not None and value > 0.9 for value in item[:3])
    assert item[3] is not None
    assert item[3] < 0.1
    assert all(row.motion_error is not None and row.motion_error < 0.1 for row in rows)


def test_noise_that_grows_is_told_by_a_distance_that_grows(judge: Judge):
    growing = torch.linspace(0, 1.2, 24).view(24, 1, 1, 1) * torch.randn(LONG.values.shape)
    distances = [row.frechet for row in drift(LONG.values + growing, LONG.label, judge)]
    assert distances == sorted(distances)
    assert distances[3] > 5 * distances[0]


def test_a_window_that_is_not_finite_is_nan_and_no_other(judge: Judge, real: list[Drift]):
    clips = LONG.values.clone()
    clips[5, 13] = torch.nan
    first, second, bad, last = drift(clips, LONG.label, judge)
    assert [first, second, last] == [real[0], real[1], real[3]]
    assert all(math.isnan(value) for name, value in bad.model_dump().items() if name != "first_frame")


def test_drift_of_images_is_that_of_every_frame_and_knows_no_motion(tmp_path: Path):
    stripes = Stripes(150, seed=0)
    judge = Judge(build_extractor(section(tmp_path, updates=40), stripes, "cpu"), stripes, tmp_path)
    values = stripes.pixels.float() / 127.5 - 1
    rows = drift(torch.cat([values, -values], 1), stripes.label, judge)
    assert [row.first_frame for row in rows] == [0, 1]
    assert rows[1].frechet > 10 * rows[0].frechet
    assert rows[0].motion_error is rows[0].item_accuracy is None


def test_the_table_has_a_line_for_each_window(real: list[Drift]):
    console = Console(file=io.StringIO(), width=80)
    console.print(drift_table(real, "student"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("student", "From frame", "Item", "Motion", "Error", *(f"{row.frechet:.3g}" for row in real)):
        assert part in text
    assert "…" not in text

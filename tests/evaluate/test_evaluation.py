"""An evaluation says what was measured, for how much, and how sure it is."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from fewstep.errors import UserError
from fewstep.evaluate.drift import Drift
from fewstep.evaluate.evaluation import (
    Evaluation,
    evaluate,
    evaluate_real,
    evaluation_table,
    load_evaluations,
    save_evaluations,
)
from fewstep.evaluate.extractor import build_extractor
from fewstep.evaluate.judge import Judge, Quality
from fewstep.evaluate.motion import motion_errors
from fewstep.evaluate.sample import balanced_labels, generate
from fewstep.models.codec import IdentityCodec, IdentitySection
from fewstep.rollout.few_step import FewStep, SamplingSection
from tests.evaluate.small import (
    MOVING_SHAPE,
    PHYSICS,
    SHAPE,
    Moving,
    Stripes,
    StripesConditioner,
    StripesModel,
    section,
)

TRAIN, TEST = Stripes(150, seed=0), Stripes(120, seed=1)
CODEC = IdentityCodec(IdentitySection())
FOUR = FewStep.of(SamplingSection(steps=4, shift=2.0, solver="ode"), SHAPE)


@pytest.fixture(scope="module")
def judge(shared_cache: Path) -> Judge:
    return Judge(build_extractor(section(shared_cache, updates=40), TRAIN, "cpu"), TEST, shared_cache)


def run(judge: Judge, model: Any = None, sampler: FewStep = FOUR, **settings: Any) -> Evaluation:
    settings = {"num_samples": 80, "batch": 30} | settings
    return evaluate("student", model or StripesModel(), sampler, StripesConditioner(), CODEC, judge, **settings)


def judged(judge: Judge, seed: int, stop: int | None = None) -> Any:
    labels = balanced_labels(80, 3)
    return judge(generate(StripesModel(), FOUR, StripesConditioner(), labels, seed, stop=stop).x0, labels)


def test_each_seed_is_judged_by_itself_and_the_mean_and_spread_reported(judge: Judge):
    found = run(judge, seeds=(3, 8, 5))
    for quality, seed in zip(found.per_seed, (3, 8, 5), strict=True):
        assert quality.frechet == pytest.approx(judged(judge, seed).frechet, rel=1e-4)
    distances = torch.tensor([quality.frechet for quality in found.per_seed]).double()
    assert found.frechet == pytest.approx(distances.mean().item())
    assert found.spread.frechet == pytest.approx(distances.std().item())
    assert found.spread.frechet > 0
    assert math.isnan(run(judge, seeds=(3,)).spread.frechet)


def test_every_stop_is_judged_by_the_prediction_there_and_the_last_is_the_whole(judge: Judge):
    found = run(judge, seeds=(3,), stops=True)
    assert [(stop.stop, stop.sigma) for stop in found.stops] == list(enumerate(FOUR.sigmas))
    for stop in found.stops:
        assert stop.frechet == pytest.approx(judged(judge, 3, stop.stop).frechet, rel=1e-4)
    assert found.stops[-1].frechet == found.frechet
    assert found.stops[0].coverage < found.coverage, "one step of the exact velocity gives the mean of the class"
    assert run(judge, seeds=(3,)).stops == ()


def test_what_it_rests_on_is_recorded(judge: Judge):
    guided = FewStep.of(SamplingSection(steps=4, shift=2.0, solver="ode", guidance_scale=1.5), SHAPE)
    found = run(judge, sampler=guided)
    assert (found.num_steps, found.network_calls, found.num_samples, found.batch) == (4, 8, 80, 30)
    assert (found.sigmas, found.solver, found.guidance_scale, found.device) == (FOUR.sigmas, "ode", 1.5, "cpu")
    assert (found.extractor, found.reference) == (judge.extractor.id, judge.reference_id)
    assert found.extractor_accuracy == judge.accuracy


def test_the_time_of_an_image_is_that_of_sampling_without_the_first_batch(judge: Judge):
    """30 images in 4 calls of 6 ms are 0.8 ms an image; the 0.3 s of the first call do not count."""

    class Slow(StripesModel):
        calls = 0

        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            self.calls += 1
            time.sleep(0.3 if self.calls == 1 else 0.006)
            return super().velocity(x_t, sigma, cond)

    slow = Slow()
    found = run(judge, slow)
    assert found.ms_per_image is not None
    assert 0.8 <= found.ms_per_image < 5
    assert slow.calls == (1 + 3) * 4


def test_too_few_samples_are_refused_before_the_network_is_called(judge: Judge):
    class Never(StripesModel):
        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            raise AssertionError

    with pytest.raises(UserError, match="samples = 64"):
        run(judge, Never(), num_samples=64)


def test_the_codec_decodes_what_is_judged(judge: Judge):
    """A model of latents that are the pixels less 0.4 is exactly as good under the codec that adds 0.4."""

    class Moved(StripesModel):
        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            clean = 1 - sigma[:, :, None, None, None]
            return super().velocity(x_t + clean * 0.4, sigma, cond) + 0.4

    codec = IdentityCodec(IdentitySection(mean=(0.4,)))
    moved = evaluate("student", Moved(), FOUR, StripesConditioner(), codec, judge, num_samples=80, batch=30)
    assert moved.frechet == pytest.approx(run(judge).frechet, rel=1e-2)
    assert run(judge, Moved()).frechet > 2 * moved.frechet, "under the wrong codec"


def test_real_data_make_a_row_of_their_own(judge: Judge):
    found = evaluate_real(judge, TRAIN, 1000)
    assert (found.name, found.num_steps, found.network_calls, found.ms_per_image) == ("real data", 0, 0, None)
    assert found.num_samples == 150
    assert found.frechet == judge.real(TRAIN, 150).frechet


def test_evaluations_survive_the_way_through_a_file(tmp_path: Path, judge: Judge):
    class Diverged(StripesModel):
        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            return x_t * torch.nan

    entries = [evaluate_real(judge, TRAIN, 90), run(judge, seeds=(0, 1), stops=True)]
    save_evaluations(tmp_path / "sub" / "evaluation.json", entries)
    assert load_evaluations(tmp_path / "sub" / "evaluation.json") == entries
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["evaluation.json"]
    save_evaluations(tmp_path / "nan.json", [run(judge, Diverged())])
    (bad,) = load_evaluations(tmp_path / "nan.json")
    assert math.isnan(bad.frechet)
    assert '"frechet": "NaN"' in (tmp_path / "nan.json").read_text()


def test_files_without_evaluations_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"gone.json' holds no evaluations"):
        load_evaluations(tmp_path / "gone.json")
    (tmp_path / "other.json").write_text('[{"frechet": 1}]')
    with pytest.raises(UserError, match="holds no evaluations"):
        load_evaluations(tmp_path / "other.json")


def test_the_table_has_a_row_for_each_with_the_spread_of_several_seeds(judge: Judge):
    entries = [evaluate_real(judge, TRAIN, 90), run(judge), run(judge, seeds=(0, 1))]
    console = Console(file=io.StringIO(), width=160)
    console.print(evaluation_table(entries))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    rows = [line for line in text.splitlines() if line.strip().startswith(("student", "real data"))]
    assert len(rows) == 3
    assert f"{entries[1].frechet:.3g}" in rows[1]
    assert "±" not in rows[1]
    assert f"{entries[2].frechet:.3g} ± {entries[2].spread.frechet:.1g}" in rows[2]
    assert judge.extractor.id in text
    assert "80 to 90 samples" in text


def test_the_table_fits_into_80_columns(judge: Judge):
    console = Console(file=io.StringIO(), width=80)
    console.print(evaluation_table([evaluate_real(judge, TRAIN, 90), run(judge)]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    for heading in ("Model", "Steps", "Calls", "Frechet", "Acc.", "Prec.", "Recall", "Cover.", "ms"):
        assert heading in text


MOVING, OTHER = Moving(400, seed=0), Moving(100, seed=1)


class MovingModel(StripesModel):
    """Makes the first clip of each class of the data, whatever the noise."""

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        return (x_t - MOVING.values[cond.label].to(x_t)) / sigma[:, :, None, None, None]


@pytest.fixture(scope="module")
def of_clips(shared_cache: Path) -> tuple[Evaluation, Evaluation]:
    """Real clips, and a model of clips."""
    judge = Judge(build_extractor(section(shared_cache, updates=150), MOVING, "cpu"), OTHER, shared_cache)
    sampler = FewStep.of(SamplingSection(steps=2), MOVING_SHAPE)
    model = evaluate("student", MovingModel(), sampler, StripesConditioner(), CODEC, judge, num_samples=70, batch=50)
    return evaluate_real(judge, MOVING, 100), model


def test_clips_are_evaluated_with_their_motion(of_clips: tuple[Evaluation, Evaluation]):
    real, model = of_clips
    assert (real.num_frames, model.num_frames) == (6, 6)
    assert model.item_accuracy == 1.0
    expected = motion_errors(MOVING.values[:4], MOVING.label[:4] % 2, PHYSICS).mean(1)[torch.arange(70) % 4].mean()
    assert model.motion_error == pytest.approx(expected.item(), abs=1e-3)
    assert model.recall < 0.2 < real.recall, "four clips are no variety"
    assert model.ms_per_image is not None
    assert model.frames_per_s == pytest.approx(6000 / model.ms_per_image)
    assert real.frames_per_s is None


def test_drift_goes_into_the_file_with_the_rest(tmp_path: Path, of_clips: tuple[Evaluation, Evaluation]):
    real, model = of_clips
    quality = {name: getattr(model, name) for name in Quality.model_fields}
    longer = model.model_copy(update={"drift": tuple(Drift(**quality, first_frame=first) for first in (0, 6))})
    save_evaluations(tmp_path / "evaluation.json", [real, longer])
    assert load_evaluations(tmp_path / "evaluation.json") == [real, longer]


def test_a_file_of_images_from_before_there_were_clips_is_still_read(tmp_path: Path, judge: Judge):
    entry = evaluate_real(judge, TRAIN, 90)
    new = {"item_accuracy", "motion_accuracy", "motion_error", "num_frames", "drift"}
    (tmp_path / "old.json").write_text(json.dumps([entry.model_dump(mode="json", exclude=new)]))
    assert load_evaluations(tmp_path / "old.json") == [entry]


def test_the_table_of_clips_fits_into_80_columns(of_clips: tuple[Evaluation, Evaluation]):
    console = Console(file=io.StringIO(), width=80)
    console.print(evaluation_table(of_clips))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    for heading in ("Frechet", "Item", "Motion", "Error", "Recall", "Cover.", "fps"):
        assert heading in text
    (row,) = [line for line in text.splitlines() if line.strip().startswith("student")]
    assert float(row.split()[-1].replace(",", "")) == pytest.approx(of_clips[1].frames_per_s, rel=0.01)
    assert "Acc." not in text
    assert "Prec." not in text

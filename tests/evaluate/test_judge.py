"""The judge: better samples score better, and nothing else counts."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from fewstep.errors import UserError
from fewstep.evaluate import judge as judge_module
from fewstep.evaluate.classifier import as_values
from fewstep.evaluate.extractor import build_extractor
from fewstep.evaluate.judge import Judge, Quality, chosen_ids, filled, mean, spread
from fewstep.evaluate.motion import motion_errors
from fewstep.evaluate.quality import Gaussian, frechet_distance, neighbourhood
from fewstep.rng import permutation
from tests.evaluate.small import PHYSICS, Moving, Stripes, section

TRAIN, TEST = Stripes(150, seed=0), Stripes(120, seed=1)
MOVING, OTHER = Moving(400, seed=0), Moving(100, seed=1)


@pytest.fixture(scope="module")
def judge(shared_cache: Path) -> Judge:
    return Judge(build_extractor(section(shared_cache, updates=40), TRAIN, "cpu"), TEST, shared_cache)


@pytest.fixture(scope="module")
def moving(shared_cache: Path) -> Judge:
    """A judge of clips of items in motion."""
    return Judge(build_extractor(section(shared_cache, updates=150), MOVING, "cpu"), OTHER, shared_cache)


def test_a_judgement_is_the_formulas_on_the_features_of_8_bit_pictures(judge: Judge):
    items = Stripes(90, seed=2).items(range(90))
    features = judge.extractor.features(as_values(items.pixels))
    real = judge.extractor.features(as_values(TEST.pixels))
    logits = judge.extractor.logits(features)
    assert logits is not None
    between = as_values(items.pixels) + 0.3 / 127.5  # rounds to the same 8 bits
    found = judge(between, items.label)
    assert found.frechet == pytest.approx(frechet_distance(Gaussian.of(features), Gaussian.of(real)))
    assert found.accuracy == pytest.approx((logits.argmax(1) == items.label).double().mean().item())
    shares = neighbourhood(features, real[chosen_ids(120, 90)])
    assert (found.precision, found.recall, found.coverage) == pytest.approx(shares)


def test_real_data_are_near_and_noise_is_far(judge: Judge):
    real = judge.real(TRAIN, 100)
    noise = judge(torch.rand(100, *TEST.shape) * 2 - 1, torch.arange(100) % 3)
    assert noise.frechet > 20 * real.frechet > 0
    assert real.accuracy is not None
    assert noise.accuracy is not None
    assert real.accuracy > 0.95 > noise.accuracy
    assert real.coverage > 0.8 > noise.coverage
    assert judge.accuracy is not None
    assert judge.accuracy > 0.95


def test_wrong_labels_cost_accuracy_alone(judge: Judge):
    items = Stripes(90, seed=2).items(range(90))
    right = judge(as_values(items.pixels), items.label)
    wrong = judge(as_values(items.pixels), (items.label + 1) % 3)
    assert right.accuracy is not None
    assert wrong.accuracy == pytest.approx(1 - right.accuracy, abs=0.05)
    assert wrong.model_copy(update={"accuracy": right.accuracy}) == right


def test_one_class_out_of_three_costs_recall_and_coverage(judge: Judge):
    rows = torch.arange(0, 120, 3).repeat(3)
    collapsed = judge(as_values(TEST.items(rows).pixels), TEST.items(rows).label)
    assert collapsed.accuracy is not None
    assert collapsed.accuracy > 0.9
    assert collapsed.coverage < 0.45
    assert collapsed.frechet > 5 * judge.real(TRAIN, 120).frechet


def test_a_data_set_that_is_its_own_reference_is_judged_by_halves(tmp_path: Path, judge: Judge):
    """Not by itself, which would say that real data are at distance 0 from real data."""
    own = Judge(judge.extractor, TRAIN, tmp_path)
    one, other = (own.features[half] for half in permutation(0, "halves", 150).chunk(2))
    assert own.real(TRAIN, 70).frechet == pytest.approx(frechet_distance(Gaussian.of(one[:70]), Gaussian.of(other)))
    assert own.real(TRAIN, 1000) == own.real(TRAIN, 75)
    with pytest.raises(UserError, match="60 samples are too few"):
        judge.real(TEST, 120)


def test_diverged_samples_are_judged_by_nan_and_not_by_a_crash(judge: Judge):
    pixels = torch.zeros(90, *TEST.shape)
    pixels[3, 0, 0, 0, 0] = torch.nan
    found = judge(pixels, torch.arange(90) % 3)
    assert all(math.isnan(value) for value in found.model_dump(exclude_none=True).values())


def test_too_few_samples_are_refused_before_anything_is_sampled(judge: Judge):
    judge.check(65, "validation.samples")
    with pytest.raises(UserError, match=r"validation.samples = 64: .* 64 features .* write 65 or more"):
        judge.check(64, "validation.samples")


def test_features_of_the_reference_are_kept_and_follow_the_data(tmp_path: Path, judge: Judge, monkeypatch):
    first = Judge(judge.extractor, TEST, tmp_path)
    calls: list[int] = []
    features_of = judge_module.features_of
    monkeypatch.setattr(judge_module, "features_of", lambda e, p, d: calls.append(len(p)) or features_of(e, p, d))
    second = Judge(judge.extractor, Stripes(120, seed=1), tmp_path)
    assert calls == []
    assert torch.equal(first.features, second.features)
    assert first.reference_id == second.reference_id
    third = Judge(judge.extractor, Stripes(120, seed=3), tmp_path)
    assert calls == [120]
    assert third.reference_id != first.reference_id


def test_of_a_large_reference_a_part_is_used(tmp_path: Path, judge: Judge, monkeypatch):
    monkeypatch.setattr(judge_module, "MAX_REFERENCE", 80)
    small = Judge(judge.extractor, TEST, tmp_path)
    expected = judge.extractor.features(as_values(TEST.pixels[chosen_ids(120, 80)]))
    torch.testing.assert_close(small.features, expected)


@pytest.mark.parametrize(("num", "most"), [(7, 3), (10, 10), (5, 9), (1000, 7)])
def test_chosen_ids_are_distinct_and_always_the_same(num: int, most: int):
    ids = chosen_ids(num, most).tolist()
    assert ids == sorted(set(ids)) == chosen_ids(num, most).tolist()
    assert len(ids) == min(num, most)
    assert set(ids) <= set(range(num))


def test_a_choice_keeps_step_with_no_order_of_the_data():
    """Labels in turn, or class by class: every class keeps its share."""
    ids = chosen_ids(3000, 2000)
    for label in (ids % 3, ids // 1000):
        assert torch.bincount(label).tolist() == pytest.approx([2000 / 3] * 3, rel=0.06)


def test_mean_and_spread_are_taken_metric_by_metric():
    a, b = (
        Quality(frechet=f, accuracy=None, precision=p, recall=0.5, coverage=1.0) for f, p in ((1.0, 0.2), (4.0, 0.6))
    )
    assert mean([a, b]) == Quality(frechet=2.5, accuracy=None, precision=0.4, recall=0.5, coverage=1.0)
    assert spread([a, b]).frechet == pytest.approx(np.std([1, 4], ddof=1))
    assert spread([a, b]).recall == 0
    assert math.isnan(spread([a]).frechet)
    bad = a.model_copy(update={"frechet": math.nan})
    assert math.isnan(mean([a, bad]).frechet)
    assert math.isnan(spread([a, bad]).frechet)


def test_of_items_in_motion_both_parts_of_the_class_are_judged(moving: Judge):
    clips = Moving(80, seed=2)
    logits = moving.extractor.logits(moving.extractor.features(clips.values))
    assert logits is not None
    seen = logits.argmax(1)
    found = moving(clips.values, clips.label)
    assert found.accuracy == pytest.approx((seen == clips.label).double().mean().item())
    assert found.item_accuracy == pytest.approx((seen // 2 == clips.label // 2).double().mean().item())
    assert found.motion_accuracy == pytest.approx((seen % 2 == clips.label % 2).double().mean().item())
    errors = motion_errors(clips.values, clips.label % 2, PHYSICS)
    assert found.motion_error == pytest.approx(errors.mean().item())
    assert found.motion_error < 0.1


def test_the_wrong_item_and_the_wrong_motion_cost_their_own_accuracy_alone(moving: Judge):
    clips = Moving(80, seed=2)
    right = moving(clips.values, clips.label)
    item, motion = moving(clips.values, clips.label ^ 2), moving(clips.values, clips.label ^ 1)
    assert right.item_accuracy is not None
    assert right.motion_accuracy is not None
    assert item.item_accuracy == pytest.approx(1 - right.item_accuracy)
    assert (item.motion_accuracy, item.motion_error) == (right.motion_accuracy, right.motion_error)
    assert motion.motion_accuracy == pytest.approx(1 - right.motion_accuracy)
    assert motion.item_accuracy == right.item_accuracy
    assert motion.motion_error is not None
    assert right.motion_error is not None
    assert motion.motion_error > 3 * right.motion_error


def test_real_clips_are_near_and_frozen_ones_are_far(moving: Judge):
    real = moving.real(MOVING, 100)
    frozen = moving(OTHER.values[:, :1].expand_as(OTHER.values), OTHER.label)
    assert frozen.frechet > 5 * real.frechet
    assert real.motion_error is not None
    assert frozen.motion_error is not None
    assert real.motion_error < 0.1 < 0.5 < frozen.motion_error


def test_real_clips_that_are_their_own_reference_have_the_motion_error_of_what_is_judged(tmp_path: Path, moving: Judge):
    own = Judge(moving.extractor, MOVING, tmp_path)
    judged = permutation(0, "halves", 400).chunk(2)[0][:70]
    errors = motion_errors(MOVING.values[judged], MOVING.label[judged] % 2, PHYSICS)
    assert own.real(MOVING, 70).motion_error == pytest.approx(errors.mean().item())


def test_images_have_no_motion_and_mean_and_spread_leave_it_out(judge: Judge):
    found = judge.real(TRAIN, 100)
    assert found.item_accuracy is found.motion_accuracy is found.motion_error is None
    assert mean([found, found]).motion_error is spread([found, found]).motion_error is None


def test_a_table_shows_what_is_known_and_of_items_in_motion_nothing_that_says_less(judge: Judge):
    images = judge.real(TRAIN, 100)
    assert filled([images]) == ["frechet", "accuracy", "precision", "recall", "coverage"]
    clips = images.model_copy(update={"item_accuracy": 0.5, "motion_accuracy": 0.5, "motion_error": 0.1})
    expected = ["frechet", "item_accuracy", "motion_accuracy", "motion_error", "recall", "coverage"]
    assert filled([clips]) == expected
    assert filled([images.model_copy(update={"accuracy": None})]) == ["frechet", "precision", "recall", "coverage"]

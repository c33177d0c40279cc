"""Validation measures and shows the student as it is sampled, and training is the same without it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor

from fewstep.errors import UserError
from fewstep.evaluate.picture import save_film
from fewstep.evaluate.sample import balanced_labels, generate
from fewstep.evaluate.validation import ValidationSection, Validator
from fewstep.models.blocks import CausalSection
from fewstep.models.codec import IdentityCodec, IdentitySection
from fewstep.models.wan.conditioner import ClassLabelSection
from fewstep.models.wan.model import Wan
from fewstep.rollout.few_step import FewStep, SamplingSection
from fewstep.rollout.self_forcing import SelfForcing
from tests.evaluate.small import MOVING_SHAPE, SHAPE, Moving, Stripes, StripesConditioner, StripesModel, section
from tests.models.tiny import tiny_section, tiny_wan

TRAIN, TEST = Stripes(150, seed=0), Stripes(120, seed=1)
CODEC = IdentityCodec(IdentitySection())
TRAINED = SamplingSection(sigmas=(1.0, 0.9, 0.3), shift=2.0)


@pytest.fixture
def cache(shared_cache: Path) -> Path:
    return shared_cache


def validator(cache: Path, folder: Path | None = None, conditioner: Any = None, **settings: Any) -> Validator:
    settings = {"every": 1, "samples": 70, "extractor": section(cache, updates=40), "batch": 30} | settings
    return Validator(
        ValidationSection(**settings),
        TRAINED,
        conditioner or StripesConditioner(),
        CODEC,
        TRAIN,
        TEST,
        shape=SHAPE,
        folder=folder,
    )


def test_metrics_and_grids_carry_the_number_of_steps(cache: Path, tmp_path: Path):
    check = validator(cache, tmp_path / "samples", steps=(3, 20), columns=5)
    metrics = check(50, StripesModel())
    names = ("frechet", "accuracy", "precision", "recall", "coverage")
    assert set(metrics) == {f"validation/{name}.steps{n}" for name in names for n in (3, 20)}
    assert metrics["validation/accuracy.steps20"] > 0.9
    grids = {path.name: Image.open(path).size for path in (tmp_path / "samples").iterdir()}
    assert set(grids) == {"iteration-000050.steps3.png", "iteration-000050.steps20.png"}
    width, height = grids["iteration-000050.steps3.png"]
    assert width > 5 * 60 + 5 * 2, "5 pictures of 10x6 pixels, and the names"
    assert height == 3 * (48 + 2) + 2


def test_at_the_trained_number_of_steps_the_trained_sampler_runs_and_else_its_ladder(cache: Path):
    """PITFALLS, sampling differs from training."""
    check = validator(cache, steps=(1, 3, 4))
    assert check.samplers == {
        1: FewStep((1.0,), "renoise", SHAPE),
        3: FewStep((1.0, 0.9, 0.3), "renoise", SHAPE),
        4: FewStep.of(SamplingSection(steps=4, shift=2.0), SHAPE),
    }
    assert list(validator(cache).samplers) == [3]
    labels = balanced_labels(70, 3)
    samples = generate(StripesModel(), check.samplers[3], StripesConditioner(), labels, 0)
    assert check.judge is not None
    expected = check.judge(CODEC.decode(samples.x0), labels).frechet
    assert check(1, StripesModel())["validation/frechet.steps3"] == pytest.approx(expected, rel=1e-4)


def test_every_validation_has_the_same_noise_and_another_seed_has_another(cache: Path):
    check = validator(cache)
    first = check(1, StripesModel())
    assert check(2, StripesModel()) == first == validator(cache)(3, StripesModel())
    assert validator(cache, seed=4)(1, StripesModel()) != first


def sft(iterations: int, check: Validator | None, network: Wan) -> list[Tensor]:
    """A real training loop, with dropout-like use of the global generator, that validates after every iteration."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    network.train()
    for iteration in range(iterations):
        x0 = CODEC.encode(TRAIN.pixels[iteration * 4 : iteration * 4 + 4])
        noise, sigma = torch.randn_like(x0), torch.rand(4, 1)
        s = sigma[:, :, None, None, None]
        cond = network.conditioner.condition(TRAIN.label[iteration * 4 : iteration * 4 + 4])
        velocity = network.velocity((1 - s) * x0 + s * noise, sigma, cond)
        loss = (velocity - (noise - x0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if check is not None:
            check(iteration, network)
            assert network.training
    return [*(parameter.detach().clone() for parameter in network.parameters()), torch.get_rng_state()]


def wan() -> Wan:
    return tiny_wan(tiny_section(ClassLabelSection(classes=3), channels=1, layers=2))


def test_training_is_bit_equal_with_and_without_validation(cache: Path, tmp_path: Path):
    """PITFALLS, validation: it changes training."""
    network = wan()
    check = validator(cache, tmp_path, network.conditioner)
    with_it, without = sft(3, check, network), sft(3, None, wan())
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    assert len(list(tmp_path.iterdir())) == 3


def test_an_error_in_the_middle_leaves_the_model_as_it_was(cache: Path, tmp_path: Path):
    """PITFALLS, validation: it raises and leaves something in place."""
    network = wan().train()
    before = [parameter.clone() for parameter in network.parameters()]
    (tmp_path / "file").write_text("not a folder")
    state = torch.get_rng_state()
    with pytest.raises(OSError, match="file"):
        validator(cache, tmp_path / "file", network.conditioner)(1, network)
    assert all(module.training for module in network.modules())
    assert all(torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_pictures_alone_need_no_judge_and_few_samples(cache: Path, tmp_path: Path):
    check = validator(cache, tmp_path, extractor=None, samples=4)
    assert check(7, StripesModel()) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000007.steps3.png"]


def test_a_process_without_a_folder_writes_nothing_and_measures_the_same(cache: Path, tmp_path: Path):
    assert validator(cache)(1, StripesModel()) == validator(cache, tmp_path)(1, StripesModel())


def test_too_few_samples_are_refused_before_training(cache: Path):
    with pytest.raises(UserError, match=r"validation.samples = 64: .* write 65 or more"):
        validator(cache, samples=64)


def test_leaving_out_the_trained_number_of_steps_warns(cache: Path):
    """PITFALLS: 2,400 iterations validated on the wrong grid."""
    with pytest.warns(UserWarning, match=r"validation.steps = \[1, 20\] leaves out 3"):
        validator(cache, steps=(1, 20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validator(cache, steps=(3, 20))


def test_the_section_refuses_what_makes_no_sense():
    for settings in (
        {},
        {"every": 0},
        {"every": 1, "steps": (0,)},
        {"every": 1, "sample": 9},
        {"every": 1, "samples": 0},
    ):
        with pytest.raises(ValidationError):
            ValidationSection(**settings)  # type: ignore[arg-type]


MOVING, OTHER = Moving(400, seed=0), Moving(100, seed=1)


def moving_validator(cache: Path, conditioner: Any, sampling: SamplingSection = TRAINED, **settings: Any) -> Validator:
    place = {name: settings.pop(name) for name in ("folder", "causal", "shape") if name in settings}
    settings = {"every": 1, "samples": 70, "extractor": section(cache, updates=150), "columns": 3} | settings
    return Validator(
        ValidationSection(**settings),
        sampling,
        conditioner,
        CODEC,
        MOVING,
        OTHER,
        **({"shape": MOVING_SHAPE, "folder": None} | place),
    )


def test_clips_are_shown_as_film_strips_and_playing_and_judged_with_their_motion(cache: Path, tmp_path: Path):
    network = tiny_wan(tiny_section(ClassLabelSection(classes=4), channels=1, layers=1))
    check = moving_validator(cache, network.conditioner, folder=tmp_path)
    metrics = check(50, network)
    names = (
        "frechet",
        "accuracy",
        "precision",
        "recall",
        "coverage",
        "item_accuracy",
        "motion_accuracy",
        "motion_error",
    )
    assert set(metrics) == {f"validation/{name}.steps3" for name in names}
    assert {path.name for path in tmp_path.iterdir()} == {f"iteration-000050.steps3.{end}" for end in ("png", "gif")}
    strips, grid = (Image.open(tmp_path / f"iteration-000050.steps3.{end}") for end in ("png", "gif"))
    assert grid.n_frames == 6  # type: ignore[attr-defined]
    assert grid.height == 4 * 50 + 2, "a class a row"
    assert strips.height > grid.height, "and the numbers of the frames"
    assert strips.width - grid.width == (6 - 3) * 50, "6 frames of one clip a row, and 3 clips a row"
    samples = generate(network, check.samplers[3], network.conditioner, balanced_labels(70, 4), 0)
    clip = torch.stack([samples.x0[row] for row in range(4)])
    save_film(tmp_path / "film.png", CODEC.decode(clip), MOVING.classes)
    assert (tmp_path / "film.png").read_bytes() == (tmp_path / "iteration-000050.steps3.png").read_bytes()


def test_a_causal_network_is_validated_block_by_block(cache: Path):
    causal = CausalSection(block_frames=2)
    network = tiny_wan(tiny_section(ClassLabelSection(classes=4), channels=1, layers=1, causal=causal))
    check = moving_validator(cache, network.conditioner, causal=causal)
    assert check.samplers == {3: SelfForcing((1.0, 0.9, 0.3), "renoise", MOVING_SHAPE)}
    assert check(1, network) == check(2, network)
    with pytest.raises(UserError, match="6 latent frames cannot be cut into blocks of 4"):
        moving_validator(cache, network.conditioner, causal=CausalSection(block_frames=4))


def test_clips_that_are_continued_begin_with_frames_of_the_test_data_and_are_told_their_classes(cache: Path):
    causal = CausalSection(block_frames=2)
    network = tiny_wan(tiny_section(ClassLabelSection(classes=4), channels=1, layers=1, causal=causal))
    sampling = SamplingSection(steps=2, given_frames=2)
    check = moving_validator(cache, network.conditioner, sampling, causal=causal, samples=120)
    assert check.given is not None
    assert torch.equal(check.given, CODEC.encode(OTHER.pixels)[torch.arange(120) % 100, :2])
    assert torch.equal(check.labels, OTHER.label[torch.arange(120) % 100])
    assert "validation/motion_error.steps2" in check(1, network)

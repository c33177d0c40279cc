"""The teachers that come with fewstep are what their recipes make, and small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fewstep.checkpoint.source import open_source
from fewstep.cli.demo import TEACHER
from fewstep.cli.demo_video import TEACHER as VIDEO_TEACHER
from fewstep.cli.model import load_model
from fewstep.cli.shipped import recipes_folder, shipped_recipes
from fewstep.config import load_recipe
from fewstep.evaluate.sample import balanced_labels, generate

WHOLE_RUNS = True
MADE_BY = {TEACHER: "wan_nano/sft", VIDEO_TEACHER: "wan_nano_video/sft"}


@pytest.mark.parametrize("name", MADE_BY)
def test_its_card_tells_the_very_recipe_that_is_shipped(name: str, tmp_path: Path):
    """Where it ran is free: ``engine`` changes nothing but rounding."""
    folder = recipes_folder() / name
    card = (folder / "README.md").read_text(encoding="utf-8")
    (tmp_path / "told.yaml").write_text(card.split("```yaml\n")[1].split("```")[0])
    told, recipe = load_recipe(tmp_path / "told.yaml"), load_recipe(shipped_recipes()[MADE_BY[name]])
    assert told.model_copy(update={"engine": recipe.engine}) == recipe
    source = open_source(folder)
    assert source.iteration == recipe.iterations
    assert source.holds == ("ema",)


@pytest.mark.parametrize("name", MADE_BY)
def test_it_takes_less_than_six_megabytes(name: str):
    assert sum(file.stat().st_size for file in (recipes_folder() / name).rglob("*") if file.is_file()) < 6e6


def test_its_samples_have_the_brightness_of_the_data():
    """Fashion-MNIST at 16x16, on the scale from -1 to 1, has the mean -0.56 and the standard deviation 0.63."""
    loaded = load_model(recipes_folder() / TEACHER)
    labels = balanced_labels(60, 10)
    pixels = generate(loaded.role, loaded.sampler(loaded.sampling), loaded.conditioner, labels, 0, batch=60).x0
    torch.testing.assert_close(pixels.mean(), torch.tensor(-0.56), rtol=0, atol=0.06)
    torch.testing.assert_close(pixels.std(), torch.tensor(0.63), rtol=0, atol=0.06)
    names = ("Trouser", "Bag", "Sneaker")
    trouser, bag, sneaker = (pixels[labels == loaded.classes.index(name)].mean((0, 1, 2)) for name in names)
    assert trouser[:, :4].mean() < -0.9  # narrow
    assert bag[:, :4].mean() > -0.8  # wide
    assert sneaker[:4].mean() < -0.9  # low
    assert trouser[:4].mean() > -0.8  # high


def test_its_clips_have_the_brightness_of_the_data_and_things_that_move():
    """Moving Fashion-MNIST has the mean -0.89 and the standard deviation 0.32: normalised, 0 and 1."""
    loaded = load_model(recipes_folder() / VIDEO_TEACHER)
    labels = balanced_labels(20, 20)
    clips = generate(loaded.role, loaded.sampler(loaded.sampling), loaded.conditioner, labels, 0, batch=20).x0
    torch.testing.assert_close(clips.mean(), torch.tensor(0.0), rtol=0, atol=0.1)
    torch.testing.assert_close(clips.std(), torch.tensor(1.0), rtol=0, atol=0.25)
    one, all_ = (clips[:, gap:] - clips[:, : 9 - gap] for gap in (1, 4))
    assert 0.05 < one.square().mean() < all_.square().mean()

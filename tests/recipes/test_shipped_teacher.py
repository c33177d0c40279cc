"""The teacher that comes with fewstep is what its recipe makes, and small."""

from __future__ import annotations

from pathlib import Path

import torch

from fewstep.checkpoint.source import open_source
from fewstep.cli.demo import TEACHER
from fewstep.cli.model import load_model
from fewstep.cli.shipped import recipes_folder, shipped_recipes
from fewstep.config import load_recipe
from fewstep.evaluate.sample import balanced_labels, generate

FOLDER = recipes_folder() / TEACHER


def test_its_card_tells_the_very_recipe_that_is_shipped(tmp_path: Path):
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    (tmp_path / "told.yaml").write_text(card.split("```yaml\n")[1].split("```")[0])
    told, recipe = load_recipe(tmp_path / "told.yaml"), load_recipe(shipped_recipes()["wan_nano/sft"])
    assert told == recipe
    source = open_source(FOLDER)
    assert source.iteration == recipe.iterations
    assert source.holds == ("ema",)


def test_it_takes_less_than_six_megabytes():
    assert sum(file.stat().st_size for file in Path(FOLDER).rglob("*") if file.is_file()) < 6e6


def test_its_samples_have_the_brightness_of_the_data():
    """Fashion-MNIST at 16x16, on the scale from -1 to 1, has the mean -0.56 and the standard deviation 0.63."""
    loaded = load_model(FOLDER)
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

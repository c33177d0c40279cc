"""Every shipped recipe runs, at a size that fits a test; nothing but sizes and places is changed."""

from __future__ import annotations

import pytest
import torch

from fewstep.checkpoint.source import open_source
from fewstep.config import load_recipe
from tests.recipes.tiny_runs import World, in_order, tensors, values

RECIPES = in_order()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(tmp_path_factory.mktemp("recipes") / "world")


@pytest.mark.parametrize("name", RECIPES)
def test_three_iterations_of_every_recipe(world: World, name: str):
    run = world.trained(name)
    rows, recipe = values(run), load_recipe(run.recipe)
    assert recipe == world.recipe(name), "the recipe in the folder is the one that was run"
    trained, validated = rows["train", 3], rows["validation", 3]
    counted = {key for key in trained if key.endswith("/updates")}
    assert "student/updates" in counted
    assert all(trained[key] > 0 for key in counted)
    assert all(trained[key.replace("updates", "skipped")] == 0 for key in counted)
    assert all(value == value and abs(value) < 1e4 for value in (trained | validated).values())
    assert validated["validation/frechet.steps3"] > 0
    assert (run.samples / "iteration-000003.steps3.png").is_file()
    source = open_source(run.path)
    assert source.iteration == 3
    assert source.stage == ("teacher" if recipe.teacher is None else "student")
    assert source.sampling is not None
    assert tuple(source.sampling["sigmas"]) == recipe.sampling.resolved()
    assert source.latent_shape == (getattr(recipe.data, "frames", 1), 1, recipe.data.size, recipe.data.size)


def test_a_student_departs_from_the_teacher_that_it_started_from(world: World):
    teacher, student = (tensors(world.trained(f"wan_nano/{name}"), 3) for name in ("sft", "dmd2_gan"))
    for name in ("head.projection.weight", "blocks.1.ffn.output.weight"):
        assert not torch.equal(student["student"][name], teacher["ema"][name])
        assert not torch.equal(student["critic"][name], teacher["ema"][name])

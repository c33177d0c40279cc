"""The bench of the causal chain, with every run that it plans at tiny size."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from bench.causal_chain import KINDS, markdown, parse, planned, summary
from bench.runs import Judging, Run, judge, training
from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.source import open_source
from fewstep.cli.shipped import shipped_recipes
from fewstep.config import Recipe, load_recipe
from fewstep.prepare import prepare
from fewstep.train import train
from tests.recipes.tiny_runs import MODEL, write_clothes

LONG, JUDGED = 48, "dmd-rolling"


def options(folder: Path) -> list[str]:
    cache = folder / "cache"
    return [
        *("--out", str(folder / "out"), "--seeds", "4"),
        *("--common", "engine.compile=null", "iterations=1", "data.batch=2", f"data.path={folder / 'data'}"),
        *(f"data.cache={cache}", "observe.tensorboard=false", "checkpoint.every=1"),
        *("--overrides", "teacher", *(f"student.model.{key}={value}" for key, value in MODEL.items())),
        *("--overrides", "ode-*", "method.nodes=4", "method.trajectories.count=2"),
        *("--overrides", JUDGED, "validation.samples=65", "validation.extractor.updates=2"),
        f"validation.extractor.cache={cache}",
        *(word for kind in KINDS if kind.name != JUDGED for word in ("--overrides", kind.name, "validation=null")),
    ]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Recipe]]:
    """The runs of one seed. Those that others start from are trained, and one that is judged; the rest is prepared."""
    folder = tmp_path_factory.mktemp("chain")
    write_clothes(folder / "data")
    found = {}
    for run in planned(parse(options(folder))):
        words = training(run).command
        overrides = words[words.index(run.recipe) + 1 : words.index("--run")]
        recipe = load_recipe(shipped_recipes()[run.recipe], list(overrides))
        plan = prepare(recipe)
        if run.name == JUDGED or any(run.name in kind.starts.values() for kind in KINDS):
            assert train(plan, RunFolder.create(run.folder))
        found[run.name] = (run, recipe)
    return found


def test_every_run_starts_where_it_says(chain: dict[str, tuple[Run, Recipe]]):
    assert list(chain) == [kind.name for kind in KINDS]
    for run, recipe in chain.values():
        assert recipe.seed == 4
        for role, folder in run.starts:
            assert getattr(recipe, role).init == str(folder)
            assert open_source(folder).iteration == 1


def test_the_variants_differ_in_what_their_names_say(chain: dict[str, tuple[Run, Recipe]]):
    recipes = {name: recipe for name, (_, recipe) in chain.items()}
    causal = {name: recipe.student.causal for name, recipe in recipes.items()}
    assert causal["teacher"] is None
    frame_wise = {name for name, section in causal.items() if section and section.block_frames == 1}
    assert frame_wise == {"tf-frame", "cd-frame", "dmd-frame"}
    assert {name for name, section in causal.items() if section and section.sink == 3} == {"dmd-sink", "dmd-rolling"}
    assert recipes["dmd-rolling"].sampling.rolling_blocks == 2
    for name, steps in (("dmd-2step", 2), ("dmd-1step", 1)):
        assert (recipes[name].sampling.steps, recipes[name].sampling.first_block_steps) == (steps, 4)
    assert (recipes["ode-bi"].method.stop_per, recipes["ode-ar"].method.stop_per) == ("block", "sample")


def test_a_run_is_judged_at_every_number_of_steps_and_in_long_clips(chain: dict[str, tuple[Run, Recipe]]):
    run, _ = chain[JUDGED]
    judge(run.folder, (4, 2), Judging(samples=66, batch=33, long_samples=65), LONG)
    real, few, fewer = json.loads(run.evaluation.read_text())
    assert (real["num_steps"], few["num_steps"], fewer["num_steps"]) == (0, 4, 2)
    assert [window["first_frame"] for window in few["drift"]] == [0, 12, 24, 36]
    assert fewer["drift"] == []
    assert (few["num_samples"], few["num_frames"]) == (66, 12)


def written(run: Run, steps: int, **values: float) -> None:
    """An evaluation as a judged run has it."""
    entry = {"item_accuracy": 0.5, "motion_accuracy": 0.25, "motion_error": 0.125, "network_calls": 19.0, **values}
    window = {**entry, "first_frame": 0}
    drift = [window, {**window, "frechet": 2 * entry["frechet"], "motion_error": 0.5}]
    rows = [{**entry, "frechet": 0.01, "num_steps": 0}, {**entry, "num_steps": steps}]
    run.folder.mkdir(parents=True, exist_ok=True)
    run.evaluation.write_text(json.dumps([{"num_samples": 500, "drift": drift, **row} for row in rows]))


def test_the_tables_hold_means_and_say_what_was_not_run(tmp_path: Path):
    runs = planned(parse(["--out", str(tmp_path), "--seeds", "0", "1", "2"]))
    for seed, frechet in ((0, 0.25), (2, 0.75)):
        written(next(run for run in runs if (run.name, run.seed) == ("dmd-cd", seed)), 4, frechet=frechet)
    text = markdown(summary(runs, [0, 1, 2])).splitlines()
    assert text[0].startswith("500 clips a figure, seeds [0, 1, 2]")
    quality, drifted = (next(line for line in lines if "| dmd-cd |" in line) for lines in (text, text[::-1]))
    mean = f"{fmean((0.25, 0.75)):.3g}"
    assert quality == f"| dmd-cd | DMD after CD | 4 | {mean} | 0.25 / not run / 0.75 | 0.5 | 0.25 | 0.125 | 19 |"
    assert drifted == "| dmd-cd | 4 | 0.5 / 1 | 0.5 / 0.5 | 0.125 / 0.5 |"
    assert "| df | diffusion forcing (DF) | 20 | not run | not run / not run / not run |" in "\n".join(text)
    assert "| dmd-frame | DMD after CD, frame by frame | 4 | not run | not run | " in "\n".join(text)
    assert "| dmd-frame | 4 | not run | not run | not run |" in text


def test_overrides_reach_the_runs_that_they_name(tmp_path: Path):
    words = ["--out", str(tmp_path), "--seeds", "0", "--common", "data.path=d", "--overrides", "dmd-*", "iterations=9"]
    runs = {run.name: run for run in planned(parse(words))}
    assert runs["tf"].overrides == ("data.path=d",)
    assert runs["dmd-1step"].overrides[0] == "data.path=d"
    assert runs["dmd-1step"].overrides[-1] == "iterations=9"

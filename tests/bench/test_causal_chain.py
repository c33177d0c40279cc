"""The bench of the causal chain, with every run that it plans at tiny size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from bench.causal_chain import CORE, KINDS, markdown, parse, planned, summary
from bench.pack import pack, parts_of, unpack
from bench.runs import Judging, Run, judge, train_run, unfinished
from fewstep.checkpoint.source import open_source
from fewstep.cli.shipped import shipped_recipes
from fewstep.config import Recipe, load_recipe
from fewstep.prepare import prepare
from fewstep.rollout.rolling import Rolling
from tests.recipes.tiny_runs import MODEL, write_clothes

WHOLE_RUNS = True

FRAMES = 6
TRAINED = ("teacher", "tf", "cd", "tf-frame")
JUDGED = "cd"
"""Trained and judged on different machines."""


def options(folder: Path, out: str = "out") -> list[str]:
    cache = folder / "cache"
    judged = f"validation={{every: 9, samples: 65, extractor: {{updates: 2, cache: {cache}}}}}"
    return [
        *("--out", str(folder / out), "--seeds", "4"),
        *("--common", "engine.compile=null", "iterations=1", "data.batch=2", f"data.path={folder / 'data'}"),
        *(f"data.cache={cache}", f"data.frames={FRAMES}", "observe.tensorboard=false", "checkpoint.every=9"),
        *("--overrides", "teacher", *(f"student.model.{key}={value}" for key, value in MODEL.items())),
        *("--overrides", "ode-*", "method.nodes=4", "method.trajectories.count=2"),
        *("--overrides", "dmd-[lm]o[nr][ge]*", "iterations=13"),  # the first 12 warm the critic up
        *("--overrides", JUDGED, judged),
    ]


def runs_of(folder: Path, out: str = "out") -> dict[str, Run]:
    return {run.name: run for run in planned(parse(options(folder, out)))}


def recipe_of(run: Run) -> Recipe:
    return load_recipe(shipped_recipes()[run.recipe], run.words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the runs of one seed that most others start from."""
    folder = tmp_path_factory.mktemp("chain")
    write_clothes(folder / "data")
    for name in TRAINED:
        run = runs_of(folder)[name]
        assert train_run(run)
        run.trained.touch()
    return folder


@pytest.fixture(scope="module")
def elsewhere(folder: Path) -> dict[str, Run]:
    """The same runs on another machine, which got the parts of a pack. Judged were the teacher and "tf"."""
    for name in ("teacher", "tf"):
        runs_of(folder)[name].evaluation.write_text("[]")
    chosen = [runs_of(folder)[name] for name in ("teacher", "tf", "cd", "dmd-none")]
    parts = pack(chosen, folder / "out", folder / "packed" / "chain", max_mib=1 / 32)
    assert len(parts) > 1
    assert parts == parts_of(folder / "packed" / "chain")
    assert max(part.stat().st_size for part in parts) == 2**15
    unpack(folder / "packed" / "chain", folder / "other")
    return runs_of(folder, "other")


def test_every_run_starts_where_it_says(folder: Path):
    runs = runs_of(folder)
    assert set(runs) == {kind.name for kind in KINDS}
    for run in runs.values():
        recipe = recipe_of(run)
        assert recipe.seed == 4
        assert [getattr(recipe, role).init for role, _ in run.starts] == [str(place) for _, place in run.starts]
        if all(place.name in TRAINED for _, place in run.starts):
            assert prepare(recipe).sources == dict.fromkeys(dict(run.starts), 1) | critic(recipe)


def critic(recipe: Recipe) -> dict[str, int]:
    """Of a recipe with a critic, which starts from the teacher; and of a student that does."""
    others = {"critic": recipe.critic, "student": recipe.student}
    return {name: 1 for name, section in others.items() if section is not None and section.init == "teacher"}


def test_seeds_are_finished_one_after_the_other_and_then_the_rest(tmp_path: Path):
    runs = planned(parse(["--out", str(tmp_path), "--seeds", "3", "5"]))
    core = [kind.name for kind in CORE]
    assert [(run.seed, run.name) for run in runs[: 2 * len(core)]] == [(s, name) for s in (3, 5) for name in core]
    assert [(run.seed, run.name) for run in runs[-3:]] == [(3, "dmd-frame"), (3, "dmd-tf"), (5, "dmd-tf")]
    for place, run in enumerate(runs):
        assert {start for _, start in run.starts} <= {before.folder for before in runs[:place]}


def test_the_variants_differ_in_what_their_names_say(folder: Path):
    recipes = {name: recipe_of(run) for name, run in runs_of(folder).items()}
    causal = {name: recipe.student.causal for name, recipe in recipes.items()}
    assert causal["teacher"] is None
    frame_wise = {name for name, section in causal.items() if section and section.block_frames == 1}
    assert frame_wise == {"tf-frame", "cd-frame", "dmd-frame"}
    assert {name for name, section in causal.items() if section and section.sink == 3} == {"dmd-sink"}
    windows = {name: section.window for name, section in causal.items() if section}
    assert {name: window for name, window in windows.items() if window != 6} == {"dmd-sink": 12, "dmd-rolling": 9}
    assert recipes["dmd-rolling"].sampling.rolling_blocks == 2
    Rolling.of(recipes["dmd-rolling"].sampling, (12, 1, 16, 16), causal["dmd-rolling"])
    chunks = {name: (recipe.sampling.stream_chunks, recipe.sampling.overlap_frames) for name, recipe in recipes.items()}
    assert {name: found for name, found in chunks.items() if found != (1, 0)} == {
        "dmd-long": (6, 0),
        "dmd-long-overlap": (6, 3),
    }
    for name, steps in (("dmd-2step", 2), ("dmd-1step", 1)):
        assert (recipes[name].sampling.steps, recipes[name].sampling.first_block_steps) == (steps, 4)
    assert (recipes["ode-bi"].method.stop_per, recipes["ode-ar"].method.stop_per) == ("block", "sample")


def test_a_run_goes_on_where_it_was_stopped(folder: Path):
    run = runs_of(folder)["tf-frame"]
    assert train_run(replace(run, overrides=(*run.overrides, "iterations=2")))
    assert open_source(run.folder).iteration == 2
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) >= 2


def test_only_weights_that_are_needed_travel_the_average_in_bfloat16(folder: Path, elsewhere: dict[str, Run]):
    before, after = (open_source(runs["teacher"].folder) for runs in (runs_of(folder), elsewhere))
    assert (before.kind, after.kind, after.iteration) == ("run", "export", 1)
    weights = after.weights("ema")
    for name, tensor in before.weights("ema").items():
        assert torch.equal(weights[name].float(), tensor.to(torch.bfloat16).float()), name
    assert elsewhere["tf"].evaluation.exists()
    assert not elsewhere["tf"].trained.exists()
    assert {path.name for path in elsewhere["tf"].folder.iterdir()} == {
        "recipe.yaml",
        "environment.json",
        "evaluation.json",
    }


def test_what_was_packed_counts_as_done_and_others_start_from_it(elsewhere: dict[str, Run]):
    to_train, needed = unfinished([elsewhere[name] for name in ("teacher", "tf", "cd", "dmd-none")])
    assert ([run.name for run in to_train], needed) == (["dmd-none"], {elsewhere["teacher"].folder})
    assert train_run(elsewhere["dmd-none"])
    assert open_source(elsewhere["dmd-none"].folder).iteration == 1


def test_a_run_that_travelled_is_judged_at_every_number_of_steps_and_in_long_clips(elsewhere: dict[str, Run]):
    run = replace(elsewhere[JUDGED], steps=(4, 2))
    assert judge(run, Judging(samples=66, batch=33, long_samples=65))
    real, many, few = json.loads(run.evaluation.read_text())
    assert (real["num_steps"], many["num_steps"], few["num_steps"]) == (0, 4, 2)
    assert [window["first_frame"] for window in many["drift"]] == [0, FRAMES, 2 * FRAMES, 3 * FRAMES]
    assert few["drift"] == []
    assert (many["num_samples"], many["num_frames"]) == (66, FRAMES)


def test_unpacking_leaves_what_is_trained_and_refuses_a_pack_with_a_hole(folder: Path, elsewhere: dict[str, Run]):
    file, mark = folder / "packed" / "chain", elsewhere["teacher"].folder / "mark"
    mark.touch()
    unpack(file, folder / "other")
    assert mark.exists()
    parts_of(file)[0].unlink()
    with pytest.raises(SystemExit, match="parts are missing"):
        unpack(file, folder / "third")


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
    assert runs["tf"].overrides == ("validation=null", "data.path=d")
    assert runs["dmd-1step"].overrides[1] == "data.path=d"
    assert runs["dmd-1step"].overrides[-1] == "iterations=9"

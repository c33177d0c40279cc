"""Runs of a bench: trained, and judged, each as soon as what it starts from is there. What is finished is kept, so that
an interrupted bench goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.workers import Task

GRAPHS = 256
"""Compiled forms of one function that a process may keep: many networks are trained in it, at many shapes."""


@dataclass(frozen=True)
class Run:
    """One training, as ``fewstep train`` does it.

    starts: the role whose ``init`` is another run's folder, and that folder. steps: numbers of steps to judge it at;
    none is the trained sampler. long: frames of the clips in which its drift is judged; 0 is not at all.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...]
    seed: int
    folder: Path
    starts: tuple[tuple[str, Path], ...] = ()
    steps: tuple[int, ...] = ()
    long: int = 0

    @property
    def words(self) -> list[str]:
        """All that is changed in the recipe."""
        return [f"seed={self.seed}", *(f"{role}.init={folder}" for role, folder in self.starts), *self.overrides]

    @property
    def trained(self) -> Path:
        """There once the last iteration is done."""
        return self.folder / "trained"

    @property
    def evaluation(self) -> Path:
        """There once the run is judged."""
        return self.folder / "evaluation.json"


@dataclass(frozen=True)
class Judging:
    """How runs are judged. batch: samples made at once; does not change them."""

    samples: int
    batch: int
    long_samples: int = 0


def in_order(runs: Sequence[Run], judging: Judging) -> list[Task]:
    """What is left to do, the most urgent first: runs as given, each judged as soon as it is trained."""
    to_train, _ = unfinished(runs)
    tasks = []
    for run in runs:
        if run in to_train:
            needs = tuple(folder / "trained" for _, folder in run.starts)
            tasks.append(_task(run, "trained", partial(train_run, run), needs, run.trained))
        if not run.evaluation.exists():
            tasks.append(_task(run, "judged", partial(judge, run, judging), (run.trained,), run.evaluation))
    return tasks


def unfinished(runs: Sequence[Run]) -> tuple[list[Run], set[Path]]:
    """The runs that are to be trained, and the folders that these start from. ``runs``: each after those that it starts
    from. A run that is judged is trained, again, only where something needs its weights and they are not there."""
    found, needed = list[Run](), set[Path]()
    for run in reversed(runs):
        if not run.trained.exists() and (run.folder in needed or not run.evaluation.exists()):
            found.insert(0, run)
            needed |= {folder for _, folder in run.starts}
    return found, needed


def _task(run: Run, what: str, do: Any, needs: tuple[Path, ...], done: Path) -> Task:
    log = run.folder.with_suffix(f".{what}.log")
    return Task(f"seed {run.seed}, {run.name} {what}", do, needs, done, log)


def train_run(run: Run) -> bool:
    """From its start, or from where it was stopped; False if it was stopped again."""
    import torch

    from fewstep.checkpoint.run_folder import RunFolder
    from fewstep.cli.shipped import find_recipe
    from fewstep.config import load_recipe
    from fewstep.prepare import prepare
    from fewstep.train import train

    compiler: Any = torch._dynamo.config
    compiler.recompile_limit = max(compiler.recompile_limit, GRAPHS)
    plan = prepare(load_recipe(find_recipe(run.recipe), run.words))
    resume = (run.folder / "recipe.yaml").exists()
    return train(plan, RunFolder(run.folder) if resume else RunFolder.create(run.folder), resume=resume)


def judge(run: Run, judging: Judging) -> bool:
    """Writes ``evaluation.json`` of the run: real data, the model at each number of steps (none: the trained one), and
    at the trained one its drift in clips of ``run.long`` frames."""
    from fewstep.cli.judging import measure
    from fewstep.cli.model import load_model
    from fewstep.evaluate.drift import drift
    from fewstep.evaluate.evaluation import evaluate_real, save_evaluations
    from fewstep.evaluate.sample import balanced_labels, generate
    from fewstep.observe.report import write_report

    loaded = load_model(run.folder)
    eyes, real = judge_of(loaded, run.folder / "recipe.yaml")
    rows = [evaluate_real(eyes, real, judging.samples)]
    for count in run.steps or [None]:
        row = measure(loaded, eyes, count, num_samples=judging.samples, seeds=(0,), batch=judging.batch)
        if run.long and row.num_steps == len(loaded.sampling.resolved()):
            labels = balanced_labels(judging.long_samples, len(loaded.classes))
            sampler = loaded.sampler(loaded.sampling, run.long)
            made = generate(
                loaded.role, sampler, loaded.conditioner, labels, 0, batch=judging.batch, device=loaded.device
            )
            row = row.model_copy(update={"drift": tuple(drift(loaded.codec.decode(made.x0), labels, eyes))})
        rows.append(row)
    save_evaluations(run.evaluation, rows)
    write_report(run.folder)
    return True


def judge_of(loaded: Any, recipe: Path) -> Any:
    """The judge for the recipe's data, and the data. Opening it reads all of them, so it is kept for the next run."""
    from fewstep.cli.judging import open_judge
    from fewstep.config import load_recipe

    described = load_recipe(recipe)
    extractor = described.validation.extractor if described.validation else None
    key = (described.data.model_dump_json(exclude={"batch"}), extractor and extractor.model_dump_json())
    if key not in _JUDGES:
        _JUDGES[key] = open_judge(loaded, str(recipe))
    return _JUDGES[key]


_JUDGES: dict[Any, Any] = {}

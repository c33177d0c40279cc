"""Training: a plan is assembled, then iterations run until the last one, or until somebody asks to stop."""

from __future__ import annotations

import json
import platform
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from rich.console import Console

from fewstep import __version__
from fewstep.checkpoint.atomic import replace_text
from fewstep.checkpoint.background import Saver
from fewstep.checkpoint.meta import Meta
from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.save import load_checkpoint, newest_complete
from fewstep.config import Recipe, dump_recipe
from fewstep.costs.utilisation import full_speed
from fewstep.engines.health import Health, examine, refuse_full_disk
from fewstep.engines.mesh import Mesh, RankError, join
from fewstep.engines.ray.driver import Driver
from fewstep.engines.ray.placement import RaySection
from fewstep.engines.ray.presence import present
from fewstep.engines.ray.worker import Begin
from fewstep.errors import UserError, UserErrors
from fewstep.member import Member, member
from fewstep.needs import checkpoint_bytes, needs
from fewstep.observe.observer import Observer, Unobserved
from fewstep.plan import Plan
from fewstep.trajectories import generate

FREE_AT_RESUME = ("name", "iterations", "checkpoint", "validation", "observe", "engine", "plugins")
"""Sections that may change when a run goes on; any other would make it a run that no recipe describes."""


def train(plan: Plan, run: RunFolder, *, resume: bool = False, go_on: str = "") -> bool:
    """Runs the plan in ``run`` from its newest complete checkpoint (``resume``), or from the start.

    Returns True if the last iteration was reached, False if Ctrl-C or SIGTERM ended the run before; either way the last
    finished iteration is in a checkpoint. ``iterations`` is the total, however often a run was resumed. ``go_on``: what
    the user is told to do after an interruption. Trajectories that the method trains on are made first, if they are
    missing; Ctrl-C there raises KeyboardInterrupt, and what is finished is kept.

    Of several ranks each calls this. The first one alone writes into ``run``; a stop asked of one stops all of them.
    With ``engine.name: ray`` one process calls it, whose workers train; it writes into ``run``.
    """
    restarts = plan.recipe.engine.max_restarts if isinstance(plan.recipe.engine, RaySection) else 0
    while True:
        try:
            return _train(plan, run, resume, go_on or f"{plan.ranks.launcher}fewstep train --resume {run.path}")
        except RankError as error:
            if not restarts:
                raise
            restarts, resume = restarts - 1, True
            kept = newest_complete(run.checkpoints)
            goes = "Going on from the last checkpoint" if kept else "Beginning again, since there is no checkpoint yet"
            print(f"{error}\n{goes}; restarts left: {restarts}.", file=sys.stderr)


def _train(plan: Plan, run: RunFolder, resume: bool, go_on: str) -> bool:
    recipe, ranks = plan.recipe, plan.ranks
    saver, advice = Saver(), f"Go on with: {go_on}"
    if not plan.groups:
        generate(plan, rank=ranks.rank, world=ranks.world, console=Console(quiet=not ranks.first), together=True)
    told: dict[str, Any] = {} if ranks.first else {"told": ""}
    with StopRequest(**told) as stop, trainer_of(plan, run, saver, advice, stop) as (trainer, health):
        iteration, time_s = restore(trainer, plan, run) if resume else (0, 0.0)
        saved, farewell = iteration or None, ""
        observer = observe(plan, run, iteration, time_s, health)
        due, agreed = partial(is_due, recipe), trainer.mesh.any if trainer.mesh else bool
        try:
            if resume and due(iteration) and agreed(observer.lacks_validation(iteration)):
                validate(trainer, observer, iteration)
            while iteration < recipe.iterations and not (agreed(stop.asked) and trainer.between):
                metrics = trainer.run(iteration)
                iteration += 1
                if iteration % recipe.observe.every == 0:
                    metrics |= trainer.gauges()
                observer.train(iteration, metrics, recipe.data.batch)
                saver.check()
                if is_saved(recipe, iteration):
                    saved = save(trainer, plan, run, observer, iteration)
                if due(iteration):
                    validate(trainer, observer, iteration)
            if saved != iteration:
                save(trainer, plan, run, observer, iteration)
            saver.wait()
            refuse_barren(trainer)
            farewell = f"Checkpoint saved. {advice}"
            if iteration >= recipe.iterations:
                farewell = f"Look at it: {run.report}, or: fewstep sample {run.path}"
        except BaseException as error:
            error.add_note(f"Complete checkpoints are kept. {advice}")
            raise
        finally:
            observer.close(farewell)
    return iteration >= recipe.iterations


@contextmanager
def trainer_of(
    plan: Plan, run: RunFolder, saver: Saver, advice: str, stop: StopRequest | None = None
) -> Iterator[tuple[Member | Driver, str]]:
    """What runs the iterations, alone in the run's folder: this process, or the workers that it starts; and what was
    found before anything was loaded. ``stop``: where somebody may ask for the end."""
    recipe, ranks = plan.recipe, plan.ranks
    if isinstance(recipe.engine, RaySection):
        begin: Begin = partial(member, recipe.model_dump(mode="json"), run.path.absolute(), Path.cwd())

        def cut(iteration: int) -> bool:
            return is_saved(recipe, iteration) or (stop is not None and stop.asked)

        with run.lock():
            found = examined(plan, None, run)
            driver = Driver(recipe.engine, plan.method, plan.groups, begin, logs=run.workers.absolute(), cut=cut)
            with driver, present(driver.seats, advice):
                yield driver, found
        return
    how = {name: getattr(recipe.engine, name) for name in ("timeout_s", "replicas", "sequence")}
    group = join(ranks, plan.device, advice=advice, **how)
    with group as mesh, run.lock() if ranks.first else nullcontext(), saver:
        found = examined(plan, mesh, run)
        yield Member(plan, run, mesh, saver=saver), found


def examined(plan: Plan, mesh: Mesh | None, run: RunFolder) -> str:
    """Looks at the disk and, where there are several, at the ranks, before anything is loaded; returns what was found
    in one line. Warns of what is odd; raises UserError for what would not go well."""
    full = None
    if plan.ranks.first:
        full = refuse_full_disk(run.path, checkpoint_bytes(plan), plan.recipe.checkpoint.keep_last)
    health = examine(mesh, plan.device, needs(plan, run.path)) if mesh else Health("")
    if plan.ranks.first:
        for text in (*health.warnings, *([full] if full else [])):
            warnings.warn(text, stacklevel=2)
        if health.line:
            Console().print(health.line, markup=False, highlight=False, soft_wrap=True)
    return health.line


def observe(plan: Plan, run: RunFolder, iteration: int, time_s: float, health: str = "") -> Observer | Unobserved:
    """What records the run, in whose folder it writes what the run is."""
    recipe = plan.recipe
    if not plan.ranks.first:
        return Unobserved()
    replace_text(run.recipe, dump_recipe(recipe))
    known = environment(plan) | ({"health": health} if health else {})
    replace_text(run.environment, json.dumps(known, indent=1))
    return Observer(
        recipe.observe,
        run.path,
        name=recipe.name,
        iterations=recipe.iterations,
        recipe=recipe.model_dump(mode="json"),
        iteration=iteration,
        time_s=time_s,
        full_speed=full_speed(plan),
    )


def is_due(recipe: Recipe, iteration: int) -> bool:
    """Whether a validation belongs to ``iteration``, at which a run or a part of it ends."""
    section = recipe.validation
    return section is not None and iteration > 0 and (iteration == recipe.iterations or iteration % section.every == 0)


def is_saved(recipe: Recipe, iteration: int) -> bool:
    """Whether a checkpoint belongs to ``iteration``."""
    return iteration == recipe.iterations or iteration % recipe.checkpoint.every == 0


def validate(trainer: Member | Driver, observer: Observer | Unobserved, iteration: int) -> None:
    """Validates the averaged student."""
    with observer.phase("validation"):
        results = trainer.validate(iteration)
    observer.validation(iteration, results)


def refuse_barren(trainer: Member | Driver) -> None:
    """Raises UserError if a role skipped every update that it tried: nothing was trained."""
    barren = [name for name, (updates, skipped) in trainer.counters().items() if skipped and not updates]
    if barren:
        raise UserError(
            f"{' and '.join(barren)}: every update was skipped, since loss or gradient was never finite; lower the "
            "learning rate, and look at the codec and the data"
        )


def save(trainer: Member | Driver, plan: Plan, run: RunFolder, observer: Observer | Unobserved, iteration: int) -> int:
    """Writes the checkpoint of ``iteration``, or lets it be written beside the training; returns that number."""
    if isinstance(observer, Unobserved):
        trainer.save(run.checkpoints, None, plan.recipe.checkpoint)
        return iteration
    with observer.phase("checkpoint"):
        meta = Meta(
            iteration=iteration,
            recipe=plan.recipe.model_dump(mode="json"),
            models=plan.models,
            sampling=plan.recipe.sampling,
            codec=plan.codec.section.model_dump(mode="json"),
            stage="student" if "teacher" in plan.method.roles else "teacher",
            classes=plan.dataset.classes or None,
            latent_shape=plan.shape,
            sources=plan.sources,
            counters={name: updates for name, (updates, _) in trainer.counters().items()},
            time_s=observer.clock.elapsed_s,
            versions=versions(),
        )
        trainer.save(run.checkpoints, meta, plan.recipe.checkpoint)
    return iteration


def restore(trainer: Member | Driver, plan: Plan, run: RunFolder) -> tuple[int, float]:
    """Loads the newest complete checkpoint; returns its iteration and the seconds trained so far."""
    newest = newest_of(run, trainer.mesh)
    if newest is None:
        return 0, 0.0
    checkpoint = load_checkpoint(newest)
    meta = Meta.from_json(checkpoint.meta, newest)
    now = plan.recipe.model_dump(mode="json")
    changed = [
        line for key in now if key not in FREE_AT_RESUME for line in differences(meta.recipe.get(key), now[key], key)
    ]
    for role, model in plan.models.items():
        changed += differences(meta.models.get(role), model, f"the network of {role}")
    if meta.latent_shape != plan.shape:
        changed.append(f"the data's samples are {times(plan.shape)} latents, they were {times(meta.latent_shape)}")
    if meta.sources != plan.sources:
        changed.append(
            f"the runs that weights come from stand at iterations {plan.sources}, they stood at {meta.sources}; name "
            "their checkpoints instead, such as teacher.init=runs/<name>/checkpoints/iteration-..."
        )
    if meta.iteration > plan.recipe.iterations:
        changed.append(f"iterations = {plan.recipe.iterations}: {meta.iteration} are done; write that many or more")
    if changed:
        raise UserErrors(
            [f"{run.path} cannot go on with another recipe; take it back, or begin a run of another name:", *changed]
        )
    trainer.load(checkpoint)
    return checkpoint.iteration, meta.time_s


def times(shape: Sequence[int]) -> str:
    """Frames, channels, rows and columns, as a person reads them."""
    return " x ".join(map(str, shape))


def newest_of(run: RunFolder, mesh: Mesh | None) -> Path | None:
    """The newest complete checkpoint; of several ranks the first looks for it, so that all take the same one."""
    if mesh is None:
        return newest_complete(run.checkpoints, verified=True)
    newest = newest_complete(run.checkpoints, verified=True) if mesh.ranks.first else None
    name = mesh.told(newest.name if newest else "")
    return run.checkpoints / name if name else None


def differences(before: Any, now: Any, key: str) -> list[str]:
    """Every value below ``key`` that is not what it was, a line each; places on the disk may change."""
    if key.rpartition(".")[2] in ("init", "path", "test_path", "cache"):
        return []
    if isinstance(before, dict) and isinstance(now, dict):
        names = [*before, *(name for name in now if name not in before)]
        return [line for name in names for line in differences(before.get(name), now.get(name), f"{key}.{name}")]
    return [] if before == now else [f"{key} = {now}: it was {before}"]


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    return {"fewstep": __version__, "torch": torch.__version__, "python": platform.python_version()}


def environment(plan: Plan) -> dict[str, Any]:
    """What the run was made with, for its report."""
    device = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else platform.processor() or "CPU"
    precision = str(plan.precision).removeprefix("torch.")
    known = {"device": device, "precision": precision, "threads": torch.get_num_threads()}
    return {**versions(), **known, "ranks": plan.ranks.world, **plan.placed()}


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a request that is honoured between two iterations (``told`` is what the
    user reads then); a second one stops at once. Outside the main thread nothing is changed."""

    def __init__(
        self, told: str = "Stopping after this iteration; once more stops at once, without a checkpoint."
    ) -> None:
        self.asked, self.told = False, told
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:
                return self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self.told:
            print(f"\n{self.told}", file=sys.stderr)

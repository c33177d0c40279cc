"""Training: a plan is assembled, then iterations run until the last one, or until somebody asks to stop."""

from __future__ import annotations

import json
import platform
import signal
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from rich.console import Console

from fewstep import __version__
from fewstep.assemble import assemble
from fewstep.checkpoint.atomic import replace_text
from fewstep.checkpoint.meta import Meta
from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.save import load_checkpoint, newest_complete, save_checkpoint, take_part
from fewstep.config import dump_recipe
from fewstep.costs.utilisation import full_speed
from fewstep.data.sources import open_dataset
from fewstep.engines.mesh import Mesh, join
from fewstep.engines.process import ProcessEngine
from fewstep.errors import UserError, UserErrors
from fewstep.evaluate.validation import Validator
from fewstep.observe.observer import Observer, Unobserved
from fewstep.prepare import Plan
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
    """
    recipe, ranks = plan.recipe, plan.ranks
    generate(plan, rank=ranks.rank, world=ranks.world, console=Console(quiet=not ranks.first))
    group = join(ranks, plan.device, timeout_s=recipe.engine.timeout_s, replicas=recipe.engine.replicas)
    lock = run.lock() if ranks.first else nullcontext()
    with group as mesh, lock, StopRequest() if ranks.first else StopRequest("") as stop:
        engine = assemble(plan, mesh)
        check = validator(plan, engine, run)
        iteration, time_s = restore(engine, plan, run) if resume else (0, 0.0)
        saved, farewell = iteration or None, ""
        observer = observe(plan, run, iteration, time_s)
        due, agreed = partial(is_due, check, recipe.iterations), mesh.any if mesh else bool
        try:
            if resume and due(iteration) and agreed(observer.lacks_validation(iteration)):
                validate(check, engine, observer, iteration)
            while iteration < recipe.iterations and not agreed(stop.asked):
                metrics = engine.run(iteration)
                iteration += 1
                if iteration % recipe.observe.every == 0:
                    metrics |= engine.gauges()
                observer.train(iteration, metrics, recipe.data.batch)
                if iteration == recipe.iterations or iteration % recipe.checkpoint.every == 0:
                    saved = save(engine, plan, run, observer, iteration)
                if due(iteration):
                    validate(check, engine, observer, iteration)
            if saved != iteration:
                save(engine, plan, run, observer, iteration)
            refuse_barren(engine)
            go_on = go_on or f"fewstep train --resume {run.path}"
            farewell = f"Checkpoint saved. Go on with: {go_on}"
            if iteration >= recipe.iterations:
                farewell = f"Look at it: {run.report}, or: fewstep sample {run.path}"
        finally:
            observer.close(farewell)
    return iteration >= recipe.iterations


def observe(plan: Plan, run: RunFolder, iteration: int, time_s: float) -> Observer | Unobserved:
    """What records the run, in whose folder it writes what the run is."""
    recipe = plan.recipe
    if not plan.ranks.first:
        return Unobserved()
    replace_text(run.recipe, dump_recipe(recipe))
    run.environment.write_text(json.dumps(environment(plan), indent=1))
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


def validator(plan: Plan, engine: ProcessEngine, run: RunFolder) -> Validator | None:
    """What validates the averaged student, if the recipe asks for it; its classifier is trained now, if ever.

    Of several ranks all make the same samples together, and the first one judges and shows them.
    """
    section = plan.recipe.validation
    if section is None:
        return None
    if not plan.ranks.first:
        section = section.model_copy(update={"extractor": None})
    conditioner: Any = engine.roles["student"].network.conditioner
    return Validator(
        section,
        plan.recipe.sampling,
        conditioner,
        plan.codec,
        plan.dataset,
        open_dataset(plan.recipe.data, "test"),
        shape=plan.shape,
        causal=engine.roles["student"].causal,
        folder=run.samples if plan.ranks.first else None,
        dtype=plan.sampler.dtype,
        device=plan.device,
        plugins=plan.recipe.plugins,
    )


def is_due(check: Validator | None, last: int, iteration: int) -> bool:
    """Whether a validation belongs to ``iteration``, at which a run or a part of it ends."""
    return check is not None and iteration > 0 and (iteration == last or iteration % check.section.every == 0)


def validate(check: Any, engine: ProcessEngine, observer: Observer | Unobserved, iteration: int) -> None:
    """Validates the averaged student."""
    with observer.phase("validation"), engine.ema.swapped():
        results = check(iteration, engine.roles["student"])
    observer.validation(iteration, results)


def refuse_barren(engine: ProcessEngine) -> None:
    """Raises UserError if a role skipped every update that it tried: nothing was trained."""
    barren = [name for name, optimizer in engine.optimizers.items() if optimizer.skipped and not optimizer.updates]
    if barren:
        raise UserError(
            f"{' and '.join(barren)}: every update was skipped, since loss or gradient was never finite; lower the "
            "learning rate, and look at the codec and the data"
        )


def save(engine: ProcessEngine, plan: Plan, run: RunFolder, observer: Observer | Unobserved, iteration: int) -> int:
    """Writes the checkpoint of ``iteration``; returns that number."""
    if isinstance(observer, Unobserved):
        take_part(engine.state())
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
            counters={name: int(optimizer.updates) for name, optimizer in engine.optimizers.items()},
            time_s=observer.clock.elapsed_s,
            versions=versions(),
        )
        save_checkpoint(run.checkpoints, iteration, engine.state(), meta.to_json(), plan.recipe.checkpoint)
    return iteration


def restore(engine: ProcessEngine, plan: Plan, run: RunFolder) -> tuple[int, float]:
    """Loads the newest complete checkpoint; returns its iteration and the seconds trained so far."""
    newest = newest_of(run, engine.mesh)
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
    engine.load({group: checkpoint.tensors(group) for group in checkpoint.groups})
    return checkpoint.iteration, meta.time_s


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
    return {**versions(), **known, "ranks": plan.ranks.world}


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

"""Training: a plan is assembled, then iterations run until the last one, or until somebody asks to stop."""

from __future__ import annotations

import json
import platform
import signal
import sys
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from fewstep import __version__
from fewstep.checkpoint.atomic import replace_text
from fewstep.checkpoint.meta import Meta
from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.save import load_checkpoint, newest_complete, save_checkpoint
from fewstep.config import dump_recipe
from fewstep.data.batches import BatchSource
from fewstep.data.order import BatchOrder
from fewstep.data.sources import open_dataset
from fewstep.engines.process import ProcessEngine
from fewstep.engines.roles import AveragedRole, Role, freeze
from fewstep.errors import UserError, UserErrors
from fewstep.evaluate.validation import Validator
from fewstep.methods.ode_init import OdeInit
from fewstep.models.wan.parallelize import compile_blocks, compile_whole
from fewstep.observe.observer import Observer
from fewstep.optim.ema import EMA
from fewstep.optim.optimizer import RoleOptimizer
from fewstep.prepare import Plan
from fewstep.rng import generator
from fewstep.trajectories import generate, trajectory_batches

FREE_AT_RESUME = ("name", "iterations", "checkpoint", "validation", "observe", "engine", "plugins")
"""Sections that may change when a run goes on; any other would make it a run that no recipe describes."""
COMPILERS = {"blocks": compile_blocks, "graphs": compile_whole}


def train(plan: Plan, run: RunFolder, *, resume: bool = False, go_on: str = "") -> bool:
    """Runs the plan in ``run`` from its newest complete checkpoint (``resume``), or from the start.

    Returns True if the last iteration was reached, False if Ctrl-C or SIGTERM ended the run before; either way the last
    finished iteration is in a checkpoint. ``iterations`` is the total, however often a run was resumed. ``go_on``: what
    the user is told to do after an interruption. Trajectories that the method trains on are made first, if they are
    missing; Ctrl-C there raises KeyboardInterrupt, and what is finished is kept.
    """
    recipe = plan.recipe
    generate(plan)
    with run.lock(), StopRequest() as stop:
        engine = assemble(plan)
        check = validator(plan, engine, run)
        iteration, time_s = restore(engine, plan, run) if resume else (0, 0.0)
        saved, farewell = iteration or None, ""
        replace_text(run.recipe, dump_recipe(recipe))
        run.environment.write_text(json.dumps(environment(plan), indent=1))
        observer = Observer(
            recipe.observe,
            run.path,
            name=recipe.name,
            iterations=recipe.iterations,
            recipe=recipe.model_dump(mode="json"),
            iteration=iteration,
            time_s=time_s,
        )
        due = partial(is_due, check, recipe.iterations)
        try:
            if resume and due(iteration) and observer.lacks_validation(iteration):
                validate(check, engine, observer, iteration)
            while iteration < recipe.iterations and not stop.asked:
                metrics = engine.run(iteration)
                iteration += 1
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


def assemble(plan: Plan) -> ProcessEngine:
    """Networks with their weights, optimizers, EMA and data, on the plan's device."""
    offline, recipe = getattr(plan.method, "offline", ()), plan.recipe  # roles that no iteration needs
    networks = {name: network for name, network in plan.networks("cpu").items() if name not in offline}
    loaded: dict[tuple[Any, str], dict[str, Tensor]] = {}
    for name in networks:
        role = plan.roles[name]
        if role.source is None:
            networks[name].initialise(generator(recipe.seed, role.drawn_for))  # type: ignore[operator]
            continue
        origin = (role.source.path, role.weights)
        if origin not in loaded:
            loaded[origin] = role.source.weights(role.weights)
        networks[name].load_state_dict(loaded[origin])
    masters = torch.promote_types(plan.precision, torch.float32)
    roles, optimizers, totals = {}, {}, plan.total_updates()
    for name, network in networks.items():
        role = plan.roles[name]
        network = network.to(plan.device, masters) if role.optimizer else freeze(network, plan.device, plan.precision)
        if name != "discriminator":
            network.recompute = recipe.engine.recompute  # type: ignore[assignment]
        if recipe.engine.compile and name != "discriminator":
            COMPILERS[recipe.engine.compile](network)  # type: ignore[arg-type]
        roles[name] = Role(name, network, plan.precision)
        if role.optimizer:
            assert role.schedule is not None
            optimizers[name] = RoleOptimizer(roles[name].parameters(), role.optimizer, role.schedule, totals[name])
    ema = EMA(roles["student"].parameters(), recipe.ema)
    if "ema" in plan.method.roles:
        roles["ema"] = AveragedRole(roles["student"], ema)
    return ProcessEngine(
        plan.method,
        roles,
        optimizers,
        ema,
        batch_source(plan, roles["student"]),
        seed=recipe.seed,
        micro_batch=recipe.engine.micro_batch,
    )


def batch_source(plan: Plan, student: Role) -> BatchSource:
    """The batches of the run, in the precision of the masters."""
    conditioner = plan.conditioner(student.network)
    dtype, recipe = plan.sampler.dtype, plan.recipe

    def condition(told: Tensor) -> tuple[Any, Any]:
        return conditioner.condition(told), conditioner.null(len(told), told.device)

    def encode(items: Tensor) -> Tensor:
        return plan.codec.encode(items).to(dtype)

    if isinstance(plan.method, OdeInit):
        return trajectory_batches(plan, encode, condition)
    hold = recipe.sampling.stream_chunks
    order = BatchOrder(recipe.seed, len(plan.dataset), recipe.data.batch, plan.method.num_batches, hold=hold)
    return BatchSource(plan.dataset, order, encode, condition, plan.device)


def validator(plan: Plan, engine: ProcessEngine, run: RunFolder) -> Validator | None:
    """What validates the averaged student, if the recipe asks for it; its classifier is trained now, if ever."""
    if plan.recipe.validation is None:
        return None
    conditioner: Any = engine.roles["student"].network.conditioner
    return Validator(
        plan.recipe.validation,
        plan.recipe.sampling,
        conditioner,
        plan.codec,
        plan.dataset,
        open_dataset(plan.recipe.data, "test"),
        shape=plan.shape,
        causal=engine.roles["student"].causal,
        folder=run.samples,
        dtype=plan.sampler.dtype,
        device=plan.device,
        plugins=plan.recipe.plugins,
    )


def is_due(check: Validator | None, last: int, iteration: int) -> bool:
    """Whether a validation belongs to ``iteration``, at which a run or a part of it ends."""
    return check is not None and iteration > 0 and (iteration == last or iteration % check.section.every == 0)


def validate(check: Any, engine: ProcessEngine, observer: Observer, iteration: int) -> None:
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


def save(engine: ProcessEngine, plan: Plan, run: RunFolder, observer: Observer, iteration: int) -> int:
    """Writes the checkpoint of ``iteration``; returns that number."""
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
    newest = newest_complete(run.checkpoints, verified=True)
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
    return {**versions(), "device": device, "precision": precision, "threads": torch.get_num_threads()}


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
        print(f"\n{self.told}", file=sys.stderr)

"""Training: a plan is assembled, then iterations run until the last one, or until somebody asks to stop."""

from __future__ import annotations

import platform
import signal
import time
from importlib.metadata import version
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from fewstep.checkpoint.meta import Meta
from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.save import load_checkpoint, newest_complete, save_checkpoint
from fewstep.config import dump_recipe
from fewstep.data.batches import BatchSource
from fewstep.data.order import BatchOrder
from fewstep.engines.process import ProcessEngine
from fewstep.engines.roles import Role, freeze
from fewstep.errors import UserError
from fewstep.models.wan.parallelize import compile_blocks
from fewstep.optim.ema import EMA
from fewstep.optim.optimizer import RoleOptimizer
from fewstep.prepare import Plan
from fewstep.rng import generator
from fewstep.watch import Watch


def train(plan: Plan, run: RunFolder, *, resume: bool = False) -> bool:
    """Runs the plan in ``run`` from its newest complete checkpoint (``resume``), or from the start.

    Returns True if the last iteration was reached, False if Ctrl-C or SIGTERM ended the run before; either way the last
    finished iteration is in a checkpoint. ``iterations`` is the total, however often a run was resumed.
    """
    recipe = plan.recipe
    with run.lock(), StopRequest() as stop:
        engine = assemble(plan)
        iteration, time_s = restore(engine, plan, run) if resume else (0, 0.0)
        run.recipe.write_text(dump_recipe(recipe))
        saved = iteration if resume else -1
        with Watch(plan, run, engine, iteration, time_s) as watch:
            while iteration < recipe.iterations and not stop.asked:
                watch.iteration_begins()
                metrics = engine.run(iteration)
                iteration += 1
                watch.iteration_ended(iteration, metrics)
                if iteration % recipe.checkpoint.every == 0 and iteration < recipe.iterations:
                    saved = save(engine, plan, run, iteration, watch.time_s)
            if saved != iteration:
                save(engine, plan, run, iteration, watch.time_s)
            finished = iteration >= recipe.iterations
            watch.finish(finished, iteration)
    return finished


def assemble(plan: Plan) -> ProcessEngine:
    """Networks with their weights, optimizers, EMA and data, on the plan's device."""
    networks, recipe = plan.networks("cpu"), plan.recipe
    loaded: dict[tuple[Any, str], dict[str, Tensor]] = {}
    for name, role in plan.roles.items():
        if role.source is None:
            networks[name].initialise(generator(recipe.seed, name))  # type: ignore[operator]
            continue
        origin = (role.source.path, role.weights)
        if origin not in loaded:
            loaded[origin] = role.source.weights(role.weights)
        networks[name].load_state_dict(loaded[origin])
    masters = torch.promote_types(plan.precision, torch.float32)
    roles, optimizers, totals = {}, {}, plan.total_updates()
    for name, network in networks.items():
        role = plan.roles[name]
        network = network.to(plan.device, masters) if role.optimizer else freeze(network.to(plan.device), plan.precision)
        if recipe.engine.compile and name != "discriminator":
            compile_blocks(network)
        roles[name] = Role(name, network, plan.precision)
        if role.optimizer:
            assert role.schedule is not None
            optimizers[name] = RoleOptimizer(roles[name].parameters(), role.optimizer, role.schedule, totals[name])
    return ProcessEngine(
        plan.method,
        roles,
        optimizers,
        EMA(roles["student"].parameters(), recipe.ema),
        batch_source(plan, roles["student"]),
        seed=recipe.seed,
        micro_batch=recipe.engine.micro_batch,
    )


def batch_source(plan: Plan, student: Role) -> BatchSource:
    """The batches of the run, in the precision of the masters."""
    conditioner: Any = student.network.conditioner
    dtype, recipe = plan.sampler.dtype, plan.recipe

    def condition(labels: Tensor) -> tuple[Any, Any]:
        return conditioner.condition(labels), conditioner.null(len(labels), labels.device)

    order = BatchOrder(recipe.seed, len(plan.dataset), recipe.data.batch, plan.method.num_batches)
    return BatchSource(plan.dataset, order, lambda pixels: plan.codec.encode(pixels).to(dtype), condition, plan.device)


def save(engine: ProcessEngine, plan: Plan, run: RunFolder, iteration: int, time_s: float) -> int:
    """Writes the checkpoint of ``iteration``; returns that number."""
    meta = Meta(
        iteration=iteration,
        recipe=plan.recipe.model_dump(mode="json"),
        models={name: role.model.model_dump(mode="json") for name, role in plan.roles.items() if role.model is not None},
        sampling=plan.recipe.sampling,
        codec=plan.codec.section.model_dump(mode="json"),
        stage="teacher" if plan.recipe.method.name == "sft" else "student",
        classes=plan.dataset.classes,
        latent_shape=plan.shape,
        counters={name: int(optimizer.updates) for name, optimizer in engine.optimizers.items()},
        time_s=time_s,
        versions=versions(),
    )
    save_checkpoint(run.checkpoints, iteration, engine.state(), meta.to_json(), plan.recipe.checkpoint)
    return iteration


def restore(engine: ProcessEngine, plan: Plan, run: RunFolder) -> tuple[int, float]:
    """Loads the newest complete checkpoint; returns its iteration and the seconds trained so far."""
    newest = newest_complete(run.checkpoints)
    if newest is None:
        return 0, 0.0
    checkpoint = load_checkpoint(newest)
    meta = Meta.from_json(checkpoint.meta, newest)
    expected = {name: role.model.model_dump(mode="json") for name, role in plan.roles.items() if role.model is not None}
    if meta.models != expected:
        raise UserError(f"{newest}: its networks are {meta.models}, the recipe's are {expected}; resume with its own recipe")
    engine.load({group: checkpoint.tensors(group) for group in checkpoint.groups})
    return checkpoint.iteration, meta.time_s


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    return {"fewstep": version("fewstep"), "torch": torch.__version__, "python": platform.python_version()}


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a request that is honoured between two iterations; a second one stops at
    once. Outside the main thread nothing is changed."""

    def __init__(self) -> None:
        self.asked = False
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

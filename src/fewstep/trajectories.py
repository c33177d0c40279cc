"""The trajectories that a recipe trains on: made from its teacher once, before training, by one process or by many."""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from fewstep.data.order import BatchOrder
from fewstep.data.trajectories import (
    Chosen,
    Manifest,
    TrajectoryBatches,
    TrajectoryFolder,
    data_digest,
    weights_digest,
)
from fewstep.engines.roles import Role, freeze
from fewstep.errors import UserError
from fewstep.methods.ode_init import OdeInit
from fewstep.models.families import build
from fewstep.plan import Plan
from fewstep.records import Batch, Trajectory, concat, rows
from fewstep.rng import Draw

STALE_S, LOOK_S = 3 * 3600.0, 1.0
"""How long a process waits for a shard of another one, and how often it looks."""


def generate(
    plan: Plan, *, rank: int = 0, world: int = 1, console: Console | None = None, together: bool = False
) -> None:
    """Makes the trajectories of the plan that are not on the disk yet; nothing, if its method trains on none.

    Process ``rank`` of ``world`` makes the shards rank, rank + world, ..., so any number of processes can share the
    work, and what one leaves another makes: a trajectory is a function of its number. Ctrl-C ends it with finished
    shards kept. together: all of them train on what is made, and each waits here for the shards of the others. Raises
    UserErrors if the folder of the recipe holds other trajectories, UserError if the disk is full.
    """
    if not isinstance(plan.method, OdeInit):
        return
    count, batch = plan.method.section.trajectories.count, plan.recipe.data.batch
    if count < batch:
        raise UserError(f"method.trajectories.count = {count}: a batch has {batch} rows (data.batch); write more")
    console, weights = console or Console(), teacher_weights(plan)
    folder = _folder(plan, plan.method, weights)
    missing = folder.missing()
    mine = [shard for shard in missing if shard % world == rank]
    if mine:
        _refuse_full_disk(folder, missing)
        folder = folder.begin()
        mine = [shard for shard in folder.missing() if shard % world == rank]
        teacher = _teacher(plan, weights)
        with _Line(plan.recipe.name, folder, console) as line:
            for shard in mine:
                folder.write(shard, make(plan, plan.method, teacher, folder, shard))
                line.update(len(folder.numbers(shard)))
    if together:
        _await_others(folder, console)
    _say(console, _state(folder))


def _await_others(folder: TrajectoryFolder, console: Console) -> None:
    """Until the shards of the other processes are there, however unequal the shares: nobody is to wait in a collective
    for work of hours. Raises UserError where none has come for ``STALE_S``."""
    missing, since = folder.missing(), time.monotonic()
    if missing:
        _say(console, f"waiting for {len(missing)} shard(s) of other processes")
    while missing and time.monotonic() - since < STALE_S:
        time.sleep(LOOK_S)
        before, missing = len(missing), folder.missing()
        since = time.monotonic() if len(missing) < before else since
    if missing:
        raise UserError(
            f"{folder.path}: {len(missing)} shard(s) of other processes did not come in {STALE_S / 3600:g} hours; all "
            "processes must write to this one folder. Start it again: it makes what is missing"
        )


def folder_of(plan: Plan) -> TrajectoryFolder:
    """The folder of the plan's trajectories; whether they were made is another question. Raises like ``generate``."""
    assert isinstance(plan.method, OdeInit)
    return _folder(plan, plan.method, teacher_weights(plan))


def trajectory_batches(plan: Plan, encode: Any, condition: Any) -> TrajectoryBatches:
    """The batches of a run that trains on trajectories; ``encode`` and ``condition`` are those of a ``BatchSource``."""
    folder, (rank, world) = folder_of(plan), plan.rows
    order = BatchOrder(
        plan.recipe.seed,
        folder.manifest.count,
        plan.recipe.data.batch,
        plan.method.num_batches,
        rank=rank,
        world=world,
    )
    return TrajectoryBatches(folder, plan.dataset, order, encode, condition, plan.device)


def make(plan: Plan, method: OdeInit, teacher: Role, folder: TrajectoryFolder, shard: int) -> Trajectory:
    """The trajectories of one shard, in pieces of ``engine.micro_batch`` rows."""
    numbers = torch.tensor(folder.numbers(shard))
    chosen = Chosen(plan.dataset, folder.manifest).items(numbers)
    items, told, key = (tensor.to(plan.device) for tensor in (*chosen, numbers))
    conditioner = plan.conditioner(teacher.network)
    cond, uncond = conditioner.condition(told), conditioner.null(len(told), told.device)
    batch = Batch(key, plan.codec.encode(items).to(plan.sampler.dtype), cond, uncond)
    draw, size = Draw(plan.recipe.seed, "trajectories", 0, key), plan.recipe.engine.micro_batch or len(key)
    pieces = [slice(start, start + size) for start in range(0, len(key), size)]
    return concat([method.ode(teacher, rows(batch, piece), draw.rows(piece)) for piece in pieces])


def teacher_weights(plan: Plan) -> dict[str, Tensor]:
    """As stored, on the CPU."""
    role = plan.roles["teacher"]
    assert role.source is not None
    return role.source.weights(role.weights)


def _teacher(plan: Plan, weights: dict[str, Tensor]) -> Role:
    model = plan.roles["teacher"].model
    assert model is not None
    network = build(model)
    network.load_state_dict(weights)
    return Role("teacher", freeze(network, plan.device, plan.precision), plan.precision)


def _folder(plan: Plan, method: OdeInit, weights: dict[str, Tensor]) -> TrajectoryFolder:
    wanted, place = _manifest(plan, method, weights), method.section.trajectories.path
    default = Path(plan.recipe.data.cache) / "trajectories" / wanted.digest
    return TrajectoryFolder.open((Path(place) if place else default).expanduser(), wanted)


def _manifest(plan: Plan, method: OdeInit, weights: dict[str, Tensor]) -> Manifest:
    role, section = plan.roles["teacher"], method.section
    assert role.source is not None
    source, which = role.source, role.source.chosen(role.weights)
    return Manifest(
        teacher=f"{source.path}, {which} weights" + (f", iteration {source.iteration}" if source.iteration else ""),
        teacher_digest=weights_digest(weights, role.model and role.model.causal, plan.precision),
        data=f"{plan.recipe.data.name}, {len(plan.dataset):,} items",
        data_digest=data_digest(plan.dataset),
        codec=plan.codec.id,
        shape=plan.shape,
        nodes=section.nodes,
        shift=section.shift,
        guidance_scale=section.guidance_scale,
        sigmas=method.sigmas,
        seed=plan.recipe.seed,
        dtype=section.trajectories.dtype,
        count=section.trajectories.count,
        shard=section.trajectories.shard,
    )


def _refuse_full_disk(folder: TrajectoryFolder, missing: list[int]) -> None:
    """Raises UserError if what is missing has no room."""
    needed = sum(len(folder.numbers(shard)) for shard in missing) * folder.manifest.num_bytes
    here = next(place for place in (folder.path, *folder.path.absolute().parents) if place.exists())
    free = shutil.disk_usage(here).free
    if needed > free:
        raise UserError(
            f"{folder.path}: the trajectories need {needed / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free; write "
            "another method.trajectories.path, a lower count, or dtype: float16"
        )


def _state(folder: TrajectoryFolder) -> str:
    count, lacking = folder.manifest.count, sum(len(folder.numbers(shard)) for shard in folder.missing())
    whole = f"{count:,} trajectories are in {folder.path}"
    return whole if not lacking else f"{count - lacking:,} of {whole}"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Line:
    """How many trajectories there are: a bar on a terminal, elsewhere a line now and then, and a last one after
    Ctrl-C."""

    def __init__(self, name: str, folder: TrajectoryFolder, console: Console, interval_s: float = 15.0):
        self._name, self._folder, self._console, self._interval_s = name, folder, console, interval_s
        self._done = folder.manifest.count - sum(len(folder.numbers(shard)) for shard in folder.missing())
        self._printed_at = -math.inf
        columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(f"{name} trajectories", total=folder.manifest.count, completed=self._done)

    def update(self, made: int) -> None:
        """``made`` more of them are on the disk."""
        self._done += made
        self._bar.update(self._task, completed=self._done)
        if not self._console.is_terminal and time.monotonic() - self._printed_at >= self._interval_s:
            self._printed_at = time.monotonic()
            _say(self._console, f"{self._name} trajectories | {self._done}/{self._folder.manifest.count}")

    def __enter__(self) -> _Line:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if isinstance(error, KeyboardInterrupt):
            _say(self._console, f"Stopped: {_state(self._folder)}; the same command makes the rest.")

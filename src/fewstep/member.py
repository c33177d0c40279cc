"""A process that trains: its engine, and what validates the student where that lives here."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from fewstep.assemble import assemble
from fewstep.checkpoint.background import Saver
from fewstep.checkpoint.meta import Meta
from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.save import Checkpoint, CheckpointSection, take_part
from fewstep.config import recipe_type
from fewstep.data.sources import open_dataset
from fewstep.engines.mesh import Mesh, Ranks, join
from fewstep.engines.ray.placement import Group
from fewstep.errors import UserError
from fewstep.evaluate.validation import Validator
from fewstep.observe.loops import telling
from fewstep.plan import Plan
from fewstep.prepare import prepare
from fewstep.trajectories import generate


class Member:
    """What one process contributes to a run.

    group: of workers, to which this one belongs, with some of the method's roles; else all of them live here. saver:
    what writes its checkpoints.
    """

    def __init__(
        self,
        plan: Plan,
        run: RunFolder,
        mesh: Mesh | None,
        group: Group | None = None,
        saver: Saver | None = None,
    ):
        self.plan, self.mesh, self._saver = plan, mesh, saver or Saver()
        self.engine = assemble(plan, mesh, group.roles, group.rolls) if group else assemble(plan, mesh)
        averages = self.engine.ema is not None
        self._check = validator(plan, self.engine.roles["student"], run) if averages else None

    between = True
    """Nothing of a later iteration is ever done."""

    def run(self, iteration: int) -> dict[str, Tensor]:
        """All phases of one iteration; its metrics are still on the device."""
        return self.engine.run(iteration)

    def gauges(self) -> dict[str, float]:
        """Times of phases and memory since the last call."""
        return self.engine.gauges()

    def validate(self, iteration: int) -> Mapping[str, float]:
        """Results of the averaged student; every process that holds a part of it calls this."""
        assert self._check is not None
        with self.engine.averaged() as student:
            return self._check(iteration, student)

    def counters(self) -> dict[str, tuple[int, int]]:
        """Of every trained role, how many updates were made and how many skipped."""
        return {name: (int(o.updates), int(o.skipped)) for name, o in self.engine.optimizers.items()}

    def save(self, checkpoints: Path, meta: Meta | None, keep: CheckpointSection) -> None:
        """Writes a checkpoint, or begins to; every process but the first hands in its parts (``meta`` None)."""
        state = self.engine.state()
        if meta is None:
            take_part(state)
        else:
            self._saver.save(checkpoints, meta.iteration, state, meta.to_json(), keep)

    def load(self, checkpoint: Checkpoint) -> None:
        """Goes on from there."""
        self.engine.load({group: checkpoint.tensors(group) for group in checkpoint.groups})


@contextmanager
def member(
    values: Mapping[str, Any], place: Path, home: Path, group: Group, ranks: Ranks, store: Any
) -> Iterator[Member]:
    """The share of a worker that Ray started, for the recipe of these plain ``values`` and the run in ``place``; what
    it trains on is made first, where it is missing. ``store``: through which the workers of the group meet.

    home: the folder that the run was started in, where the paths of a recipe begin; a joined cluster's workers begin
    elsewhere. Raises UserError where this machine has no such folder, or not the run's.
    """
    for folder in (home, place):
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not there on {platform.node()}; all machines of a cluster read the recipe's paths and "
                "write checkpoints in the folders of the machine that starts the run: share them"
            )
    os.chdir(home)
    recipe = recipe_type(tuple(values["plugins"])).model_validate(values)
    plan, engine = prepare(recipe, ranks), recipe.engine
    if plan.device.type == "cpu":
        torch.set_num_threads(max(1, int(group.section.cpus)))
    generate(plan, rank=ranks.rank, world=ranks.world, console=Console(quiet=True), together=True)
    with join(ranks, plan.device, timeout_s=engine.timeout_s, replicas=engine.replicas, store=store) as mesh:
        yield Member(plan, RunFolder(place), mesh, group)


def validator(plan: Plan, student: Any, run: RunFolder) -> Validator | None:
    """What validates the averaged student, if the recipe asks for it; its classifier is trained now, if ever.

    Of several ranks all make the same samples together, and the first one judges and shows them.
    """
    section = plan.recipe.validation
    if section is None:
        return None
    if not plan.ranks.first:
        section = section.model_copy(update={"extractor": None})
    with telling() if plan.ranks.first else nullcontext():
        return Validator(
            section,
            plan.recipe.sampling,
            student.network.conditioner,
            plan.codec,
            plan.dataset,
            open_dataset(plan.recipe.data, "test"),
            shape=plan.shape,
            causal=student.causal,
            folder=run.samples if plan.ranks.first else None,
            dtype=plan.sampler.dtype,
            device=plan.device,
            plugins=plan.recipe.plugins,
        )

"""The ways to lay a run out on GPUs, and their order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from fewstep.config import Recipe
from fewstep.engines.api import EngineSection
from fewstep.misfits import as_override

if TYPE_CHECKING:
    from fewstep.costs.estimate import Estimate, Planner

EXTRA = 1.02
"""How much faster a layout must be for each thing that it does beside the plain one."""


@dataclass(frozen=True)
class Layout:
    """One way to run a recipe.

    engine: ``process`` (every rank has a part of every role); ``split`` (Ray: a group with teacher and critic on
    ``critic_gpus``, the student's on the rest); ``colocated`` (Ray: both groups on the same GPUs, one asleep).
    """

    gpus: int
    engine: Literal["process", "split", "colocated"] = "process"
    critic_gpus: int = 0
    overlap: bool = False
    """Of split: the critic group scores a batch while the student's makes the next one."""
    replicas: int = 1
    sequence: int = 1
    offload: bool = False
    recompute: bool = False
    micro_batch: int | None = None

    @property
    def name(self) -> str:
        """In a few words."""
        shards = self.gpus // self.replicas
        ranks = f"FSDP {shards}" if self.replicas == 1 else f"HSDP {self.replicas} x {shards}"
        first = {
            "process": "one process" if self.gpus == 1 else ranks,
            "split": f"Ray split {self.critic_gpus} + {self.gpus - self.critic_gpus}" + ", overlap" * self.overlap,
            "colocated": "Ray colocated",
        }[self.engine]
        extras = [f"sequence {self.sequence}"] * (self.sequence > 1) + ["offload"] * self.offload
        extras += ["recompute"] * self.recompute
        return ", ".join([first, *extras, f"micro-batch {self.micro_batch or 'all'}"])

    def overrides(self, recipe: Recipe) -> list[str]:
        """What of the recipe's engine section this layout changes."""
        wanted = {name: getattr(self, name) for name in ("replicas", "sequence", "offload", "recompute", "micro_batch")}
        changed = {name: value for name, value in wanted.items() if getattr(recipe.engine, name) != value}
        words = [f"engine.{name}={'null' if v is None else str(v).lower()}" for name, v in changed.items()]
        if self.gpus > 1 and recipe.engine.compile == "graphs":
            words.append("engine.compile=blocks")
        if self.engine == "process" and recipe.engine.name == "ray":
            kept = recipe.engine.model_dump(mode="json", exclude_defaults=True)
            alike = {key: value for key, value in kept.items() if key in EngineSection.model_fields and key != "name"}
            words.insert(0, as_override("engine", alike))
        return words + self.groups()

    def groups(self) -> list[str]:
        """What makes it groups of workers on Ray, if it is that."""
        if self.engine == "process":
            return []
        critic = self.gpus if self.engine == "colocated" else self.critic_gpus
        student = self.gpus if self.engine == "colocated" else self.gpus - self.critic_gpus
        sizes = f"{{critic: {{gpus: {critic}}}, student: {{gpus: {student}}}}}"
        words = ["engine.name=ray", f"engine.layout={self.engine}", f"'engine.groups={sizes}'"]
        return words + ["engine.overlap=true"] * self.overlap

    def shares(self, batch: int) -> bool:
        """Whether the ranks of every group get equal parts of a batch."""
        sizes = (self.critic_gpus, self.gpus - self.critic_gpus) if self.engine == "split" else (self.gpus,)
        return all(size % self.sequence == 0 and batch % (size // self.sequence) == 0 for size in sizes)

    @property
    def extras(self) -> int:
        """How many things it does beside the plain one."""
        ray = 2 * (self.engine != "process")
        return ray + (self.sequence > 1) + self.offload + self.recompute + self.overlap + (self.replicas > 1)


def layouts(planner: Planner, gpus: int) -> Iterator[Layout]:
    """All that are worth a look, from the plainest on."""
    recipe, video = planner.sizes.recipe, planner.sizes.shape[0] > 1
    hosts = math.ceil(gpus / planner.host_gpus)
    replicas = sorted({1, hosts} if gpus > planner.host_gpus else {1})
    sequences = [n for n in (1, 2, 4, 8) if n <= min(gpus, planner.host_gpus)] if video else [1]
    graphs = recipe.engine.compile == "graphs" and gpus == 1
    micro: Sequence[int | None] = (None,) if graphs else (None, 8, 4, 2, 1)
    engines = [Layout(gpus, replicas=r, sequence=s) for r in replicas for s in sequences]
    if "critic" in planner.sizes.roles and not recipe.checkpoint.asynchronous:
        overlaps = (False, True) if recipe.sampling.stream_chunks == 1 else (False,)
        for critic in sorted({gpus // 4, gpus // 2, 3 * gpus // 4} - {0, gpus}):
            engines += [Layout(gpus, "split", critic, overlap) for overlap in overlaps]
        engines.append(Layout(gpus, "colocated"))
    for layout in engines:
        for offload in (False, True) if layout.engine == "process" and not graphs else (False,):
            for recompute in (False, True):
                for size in micro:
                    yield replace(layout, offload=offload, recompute=recompute, micro_batch=size)


def ranked(planner: Planner, gpus: int) -> list[Estimate]:
    """Every layout that can be, the fastest that fits first, then those that do not fit, the smallest first."""
    found = {}
    for layout in layouts(planner, gpus):
        if not layout.shares(planner.batch):  # known before anything is counted
            continue
        estimate = planner.estimate(layout)
        if not estimate.problem:
            rows = max((phase.rows for phase in estimate.phases), default=0)
            plain = layout.micro_batch is None or layout.micro_batch < planner.batch * layout.sequence // layout.gpus
            if plain and rows:
                found[layout] = estimate

    def order(one: Estimate) -> tuple[bool, float]:
        return not one.fits, one.seconds * EXTRA**one.layout.extras if one.fits else one.memory_gib

    return sorted(found.values(), key=order)

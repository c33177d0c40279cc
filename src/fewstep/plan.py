"""A recipe that can run: what was found for it, before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fewstep.checkpoint.run_folder import Source
from fewstep.config import Recipe
from fewstep.data.api import Dataset
from fewstep.data.latents import LatentFolder
from fewstep.engines.mesh import Ranks
from fewstep.engines.ray.placement import Group
from fewstep.methods.api import Method
from fewstep.models.codec import Codec
from fewstep.models.discriminator import Discriminator
from fewstep.models.families import ModelSection, build
from fewstep.optim.optimizer import OptimizerSection
from fewstep.optim.schedule import ScheduleSection
from fewstep.rollout.sampler import Sampler

Shape = tuple[int, int, int, int]
ONE = Ranks()


@dataclass(frozen=True)
class RolePlan:
    """Where a role's network and weights come from, and how it is trained (``optimizer`` None: it is not).

    source: None for weights drawn at random, by the stream of the role ``drawn_for`` (two roles of one stream start
    alike). model: None for the discriminator, whose size follows from its features.
    """

    model: ModelSection | None
    source: Source | None
    weights: Literal["ema", "raw"] = "ema"
    drawn_for: str = ""
    optimizer: OptimizerSection | None = None
    schedule: ScheduleSection | None = None


@dataclass(frozen=True)
class Plan:
    """A recipe that can run."""

    recipe: Recipe
    method: Method
    sampler: Sampler
    dataset: Dataset
    codec: Codec
    roles: dict[str, RolePlan]
    device: torch.device
    precision: torch.dtype
    ranks: Ranks = ONE
    groups: tuple[Group, ...] = ()
    """Of the workers that this process is to start; empty in a process that trains itself."""

    @property
    def shape(self) -> Shape:
        return self.sampler.shape

    @property
    def rows(self) -> tuple[int, int]:
        """(i, n): this process trains on rows i, i + n, ... of every batch."""
        return self.ranks.rows(self.recipe.engine.sequence)

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """The resolved model section of every role that has one, as plain values."""
        return {name: role.model.model_dump(mode="json") for name, role in self.roles.items() if role.model is not None}

    @property
    def sources(self) -> dict[str, int | None]:
        """The iteration at which the run stands that a role is loaded from; a run that goes on would change it."""
        return {name: role.source.iteration for name, role in self.roles.items() if role.source is not None}

    def conditioner(self, network: Any) -> Any:
        """What turns what the data say of their items, labels or texts, into the network's cond and uncond
        (``condition``, ``null``)."""
        dataset = self.dataset
        if not isinstance(dataset, LatentFolder):
            return network.conditioner
        return network.conditioner.of(None if dataset.negative is None else dataset.negative.to(self.device))

    def networks(self, device: torch.device | str, only: Collection[str] | None = None) -> dict[str, nn.Module]:
        """A network for every role, or for those of ``only``, its weights not yet set; no random stream is touched."""
        wanted = self.roles if only is None else only
        made: dict[str, Any] = {
            name: build(role.model, device)
            for name, role in self.roles.items()
            if role.model is not None and name in wanted
        }
        if "discriminator" in self.roles and "discriminator" in wanted:
            gan = self.recipe.method.gan
            with torch.device("meta"):
                head = Discriminator(made[gan.features].width, len(gan.layers or (0,)))
            made["discriminator"] = head.to_empty(device=device)
        return made

    def placed(self) -> dict[str, dict[str, Any]]:
        """How many workers hold which roles, as plain values; empty where there are no groups."""
        found = {group.name: {"workers": group.size, "roles": list(group.roles)} for group in self.groups}
        return {"groups": found} if found else {}

    def total_updates(self) -> dict[str, int]:
        """Updates that each trained role will make in the whole run."""
        totals, count = dict.fromkeys(self.method.trained, 0), self.recipe.iterations
        steady = self._updates_of(count - 1)
        for iteration in range(count):
            updates = self._updates_of(iteration)
            same = count - iteration if updates == steady else 1  # what follows the warm-up is like the last iteration
            for name in updates:
                totals[name] += same
            if same > 1:
                break
        return totals

    def _updates_of(self, iteration: int) -> list[str]:
        return [name for phase in self.method.phases(iteration) for name in phase.trains]

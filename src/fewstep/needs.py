"""What a plan needs before it can begin: memory, room on the disk, and ranks that are alike."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from fewstep.engines.health import Needs
from fewstep.plan import Plan

PLACES = ("init", "path", "test_path", "cache")
"""Fields of a recipe that say where something is; machines may have it in different places."""


def needs(plan: Plan, folder: Path) -> Needs:
    """What the plan needs of each rank."""
    same = {
        "the recipe": hashlib.sha256(json.dumps(settings(plan), sort_keys=True).encode()).hexdigest()[:12],
        "the number of items in the data": f"{len(plan.dataset):,}",
        "the iterations at which the sources stand": json.dumps(plan.sources),
    }
    return Needs(same, held_bytes(plan), folder)


def settings(plan: Plan) -> Any:
    """The recipe without places and the device, which machines may have of their own."""
    return without(plan.recipe.model_dump(mode="json"), (*PLACES, "device"))


def without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {name: without(inner, names) for name, inner in value.items() if name not in names}
    return value


def held_bytes(plan: Plan) -> int:
    """Of all roles, on each rank, or of the largest where the others wait elsewhere; activations come to it."""
    roles = [count * bytes_per_parameter(plan, name) for name, count in counts(plan).items()]
    whole = max(roles) if plan.recipe.engine.offload else sum(roles)
    return whole * plan.recipe.engine.replicas // plan.ranks.world


def checkpoint_bytes(plan: Plan) -> int:
    """Weights and two moments of every trained role, and the average."""
    master = torch.promote_types(plan.precision, torch.float32).itemsize
    trained = {name: count for name, count in counts(plan).items() if plan.roles[name].optimizer is not None}
    return master * (3 * sum(trained.values()) + trained["student"])


def counts(plan: Plan) -> dict[str, int]:
    """The parameters of every role."""
    networks = plan.networks("meta")
    return {name: sum(weight.numel() for weight in networks[name].parameters()) for name in plan.roles}


def bytes_per_parameter(plan: Plan, role: str) -> int:
    """Trained: weight, gradient and two moments, and for the student the average. Frozen: the weight."""
    master = torch.promote_types(plan.precision, torch.float32).itemsize
    if plan.roles[role].optimizer is None:
        return plan.precision.itemsize
    return master * (5 if role == "student" else 4)

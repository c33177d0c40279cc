"""What a plan says of itself before it runs: roles, parameters, memory, phases."""

from __future__ import annotations

import math
from collections import Counter

import torch

from fewstep.data.api import Dataset
from fewstep.data.latents import LatentFolder
from fewstep.engines.ray.placement import Group
from fewstep.models.families import ModelSection
from fewstep.needs import bytes_per_parameter, counts
from fewstep.plan import Plan

_KEPT_PER_TOKEN = 24
"""Values of the width of a token that one block keeps for its backward pass, the feed-forward layer's apart."""


def describe(plan: Plan) -> str:
    """The plan in lines for a terminal."""
    recipe, networks = plan.recipe, plan.networks("meta")
    frames, channels, height, width = plan.shape
    lines = [
        f"{recipe.name}: {recipe.method.name}, {recipe.iterations:,} iterations of {plan.method.num_batches} x "
        f"{recipe.data.batch} rows, on {plan.device} in {str(plan.precision).removeprefix('torch.')}{many(plan)}",
        f"data: {len(plan.dataset):,} items {told(plan.dataset)}, {frames} frame(s) of {channels} x {height} x {width}",
        "sampling: " + ", ".join(f"{sigma:.4g}" for sigma in plan.sampler.sigmas) + f" ({plan.sampler.solver})",
        "",
        f"{'role':<14}{'parameters':>14}{'memory':>12}  from",
    ]
    if plan.groups:
        lines[3:3] = [placed(group) for group in plan.groups]
    if frames > 1:
        lines[-2:-2] = [f"{name} sees {seen(role.model)}" for name, role in plan.roles.items() if role.model]
    total = 0.0
    for name, role in plan.roles.items():
        count = sum(parameter.numel() for parameter in networks[name].parameters())
        gib = count * bytes_per_parameter(plan, name) / 2**30 * recipe.engine.replicas / holders(plan, name)
        total += gib
        origin = f"{role.source.path} ({role.source.chosen(role.weights)})" if role.source else "random weights"
        lines.append(f"{name:<14}{count:>14,}{gib:>8.3f} GiB  {origin}{'' if role.optimizer else ', frozen'}")
    copies = copies_gib(plan)
    if copies:
        lines.append(f"{'copy of student':<28}{copies:>8.3f} GiB  for rollouts, renewed after each update")
    carried = carried_gib(plan)
    if carried:
        lines.append(f"{'carried histories':<28}{carried:>8.3f} GiB  of this iteration and the one before")
    lines += [
        f"{'activations':<28}{activations_gib(plan):>8.3f} GiB  about, for one training pass",
        f"{'together':<28}{total + copies + carried + activations_gib(plan):>8.3f} GiB",
        "",
        "updates of the whole run: " + ", ".join(f"{role} {count:,}" for role, count in plan.total_updates().items()),
        "phases of the last iteration: " + phases(plan),
    ]
    return "\n".join(lines)


def placed(group: Group) -> str:
    """How many workers hold which roles."""
    part = f" with 1/{group.size} of" if group.size > 1 else " with"
    what = "the student's weights, for rollouts alone" if group.rolls else ", ".join(group.roles)
    return f"group {group.name}: {group.size} workers, each{part} {what}"


def holders(plan: Plan, role: str) -> int:
    """The processes over which a role is cut."""
    return next((group.size for group in plan.groups if role in group.roles), plan.ranks.world)


def copies_gib(plan: Plan) -> float:
    """Memory of the student's weights on a worker that only rolls out; 0 where there is none."""
    size = next((group.size for group in plan.groups if group.rolls), 0)
    master = torch.promote_types(plan.precision, torch.float32).itemsize
    return counts(plan)["student"] * master * plan.recipe.engine.replicas / size / 2**30 if size else 0.0


def many(plan: Plan) -> str:
    """That there are several processes, of which one is described."""
    if plan.groups:
        return f", {sum(group.size for group in plan.groups)} workers (memory of one in each group)"
    return f", in each of {plan.ranks.world} processes (memory of one)" if plan.ranks.world > 1 else ""


def told(dataset: Dataset) -> str:
    """What the network is told of an item."""
    if not isinstance(dataset, LatentFolder):
        return f"in {len(dataset.classes)} classes"
    length, width = dataset.text_shape
    return f"with texts of {length} x {width}" + (" and a negative prompt" if dataset.negative is not None else "")


def seen(model: ModelSection) -> str:
    """What a frame of a clip sees."""
    causal = model.causal
    if causal is None:
        return "whole clips"
    window = "all before them" if causal.window is None else f"a window of {causal.window}"
    return f"blocks of {causal.block_frames} frames, {window}, a sink of {causal.sink}, positions {causal.positions}"


def activations_gib(plan: Plan) -> float:
    """About what the largest network keeps of one micro-batch for its backward pass: all that is inside its blocks, or,
    where that is computed again, what enters each and the inside of one."""
    mine = plan.recipe.data.batch // plan.rows[1]
    rows = min(plan.recipe.engine.micro_batch or mine, mine)
    frames, _, height, width = plan.shape
    largest = 0
    for role in plan.roles.values():
        if role.model is not None and role.optimizer is not None:
            shape = role.model.architecture
            tokens = rows * frames * height * width // math.prod(shape.patch) // plan.recipe.engine.sequence
            block = _KEPT_PER_TOKEN * shape.dim + 3 * shape.ffn_dim
            kept = shape.layers * shape.dim + block if plan.recipe.engine.recompute else shape.layers * block
            largest = max(largest, tokens * kept)
    return largest * plan.precision.itemsize / 2**30


def carried_gib(plan: Plan) -> float:
    """What rollouts that go on hand from iteration to iteration, at most; two iterations' of it are there at once."""
    model, sampling = plan.roles["student"].model, plan.recipe.sampling
    if model is None or model.causal is None or sampling.stream_chunks == 1:
        return 0.0
    frames, _, height, width = plan.shape
    longest = frames + (sampling.stream_chunks - 2) * (frames - sampling.overlap_frames)
    recent = model.causal.recent(model.causal.block_frames)
    kept = longest if recent is None else min(longest, model.causal.sink + recent)
    shape = model.architecture
    values = 2 * shape.layers * shape.dim * kept * (height * width // math.prod(shape.patch))
    rows = plan.recipe.data.batch // plan.ranks.world
    return 2 * plan.method.num_batches * rows * values * plan.precision.itemsize / 2**30


def phases(plan: Plan) -> str:
    """The phases in their order, repeated ones counted."""
    last = list(plan.method.phases(plan.recipe.iterations - 1))
    counted = Counter(phase.name.split(".")[0] for phase in last)
    return " -> ".join(f"{name} x {count}" if count > 1 else name for name, count in counted.items())

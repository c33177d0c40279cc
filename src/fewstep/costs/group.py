"""What some of the phases take on the GPUs that run them: the bytes at their peak and their seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fewstep.costs.layouts import Layout
from fewstep.costs.links import Links
from fewstep.costs.sizes import Sizes
from fewstep.costs.speed import KERNEL_S, UPDATE_BYTES, Machine, own_kernels, seconds
from fewstep.costs.trace import PhaseCost
from fewstep.costs.work import flops

if TYPE_CHECKING:
    from fewstep.costs.estimate import Planner

CRITICS = ("teacher", "critic", "discriminator")
"""Roles of the critic group, where the student has another."""


@dataclass(frozen=True)
class PhaseEstimate:
    """Of one phase on one GPU of its group. seconds: of all ``times`` that an iteration has it."""

    name: str
    times: int
    rows: int
    pieces: int
    tokens: float
    flops: float
    busy_s: float
    host_s: float
    network_s: float
    seconds: float
    memory: float


class Group:
    """The GPUs that run some of the phases."""

    def __init__(self, planner: Planner, layout: Layout, phases: list[PhaseCost], gpus: int):
        self.planner, self.layout, self.costs, self.gpus = planner, layout, phases, gpus
        used = {role for phase in phases for role in phase.roles} | ({"student"} if gpus else set())
        names = [name for name in planner.states if name in used]
        if layout.engine != "process":
            mine = any(role in CRITICS for phase in phases for role in phase.roles)
            names = [name for name in names if (name in CRITICS) == mine]
        self.shards = max(gpus // layout.replicas, 1)
        self.states = {name: planner.states[name].cut(self.shards) for name in names}
        ranks = gpus // layout.sequence
        self.rows = planner.batch // max(ranks, 1)
        self.links = Links(planner.kind, planner.host_gpus, self.shards, layout.replicas, layout.sequence)
        self.machine = Machine(planner.kind, planner.fitted, planner.precision, planner.graphs(layout), layout.sequence)

    @property
    def problem(self) -> str:
        """Why it cannot be."""
        layout, planner = self.layout, self.planner
        parts = planner.sizes.method.row_parts
        ranks = self.gpus // layout.sequence
        if self.gpus % layout.sequence or self.gpus % layout.replicas:
            return f"{self.gpus} GPUs do not divide into {layout.sequence} x {layout.replicas}"
        if planner.batch % (ranks * parts):
            return f"a batch of {planner.batch} does not divide among {ranks} ranks x {parts} parts"
        heads = [size.section.architecture.heads for size in planner.sizes.roles.values() if size.section is not None]
        if any(count % layout.sequence for count in heads):
            return f"{heads} heads do not divide among {layout.sequence} ranks"
        tokens = [size.frame_tokens(planner.sizes.shape) for size in planner.sizes.roles.values()]
        if odd := [count for count in tokens if count % layout.sequence]:
            return f"{odd[0]} tokens of a frame do not divide among {layout.sequence} ranks"
        return ""

    @cached_property
    def phases(self) -> list[PhaseEstimate]:
        return [self.phase(cost) for cost in self.costs]

    @cached_property
    def peak(self) -> PhaseEstimate:
        return max(self.phases, key=lambda phase: phase.memory)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Of the memory at the peak, what is no role's."""
        cost = next(cost for cost in self.costs if cost.name == self.peak.name)
        return self.memory(cost)[1]

    @property
    def moves_s(self) -> float:
        """Of an iteration: what goes to sleep and wakes, between phases or between groups, over the host's link."""
        if not (self.layout.offload or self.layout.engine == "colocated"):
            return 0.0
        if self.layout.engine == "colocated" and not self.layout.offload:
            turns = max(sum(cost.times for cost in self.costs if cost.name.startswith(("rollout", "critic"))), 1)
            return 2 * turns * sum(state.kept for state in self.states.values()) / self.planner.kind.host_bytes_per_s
        moved = sum(cost.times * sum(self.awake(cost).values()) for cost in self.costs)
        return 2 * moved / self.planner.kind.host_bytes_per_s

    def awake(self, cost: PhaseCost) -> dict[str, float]:
        """Bytes of the roles' states that the phase needs, by role; all of them without offload."""
        if not self.layout.offload:
            return {name: state.kept for name, state in self.states.items()}
        found = {name: state.weights for name, state in self.states.items() if name in cost.roles}
        for name in cost.trains:
            found[name] = self.states[name].kept
        if "ema" in cost.roles:
            found["student"] = self.states["student"].weights + self.states["student"].ema
        return found

    def memory(self, cost: PhaseCost) -> tuple[float, dict[str, float]]:
        """Bytes at the peak of the phase, and what of them is no role's."""
        layout, planner = self.layout, self.planner
        rows, pieces = self.cut(cost)
        whole = sum(self.states[name].gradients for name in cost.trains) if pieces > 1 else 0.0
        found = []
        for held in cost.peaks or ():
            activations = (held.activations + planner.fitted.joined * held.joined) * rows / layout.sequence
            gradients = max(held.cut / self.shards, whole)
            found.append((activations + gradients + held.whole, activations, gradients, held.whole))
        _, activations, gradients, copies = max(found, default=(0.0, 0.0, 0.0, 0.0))
        parts = {
            "activations": activations,
            "histories": min(cost.history * rows / layout.sequence, activations),
            "gradients": gradients,
            "bfloat16 copies": copies,
            "gathered blocks": self.gathered(cost),
            "data": data_bytes(planner.sizes, planner.precision) * self.rows,
        }
        kept = sum(self.awake(cost).values())
        return kept + sum(parts.values()) - parts["histories"], parts

    def gathered(self, cost: PhaseCost) -> float:
        """The block that runs and the next one, whole; in training with their gradients; and what stands around. In a
        rollout the whole network."""
        if self.shards == 1:
            return 0.0
        sizes, most = self.planner.sizes.roles, 0.0
        if self.once(cost):
            (name,) = cost.roles
            return (4 if sizes[name].trained else 2) * self.planner.counts[name].all
        for name in cost.roles:
            role = "student" if name == "ema" else name
            count, width = self.planner.counts[role], 4 if sizes[role].trained else 2
            around = count.all - count.block * layers(sizes[role].section)
            gradients = 4 * (2 * count.block + around) if name in cost.trains else 0
            most = max(most, width * (2 * count.block + around) + gradients)
        return most

    def once(self, cost: PhaseCost) -> bool:
        """Whether the phase is a rollout for which ranks gather all weights once."""
        alone = len(cost.roles) == 1 and cost.roles[0] != "ema" and not cost.trains
        return alone and self.planner.sizes.recipe.engine.gather_once

    def cut(self, cost: PhaseCost) -> tuple[int, int]:
        """Rows that run at once, and how many such pieces there are."""
        rows = max(round(self.rows * cost.part), 1)
        most = min(self.layout.micro_batch or rows, rows)
        return most, math.ceil(rows / most)

    def phase(self, cost: PhaseCost) -> PhaseEstimate:
        planner = self.planner
        rows, pieces = self.cut(cost)
        busy, host = seconds(cost.works, self.machine, rows)
        own = own_kernels(cost) * (planner.fitted.launch_s * planner.slower_host)
        busy = (busy + own_kernels(cost) * KERNEL_S) * pieces
        host = (host * planner.slower_host + self.links.launches(cost.works) + own) * pieces
        network = self.links.seconds(cost, planner.counts, planner.sizes.roles, rows, once=self.once(cost)) * pieces
        if self.once(cost):
            network += self.links.gather_s(self.gathered(cost))
        busy += self.update_s(cost)
        one = max(busy, host, network)
        done = max(round(self.rows * cost.part), 1)
        return PhaseEstimate(
            cost.name,
            cost.times,
            rows,
            pieces,
            tokens(cost, planner.sizes) * done * cost.times / self.layout.sequence,
            sum(flops(work) * count for work, count in cost.works.items()) * done * cost.times / self.layout.sequence,
            busy * cost.times,
            host * cost.times,
            network * cost.times,
            one * cost.times,
            self.memory(cost)[0],
        )

    def update_s(self, cost: PhaseCost) -> float:
        rate = self.planner.kind.memory_bytes_per_s * self.planner.fitted.memory
        moved = [UPDATE_BYTES.get(name, UPDATE_BYTES["other"]) * self.planner.counts[name].all for name in cost.trains]
        return sum(moved) / self.shards / rate


def tokens(cost: PhaseCost, sizes: Sizes) -> float:
    """Tokens that enter networks in the phase, for one row."""
    total = 0.0
    for work, count in cost.works.items():
        if work.kind == "block" and not work.backward and not work.again:
            total += work.rows * work.tokens * count / layers(sizes.roles[work.role].section)
    return total


def layers(section: Any) -> int:
    return section.architecture.layers if section is not None else 1


def data_bytes(sizes: Sizes, precision: torch.dtype) -> float:
    """Of one row: the batches of an iteration, whose texts come in the precision that they are stored in, and the
    records that the last of them has."""
    latents = 4 * math.prod(sizes.shape)
    student = sizes.roles["student"].section
    text = 0
    if student is not None and student.conditioner.name == "embedding":
        text = 4 * sizes.text * student.architecture.text_dim
    return sizes.method.num_batches * (latents + text) + 3 * latents

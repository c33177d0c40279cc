"""What a layout takes in memory and time, GPU by GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fewstep.costs.layouts import Layout
from fewstep.costs.links import Links
from fewstep.costs.sizes import Sizes
from fewstep.costs.speed import KERNEL_S, UPDATE_BYTES, Coefficients, Machine, coefficients, own_kernels, seconds
from fewstep.costs.states import Counts, State, counts_of, state_of
from fewstep.costs.trace import PhaseCost, Setting, trace
from fewstep.costs.work import flops
from fewstep.devices import DeviceKind

GIB = 2**30
CONTEXT_GIB = 1.0
"""What CUDA, its libraries and NCCL take beside tensors."""
SPLIT_UP = 1.05
"""The allocator holds more than tensors take, since its pieces do not fit each other."""
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


@dataclass(frozen=True)
class Estimate:
    """What a layout takes; ``problem`` says why it cannot be, and then there is nothing else."""

    layout: Layout
    problem: str = ""
    memory_gib: float = 0.0
    """At the peak, with what CUDA and the allocator take."""
    tensors_gib: float = 0.0
    """Tensors alone: what ``torch.cuda.max_memory_allocated`` says."""
    fits: bool = False
    seconds: float = 0.0
    samples_per_s: float = 0.0
    mfu: float = 0.0
    roles: dict[str, State] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    """Bytes of what is no role's, at the peak."""
    phases: tuple[PhaseEstimate, ...] = ()


class Planner:
    """Estimates layouts of one recipe on one kind of GPU.

    host_gpus: GPUs of a host. slower_host: how many times as long its processor needs to launch a kernel as the one
    that was measured.
    """

    def __init__(
        self,
        sizes: Sizes,
        kind: DeviceKind,
        *,
        host_gpus: int = 8,
        precision: torch.dtype = torch.bfloat16,
        fitted: Coefficients | None = None,
        slower_host: float = 1.0,
    ):
        self.slower_host = slower_host
        self.sizes, self.kind, self.host_gpus, self.precision = sizes, kind, host_gpus, precision
        self.fitted = fitted or coefficients()
        self.batch = sizes.recipe.data.batch
        self.compile = sizes.recipe.engine.compile
        self._traces: dict[bool, list[PhaseCost]] = {}

    @cached_property
    def counts(self) -> dict[str, Counts]:
        return counts_of(self.sizes.roles)

    @cached_property
    def states(self) -> dict[str, State]:
        """Of every role, whole."""
        return {
            name: state_of(name, self.counts[name].all, size.trained, self.precision)
            for name, size in self.sizes.roles.items()
        }

    def traced(self, recompute: bool) -> list[PhaseCost]:
        if recompute not in self._traces:
            sizes = self.sizes
            compiled = frozenset(sizes.roles if self.compile else ())
            setting = Setting(self.precision, recompute, compiled)
            self._traces[recompute] = trace(sizes.method, sizes.roles, sizes.shape, setting, text=sizes.text)
        return self._traces[recompute]

    @cached_property
    def model_flops(self) -> float:
        """Of an iteration of the whole batch, nothing computed twice."""
        phases = self.traced(self.sizes.recipe.engine.recompute)
        return self.batch * sum(model_flops(phase) for phase in phases)

    def estimate(self, layout: Layout) -> Estimate:
        """What the layout takes."""
        phases = self.traced(layout.recompute)
        if layout.engine == "process":
            groups = [(phases, layout.gpus)]
        else:
            critics = [phase for phase in phases if set(phase.roles) & set(CRITICS) and "student" not in phase.roles]
            others = [phase for phase in phases if phase not in critics]
            split = layout.engine == "split"
            groups = [
                (critics, layout.critic_gpus if split else layout.gpus),
                (others, layout.gpus - layout.critic_gpus if split else layout.gpus),
            ]
        found = [Group(self, layout, list(mine), gpus) for mine, gpus in groups]
        problem = next((group.problem for group in found if group.problem), "")
        if problem:
            return Estimate(layout, problem)
        estimates = [group.phases for group in found]
        total = together(estimates, layout) + sum(group.moves_s for group in found)
        top = max(found, key=lambda group: group.peak.memory)
        tensors = top.peak.memory / GIB
        memory = tensors * SPLIT_UP + CONTEXT_GIB
        return Estimate(
            layout,
            "",
            memory,
            tensors,
            memory <= self.kind.memory_gib,
            total,
            self.batch / total,
            self.model_flops / total / layout.gpus / Machine(self.kind, self.fitted, self.precision).flops_per_s,
            {name: state for group in found for name, state in group.states.items()},
            top.parts,
            tuple(phase for mine in estimates for phase in mine),
        )


def together(groups: Sequence[Sequence[PhaseEstimate]], layout: Layout) -> float:
    """Seconds of an iteration, of whose phases the first group has its own and the second one the others.

    Of groups that run at once the critic's begins with the first rollout; what is updated last waits for the scores.
    """
    times = [sum(phase.seconds for phase in mine) for mine in groups]
    if layout.overlap:
        return max(times)
    if layout.engine != "split":
        return sum(times)
    rollouts = [phase for phase in groups[1] if phase.name == "rollout"]
    first = sum(phase.seconds / phase.times for phase in rollouts)
    made = sum(phase.seconds for phase in rollouts)
    scores = sum(phase.seconds for phase in groups[0] if phase.name == "scores")
    return max(first + times[0] - scores, made) + scores + times[1] - made


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
        self.machine = Machine(
            planner.kind, planner.fitted, planner.precision, planner.compile == "graphs", layout.sequence
        )

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


def model_flops(cost: PhaseCost) -> float:
    """Of a phase of an iteration and a row, nothing computed twice."""
    own = sum(flops(work) * count for work, count in cost.works.items() if not work.again)
    return own * cost.times * cost.part


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

"""What a layout takes in memory and time, GPU by GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fewstep.costs.group import CRITICS, Group, PhaseEstimate
from fewstep.costs.layouts import Layout
from fewstep.costs.sizes import Sizes
from fewstep.costs.speed import Coefficients, Machine, coefficients
from fewstep.costs.states import Counts, State, counts_of, state_of
from fewstep.costs.trace import PhaseCost, Setting, trace
from fewstep.costs.work import flops
from fewstep.devices import DeviceKind

GIB = 2**30
CONTEXT_GIB = 1.0
"""What CUDA, its libraries and NCCL take beside tensors."""
SPLIT_UP = 1.05
"""The allocator holds more than tensors take, since its pieces do not fit each other."""


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

    def graphs(self, layout: Layout) -> bool:
        """Whether networks run as CUDA graphs, which one process alone can; several compile block by block."""
        return self.compile == "graphs" and layout.gpus == 1

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


def model_flops(cost: PhaseCost) -> float:
    """Of a phase of an iteration and a row, nothing computed twice."""
    own = sum(flops(work) * count for work, count in cost.works.items() if not work.again)
    return own * cost.times * cost.part

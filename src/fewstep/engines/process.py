"""The engine of one process, or of every rank of torchrun: all roles here, phases one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fewstep.checkpoint.tensor_file import Later
from fewstep.data.batches import BatchSource
from fewstep.engines.mesh import Mesh
from fewstep.engines.offload import Sleeper, keep_awake
from fewstep.engines.roles import Role
from fewstep.engines.stopwatch import Stopwatch, memory, memory_of_roles, phase_times
from fewstep.methods.api import Method, Phase
from fewstep.optim.ema import EMA
from fewstep.optim.optimizer import RoleOptimizer
from fewstep.records import Batch, assert_detached, concat, map_tensors, rows
from fewstep.rng import Draw
from fewstep.rollout.carry import Carry

CARRY = "carry."
"""Before the number of the batch whose carry a group of the state is."""


@dataclass
class Made:
    """What the phases of an iteration have made so far."""

    records: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, list[Tensor]] = field(default_factory=dict)
    batches: dict[int, Batch] = field(default_factory=dict)
    carries: dict[int, Carry | None] = field(default_factory=dict)


class ProcessEngine:
    """Binds roles, records and batches to the phases of ``method``; owns backward, steps, EMA and micro-batches.

    roles: those of the method; of an engine that runs some of the phases alone, the roles of these. ema: None where the
    student is not among them. mesh: the ranks, where there are several. Each runs its rows of every batch on roles cut
    over all of them.
    """

    def __init__(
        self,
        method: Method,
        roles: dict[str, Role],
        optimizers: dict[str, RoleOptimizer],
        ema: EMA | None,
        batches: BatchSource,
        *,
        seed: int,
        micro_batch: int | None = None,
        mesh: Mesh | None = None,
        offload: bool = False,
        gather_once: bool = True,
    ):
        self.method, self.roles, self.optimizers, self.ema, self.batches = method, roles, optimizers, ema, batches
        self.seed, self.micro_batch, self.mesh = seed, micro_batch, mesh
        self.offload, self.gather_once = offload, gather_once
        self.sleepers = sleepers_of(roles, optimizers, ema)
        self.carries: dict[int, Carry] = {}
        """What the next iteration goes on from, by batch."""
        self._under_way: dict[int, Made] = {}
        self.device = next(next(iter(roles.values())).network.parameters()).device
        self.watch = Stopwatch(self.device)

    def run(self, iteration: int) -> dict[str, Tensor]:
        """All phases of one iteration. Metrics stay on the device: means over the iteration, of counters the last."""
        for phase in self.method.phases(iteration):
            self.perform(phase, iteration)
        return self.finish(iteration)

    def perform(self, phase: Phase, iteration: int, foreign: Mapping[str, Any] | None = None) -> Any:
        """One phase of an iteration; returns the record that it gives, or None.

        ``foreign``: records that another engine made, by name, in place of this one's own. Several iterations may be
        under way, their phases in any order that gives each what it takes.
        """
        if torch.cuda.is_available():  # the call loads the compiler, which takes seconds
            torch.compiler.cudagraph_mark_step_begin()
        made = self._under_way.setdefault(iteration, Made())
        if phase.batch not in made.batches:
            self.watch.lap("data")
            made.batches[phase.batch] = self.batches.batch(iteration, phase.batch)
        batch, record = made.batches[phase.batch], None
        records = made.records | dict(foreign or {})
        for name, other in (foreign or {}).items():
            if not torch.equal(other.key, batch.key):
                raise RuntimeError(f"the record '{name}' for phase '{phase.name}' is not of the rows of its batch")
        self.watch.lap(phase.name.partition(".")[0])
        self._ready(phase)
        if phase.gives:
            record = self._record(phase, iteration, batch, records)
            if phase.carries:
                record, made.carries[phase.batch] = record
            made.records[phase.gives] = record
            report = {name: values.mean() for name, values in getattr(record, "losses", {}).items()}
            if self.mesh:
                report = self.mesh.mean(report)
        else:
            report = self._train(phase, iteration, batch, records)
        for name, value in report.items():
            made.metrics.setdefault(name, []).append(value)
        self.watch.lap(None)
        return record

    def finish(self, iteration: int) -> dict[str, Tensor]:
        """Ends an iteration whose phases are done, and returns its metrics as :meth:`run` does."""
        made = self._under_way.pop(iteration, Made())
        self.watch.iterations += 1
        self.carries = {slot: carry for slot, carry in made.carries.items() if carry is not None}
        return {
            name: values[-1] if name.endswith(("/lr", "/updates", "/skipped")) else torch.stack(values).mean()
            for name, values in made.metrics.items()
        }

    def gauges(self) -> dict[str, float]:
        """Seconds of each kind of phase in an iteration since the last call, and memory; waits for the device."""
        sizes = memory_of_roles(self.roles, self.optimizers, self.ema)
        return phase_times(self.watch) | memory(self.device) | sizes

    def state(self) -> dict[str, dict[str, Any]]:
        """The weights and the optimizer of every trained role, the EMA, and the carries where there are any."""
        groups = {name: self.roles[name].state() for name in self.optimizers}
        kept = {moments_of(name): (name, optimizer.state()) for name, optimizer in self.optimizers.items()}
        if self.ema is not None:
            kept["ema"] = "student", self.ema.state()
        for group, (name, tensors) in kept.items():
            values = {key: self.sleepers[group].value(tensor) for key, tensor in tensors.items()}
            groups[group] = self.roles[name].whole(values)
        groups |= {f"{CARRY}{slot}": self._all_rows(carry) for slot, carry in self.carries.items()}
        return groups

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        """The inverse of :meth:`state`; strict: a missing group or tensor raises KeyError or RuntimeError."""
        self._under_way.clear()
        for name, optimizer in self.optimizers.items():
            self.wake({name, moments_of(name)})
            self.roles[name].load(state[name])
            optimizer.load(self.roles[name].cut(state[moments_of(name)]))
        if self.ema is None:
            return
        self.wake({"ema"})
        self.ema.load(self.roles["student"].cut(state["ema"]))
        device = next(self.roles["student"].network.parameters()).device
        self.carries = {
            int(group.removeprefix(CARRY)): map_tensors(
                lambda tensor: tensor.to(device, copy=True), Carry.of(self._my_rows(tensors))
            )
            for group, tensors in state.items()
            if group.startswith(CARRY)
        }

    @contextmanager
    def averaged(self) -> Iterator[Role]:
        """Inside, the student has its averaged weights; afterwards its own again, bit for bit."""
        assert self.ema is not None
        self.wake({"student", "ema"})
        student = self.roles["student"]
        with self.ema.swapped(), student.gathered() if self.gather_once else nullcontext():
            yield student

    def wake(self, names: Iterable[str], perhaps: Iterable[str] = ()) -> None:
        """Groups of :attr:`sleepers` that are about to be used: all, or with ``offload`` those of ``names``, after
        the others have gone to sleep. perhaps: roles that are left as they are; a call wakes them."""
        if self.offload:
            keep_awake(self.sleepers, names, perhaps=perhaps)
        else:
            keep_awake(self.sleepers, self.sleepers)

    def sleep(self) -> None:
        """All go to sleep, until they are used."""
        keep_awake(self.sleepers, ())

    def _ready(self, phase: Phase) -> None:
        """Wakes what the phase trains; the other roles that it is handed wake when they are called, if they are."""
        handed = {name for name in parameters_of(phase.run) if name in self.sleepers}
        used = {*phase.trains, *(moments_of(name) for name in phase.trains)}
        if "ema" in handed or "student" in phase.trains:
            used |= {"student", "ema"}
        self.wake(used, handed)

    @torch.no_grad()
    def _record(self, phase: Phase, iteration: int, batch: Batch, records: dict[str, Any]) -> Any:
        with self._gathered(phase):
            made = [phase.run(**arguments) for arguments, _ in self._pieces(phase, iteration, batch, records)]
        for record in made:  # concat, without gradient, would end a graph in silence
            assert_detached(record, phase.gives or phase.name)
        return concat(made)

    def _gathered(self, phase: Phase) -> AbstractContextManager[None]:
        """Around a rollout, which calls one role many times."""
        handed = [name for name in parameters_of(phase.run) if name in self.roles]
        return self.roles[handed[0]].gathered() if len(handed) == 1 and self.gather_once else nullcontext()

    def _train(self, phase: Phase, iteration: int, batch: Batch, records: dict[str, Any]) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = {}
        for arguments, share in self._pieces(phase, iteration, batch, records):
            losses = {name: values.mean() * share for name, values in phase.run(**arguments).items()}
            torch.stack(list(losses.values())).sum().backward()
            for name, loss in losses.items():
                metrics[name] = metrics.get(name, 0) + loss.detach()
        for name in phase.trains:
            self.roles[name].take_gradients()
        norms = {name: self.optimizers[name].norm() for name in phase.trains}
        if self.mesh:
            metrics, norms = self.mesh.agreed(metrics, norms)
        finite = torch.stack([value.isfinite() for value in (*norms.values(), *metrics.values())]).all()
        for name in phase.trains:
            report = self.optimizers[name].step(norms[name], finite)
            metrics |= {f"{name}/{key}": value for key, value in report.items()}
        if self.ema is not None and "student" in phase.trains:
            self.ema.update(self.optimizers["student"].updates, finite)
        return metrics

    def _all_rows(self, carry: Carry) -> dict[str, Any]:
        """The carry of the global batch; tensors with rows are gathered one by one when they are asked for."""
        mesh, tensors = self.mesh, carry.tensors()
        if mesh is None:
            return tensors

        def later(name: str, rows: Tensor) -> Later:
            shape, per_head = [len(rows) * mesh.ranks.rows(mesh.sequence)[1], *rows.shape[1:]], is_per_head(name)
            shape[2:3] = [size * (mesh.sequence if per_head else 1) for size in shape[2:3]]
            return Later(tuple(shape), rows.dtype, partial(mesh.all_rows, rows, per_head=per_head))

        return {name: tensor if name == "history" else later(name, tensor) for name, tensor in tensors.items()}

    def _my_rows(self, carry: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`_all_rows`."""
        if self.mesh is None:
            return dict(carry)
        return {
            name: tensor if name == "history" else self.mesh.my_rows(tensor, per_head=is_per_head(name))
            for name, tensor in carry.items()
        }

    def _pieces(
        self, phase: Phase, iteration: int, batch: Batch, records: dict[str, Any]
    ) -> Iterator[tuple[dict[str, Any], float]]:
        """The arguments of the phase for each micro-batch of its rows, and the micro-batch's share of those rows."""
        (k, parts), total = phase.part, len(batch.key)
        first, last = total * k // parts, total * (k + 1) // parts
        size = min(self.micro_batch or last - first, last - first)
        for start in range(first, last, size):
            index = slice(start, min(start + size, last))
            cut = rows(batch, index)
            known = {
                **self.roles,
                **{name: rows(record, index) for name, record in records.items()},
                "batch": cut,
                "draw": Draw(self.seed, phase.name, iteration, cut.key),
                "carry": rows(self.carries.get(phase.batch), index),
            }
            yield {name: known.get(name) for name in parameters_of(phase.run)}, len(cut.key) / (last - first)


def sleepers_of(roles: dict[str, Role], optimizers: dict[str, RoleOptimizer], ema: EMA | None) -> dict[str, Sleeper]:
    """What can sleep by itself: the weights of every role, the moments of those that are trained, and the average."""
    found = {name: role.weights for name, role in roles.items() if name != "ema"}
    for name, optimizer in optimizers.items():
        found[moments_of(name)] = Sleeper(lambda optimizer=optimizer: optimizer.state().values())
    return found if ema is None else found | {"ema": Sleeper(ema.shadows.values)}


def is_per_head(name: str) -> bool:
    """Whether a tensor of a carry is keys or values."""
    return name.startswith("history.")


def moments_of(name: str) -> str:
    """The group of tensors that hold the state of a role's optimizer."""
    return f"{name}.optimizer"


@lru_cache(maxsize=256)
def parameters_of(function: Any) -> tuple[str, ...]:
    """The names by which a phase is bound: roles, records, ``batch``, ``draw``, ``carry``; what is absent binds to
    None."""
    return tuple(inspect.signature(function).parameters)

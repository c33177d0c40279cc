"""The engine of one process, or of every rank of torchrun: all roles here, phases one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fewstep.checkpoint.tensor_file import Later
from fewstep.data.batches import BatchSource
from fewstep.engines.mesh import Mesh
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


class ProcessEngine:
    """Binds roles, records and batches to the phases of ``method``; owns backward, steps, EMA and micro-batches.

    mesh: the ranks, where there are several. Each runs its rows of every batch on roles cut over all of them.
    """

    def __init__(
        self,
        method: Method,
        roles: dict[str, Role],
        optimizers: dict[str, RoleOptimizer],
        ema: EMA,
        batches: BatchSource,
        *,
        seed: int,
        micro_batch: int | None = None,
        mesh: Mesh | None = None,
    ):
        self.method, self.roles, self.optimizers, self.ema, self.batches = method, roles, optimizers, ema, batches
        self.seed, self.micro_batch, self.mesh = seed, micro_batch, mesh
        self.carries: dict[int, Carry] = {}
        """What the next iteration goes on from, by batch."""
        self.device = next(roles["student"].network.parameters()).device
        self.watch = Stopwatch(self.device)

    def run(self, iteration: int) -> dict[str, Tensor]:
        """All phases of one iteration. Metrics stay on the device: means over the iteration, of counters the last."""
        records: dict[str, Any] = {}
        metrics: dict[str, list[Tensor]] = {}
        batches: dict[int, Batch] = {}
        carries: dict[int, Carry | None] = {}
        for phase in self.method.phases(iteration):
            if torch.cuda.is_available():  # the call loads the compiler, which takes seconds
                torch.compiler.cudagraph_mark_step_begin()
            if phase.batch not in batches:
                self.watch.lap("data")
                batches[phase.batch] = self.batches.batch(iteration, phase.batch)
            batch = batches[phase.batch]
            self.watch.lap(phase.name.partition(".")[0])
            if phase.gives:
                made = self._record(phase, iteration, batch, records)
                if phase.carries:
                    made, carries[phase.batch] = made
                records[phase.gives] = made
                losses = getattr(records[phase.gives], "losses", {})
                report = {name: values.mean() for name, values in losses.items()}
                if self.mesh:
                    report = self.mesh.mean(report)
            else:
                report = self._train(phase, iteration, batch, records)
            for name, value in report.items():
                metrics.setdefault(name, []).append(value)
        self.watch.lap(None)
        self.carries = {slot: carry for slot, carry in carries.items() if carry is not None}
        return {
            name: values[-1] if name.endswith(("/lr", "/updates", "/skipped")) else torch.stack(values).mean()
            for name, values in metrics.items()
        }

    def gauges(self) -> dict[str, float]:
        """Seconds of each kind of phase in an iteration since the last call, and memory; waits for the device."""
        sizes = memory_of_roles(self.roles, self.optimizers, self.ema)
        return phase_times(self.watch) | memory(self.device) | sizes

    def state(self) -> dict[str, dict[str, Any]]:
        """The weights and the optimizer of every trained role, the EMA, and the carries where there are any."""
        groups = {name: self.roles[name].state() for name in self.optimizers}
        groups |= {
            f"{name}.optimizer": self.roles[name].whole(optimizer.state())
            for name, optimizer in self.optimizers.items()
        }
        groups |= {f"{CARRY}{slot}": self._all_rows(carry) for slot, carry in self.carries.items()}
        return groups | {"ema": self.roles["student"].whole(self.ema.state())}

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        """The inverse of :meth:`state`; strict: a missing group or tensor raises KeyError or RuntimeError."""
        for name, optimizer in self.optimizers.items():
            self.roles[name].load(state[name])
            optimizer.load(self.roles[name].cut(state[f"{name}.optimizer"]))
        self.ema.load(self.roles["student"].cut(state["ema"]))
        device = next(self.roles["student"].network.parameters()).device
        mine = self.mesh.my_rows if self.mesh else lambda tensor: tensor
        self.carries = {
            int(group.removeprefix(CARRY)): map_tensors(
                lambda tensor: mine(tensor).to(device, copy=True), Carry.of(tensors)
            )
            for group, tensors in state.items()
            if group.startswith(CARRY)
        }

    @torch.no_grad()
    def _record(self, phase: Phase, iteration: int, batch: Batch, records: dict[str, Any]) -> Any:
        made = [phase.run(**arguments) for arguments, _ in self._pieces(phase, iteration, batch, records)]
        for record in made:  # concat, without gradient, would end a graph in silence
            assert_detached(record, phase.gives or phase.name)
        return concat(made)

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
        if "student" in phase.trains:
            self.ema.update(self.optimizers["student"].updates, finite)
        return metrics

    def _all_rows(self, carry: Carry) -> dict[str, Any]:
        """The carry of the global batch; tensors with rows are gathered one by one when they are asked for."""
        mesh, tensors = self.mesh, carry.tensors()
        if mesh is None:
            return tensors

        def later(rows: Tensor) -> Later:
            shape = (len(rows) * mesh.ranks.world, *rows.shape[1:])
            return Later(shape, rows.dtype, partial(mesh.all_rows, rows))

        return {name: tensor if name == "history" else later(tensor) for name, tensor in tensors.items()}

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


@lru_cache(maxsize=256)
def parameters_of(function: Any) -> tuple[str, ...]:
    """The names by which a phase is bound: roles, records, ``batch``, ``draw``, ``carry``; what is absent binds to
    None."""
    return tuple(inspect.signature(function).parameters)

"""What a worker of ``test_ray.py`` trains: the tiny methods of ``rank_worker``, on the roles of its group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewstep.engines.mesh import Ranks, join
from fewstep.engines.process import ProcessEngine
from fewstep.engines.ray import weights as passing
from fewstep.engines.ray.placement import Group
from fewstep.engines.ray.weights import Rows
from fewstep.methods.api import Method, Phase
from fewstep.methods.diffusion_forcing import DiffusionForcing, DiffusionForcingSection
from fewstep.methods.dmd2 import DMD2
from fewstep.methods.ode_init import OdeInit, OdeInitSection
from tests.engines.rank_worker import BATCH, CPU, DOUBLE, METHODS
from tests.engines.worlds import LADDER, dmd2, engine


class Skipping(DMD2):
    """The student's second update is skipped, since its loss is not finite."""

    def phases(self, iteration: int) -> Iterator[Phase]:
        for phase in super().phases(iteration):
            astray = phase.name == "student" and iteration == 1
            yield replace(phase, run=self.astray) if astray else phase

    def astray(self, student: Any, rollout: Any, scores: Any, batch: Any) -> dict[str, Tensor]:
        return {name: loss / 0 for name, loss in self.student_losses(student, rollout, scores, batch).items()}


def skipping() -> Method:
    plain = dmd2(DOUBLE, gan=None)
    return Skipping(plain.section, plain.rollout_of)


CASES: dict[str, Callable[[], Method]] = {
    **METHODS,
    "dmd2_skips": skipping,
    "dmd2_separate": lambda: dmd2(DOUBLE, gan=None, critic_batches="separate", critic_warmup_updates=3),
    "diffusion_forcing": lambda: DiffusionForcing(DiffusionForcingSection(cond_dropout=0.5, given_frames=1)),
    "ode_init": lambda: OdeInit(OdeInitSection(nodes=10, shift=1.0), LADDER),
}
"""Methods at tiny size, by name."""
BROKEN = "blocks.1.self_attention.q.weight"
"""The weight of which :func:`corrupt` breaks a bit."""


def made(name: str, batch: int = BATCH, **how: Any) -> ProcessEngine:
    """The engine of one process, or of a worker."""
    return engine(CASES[name](), dtype=DOUBLE, batch=batch, **how)


@dataclass
class Share:
    """An engine, and in place of a validation what it has seen: the sum of every weight, and whether it moved."""

    engine: ProcessEngine
    begun: dict[str, dict[str, Tensor]]

    def validate(self, iteration: int) -> dict[str, float]:
        del iteration
        asleep = float(all(sleeper.asleep for sleeper in self.engine.sleepers.values()))
        self.engine.wake(())
        return {"asleep": asleep} | {
            f"moved/{name}": float(any(not torch.equal(value, self.begun[name][key]) for key, value in now.items()))
            for name, now in weights(self.engine).items()
        }


def weights(made: ProcessEngine) -> dict[str, dict[str, Tensor]]:
    return {
        name: {n: getattr(p.detach(), "to_local", p.detach)().clone() for n, p in role.network.named_parameters()}
        for name, role in made.roles.items()
    }


@contextmanager
def share(name: str, batch: int, trouble: str, group: Group, ranks: Ranks, store: Any) -> Iterator[Share]:
    """``trouble``: ``WORKER KIND FOLDER``, what becomes of one of the workers in its third iteration, once."""
    torch.set_num_threads(1)
    passing.PIECE = 50_000  # so that there are several
    with join(ranks, CPU, timeout_s=30.0, store=store) as mesh:
        running = made(name, batch, mesh=mesh, only=group.roles, rolls=group.rolls)
        if trouble.split()[:1] == [f"{group.name}/{ranks.rank}"]:
            break_down(running, *trouble.split()[1:])
        yield Share(running, weights(running))


def break_down(made: ProcessEngine, kind: str, folder: str) -> None:
    if kind == "corrupts":
        return corrupt()
    plain = made.perform

    def perform(phase: Phase, iteration: int, foreign: Any = None) -> Any:
        mark = Path(folder) / "done"
        if iteration == 2 and not mark.exists():
            mark.touch()
            print("about to fail", flush=True)
            if kind == "raises":
                raise ValueError("no more rows")
            if kind == "stalls":
                time.sleep(600)
            os.kill(os.getpid(), getattr(signal, kind))
        return plain(phase, iteration, foreign)

    made.perform = perform  # type: ignore[method-assign]


def corrupt() -> None:
    """From now on, what this process sends of one weight has another bit, by Ray's own hook."""
    import ray

    def fields(rows: Rows) -> dict[str, Any]:
        values = rows.values.copy()
        if rows.name == BROKEN:
            values.flat[7] ^= 1
        return {**vars(rows), "values": values}

    ray.util.register_serializer(Rows, serializer=fields, deserializer=again)


def again(fields: dict[str, Any]) -> Rows:
    return Rows(**fields)


def begin(name: str, batch: int = BATCH, trouble: str = "") -> Any:
    return partial(share, name, batch, trouble)

"""What runs in each worker process: one rank of one group, with the engine of one process or of ranks inside."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from fewstep.checkpoint.save import load_checkpoint, take_part, write_groups
from fewstep.engines.mesh import Ranks
from fewstep.engines.process import ProcessEngine
from fewstep.engines.ray.placement import Group
from fewstep.engines.ray.transport import Parcel, joined, packed
from fewstep.engines.ray.weights import Rows, Taking, pieces, sent
from fewstep.engines.roles import Role

STORE_S = 300.0
"""How long the workers of a group wait for each other to begin."""


@runtime_checkable
class Share(Protocol):
    """What a worker contributes to a run."""

    engine: ProcessEngine

    def validate(self, iteration: int) -> Mapping[str, float]:
        """Results of the averaged student; called on every worker of the student's group."""
        ...


Begin = Callable[[Group, Ranks, Any], AbstractContextManager[Share]]
"""Makes a worker's share, in its process: of the group, the ranks, and the store through which these meet."""


class Worker:
    """The actor. Calls come one after the other; :meth:`pulse` answers beside them."""

    def __init__(self, name: str, ranks: Ranks, log: str | None):
        """name: of the group."""
        self.name, self.ranks = name, ranks
        self._running: tuple[str, float] | None = None
        self._idle_since, self._waited_s = time.monotonic(), 0.0
        self._failed: BaseException | None = None
        self._open, self._share, self._begun = ExitStack(), None, 0
        self._rolls = False
        self._taking: Taking | None = None
        self._store: dist.Store | None = None
        if log:
            _write_to(Path(log))
            print(f"{name}/{ranks.rank}: process {os.getpid()} on {socket.gethostname()}", flush=True)
        faulthandler.enable()

    def place(self) -> dict[str, Any]:
        """Where this worker runs."""
        return {"pid": os.getpid(), "host": socket.gethostname(), "node": _node_address()}

    def open_store(self) -> tuple[str, int]:
        """On the first worker: opens what the workers of the group meet through, and says where it is."""
        host = _node_address()
        store = dist.TCPStore(host, 0, self.ranks.world, True, timedelta(seconds=STORE_S), wait_for_workers=False)
        self._store = store
        return host, store.port

    def begin(self, begin: Begin, group: Group, meeting: tuple[str, int] | None) -> None:
        """Makes the engine of this worker, in place of an earlier one. ``meeting``: where the first worker is."""
        self._failed, self._share, self._begun, self._rolls = None, None, self._begun + 1, group.rolls
        with self._call("the start"):
            self._open.close()
            if meeting and self._store is None:
                self._store = dist.TCPStore(*meeting, self.ranks.world, False, timedelta(seconds=STORE_S))
            store = dist.PrefixStore(str(self._begun), self._store) if self._store else None
            self._share = self._open.enter_context(begin(group, self.ranks, store))

    def perform(
        self, iteration: int, index: int, takes: Mapping[str, int], takers: tuple[int, ...], *parcels: Parcel
    ) -> Any:
        """One phase. ``takes``: how many of the parcels make each record that comes from elsewhere, in their order.
        ``takers``: the sizes of the groups that take the record. Returns None, then a parcel for each of their workers.
        """
        phase = self._phases(iteration)[index]
        with self._call(f"phase '{phase.name}' of iteration {iteration + 1}"):
            foreign, left = {}, list(parcels)
            for name, count in takes.items():
                foreign[name] = joined(left[:count], self._device)
                del left[:count]
            made, me = self._engine.perform(phase, iteration, foreign), self.ranks
            if not takers:
                return None
            parts = [packed(made, me.rank, me.world, taker, size) for size in takers for taker in range(size)]
            return (None, *parts)

    def finish(self, iteration: int) -> dict[str, float]:
        """Ends an iteration. Returns its metrics, and the seconds in which this worker had nothing to do."""
        with self._call(f"the end of iteration {iteration + 1}"):
            metrics = {name: float(value) for name, value in self._engine.finish(iteration).items()}
            waited_s, self._waited_s = self._waited_s, 0.0
            return metrics | {f"{self.name}/waiting_s": waited_s}

    def pieces(self) -> int:
        """In how many pieces the student's weights go to workers that roll out."""
        return len(pieces(self._student.parts()))

    def give(self, number: int, takers: int, *taken: None) -> tuple[Any, ...]:
        """A piece of the student's weights, as far as this worker has it. ``takers``: how many workers roll out.
        ``taken``: what must be done before. Returns None, then what each of them takes."""
        with self._call("handing on the student's weights"), self._engine.watch.during("sync"):
            mesh, me = self._engine.mesh, self.ranks
            sets = mesh.replicas if mesh else 1
            cuts = pieces(self._student.parts())[number]
            return (None, *sent(self._student, cuts, takers, (me.rank * sets // me.world, sets)))

    def take(self, number: int, last: bool, *given: tuple[Rows, ...]) -> None:
        """On a worker that rolls out: a piece of the student's weights, from every worker of its group."""
        with self._call("taking the student's weights"), self._engine.watch.during("sync"):
            self._engine.wake({"student"})
            taking = self._taking if number and self._taking else Taking(self._student)
            for rows in given:
                taking.take(rows)
            if last:
                taking.end()
            self._taking = None if last else taking

    def gauges(self) -> dict[str, float]:
        """Times of phases and memory since the last call; the student of a worker that rolls out counts apart."""
        with self._call("reading the gauges"):
            found = self._engine.gauges()
            if not self._rolls:
                return found
            return {
                f"{self.name}/weights_mib" if name == "student/weights_mib" else name: v for name, v in found.items()
            }

    def validate(self, iteration: int) -> dict[str, float]:
        with self._call(f"the validation at iteration {iteration}"):
            return {name: float(value) for name, value in self._the_share.validate(iteration).items()}

    def save(self, folder: str) -> None:
        """The first worker writes a file for each group of tensors of its engine; the others hand in their parts."""
        with self._call("the checkpoint"):
            state = self._engine.state()
            if not self.ranks.first:
                return take_part(state)
            write_groups(Path(folder), state)

    def size_bytes(self) -> int:
        """Of what :meth:`save` writes."""
        return sum(tensor.nbytes for named in self._engine.state().values() for tensor in named.values())

    def load(self, checkpoint: str) -> None:
        with self._call(f"loading {checkpoint}"):
            found = load_checkpoint(Path(checkpoint))
            mine = [name for name in found.groups if self._holds(name)]
            self._engine.load({name: found.tensors(name) for name in mine})

    def counters(self) -> dict[str, tuple[int, int]]:
        """Of every trained role, how many updates were made and how many skipped."""
        return {name: (int(o.updates), int(o.skipped)) for name, o in self._engine.optimizers.items()}

    def sleep(self) -> None:
        """All that this worker keeps on its device goes to host memory, until it is used again."""
        with self._call("going to sleep"):
            self._engine.sleep()
            if self._device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # another process has its turn

    def after(self, *done: None) -> None:
        """Calls that follow wait for those that are done now."""

    def pulse(self) -> dict[str, Any]:
        """What this worker is at, for how long, and the line of the program where it stands."""
        running = self._running
        at = {"doing": running[0], "for_s": time.monotonic() - running[1]} if running else {"doing": "", "for_s": 0.0}
        return at | {"line": _line_of(self._thread) if running else ""}

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        """Around every call: the time before it was spent waiting. After a failure nothing is done any more."""
        if self._failed is not None:
            raise self._failed
        begun = time.monotonic()
        self._thread = threading.get_ident()
        self._waited_s += begun - self._idle_since
        self._running = (name, begun)
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            mesh = self._share.engine.mesh if self._share else None
            self._failed = mesh.explained(error) if mesh else error
            raise self._failed from None
        finally:
            self._running, self._idle_since = None, time.monotonic()

    def _holds(self, name: str) -> bool:
        role = name.partition(".")[0]
        return role in self._engine.optimizers or (self._engine.ema is not None and role in ("ema", "carry"))

    def _phases(self, iteration: int) -> list[Any]:
        return list(self._engine.method.phases(iteration))

    @property
    def _the_share(self) -> Share:
        assert self._share is not None
        return self._share

    @property
    def _engine(self) -> ProcessEngine:
        return self._the_share.engine

    @property
    def _student(self) -> Role:
        return self._engine.roles["student"]

    @property
    def _device(self) -> torch.device:
        return next(next(iter(self._engine.roles.values())).network.parameters()).device


def _node_address() -> str:
    import ray

    return ray.util.get_node_ip_address()


def _write_to(log: Path) -> None:
    """Everything that this process says from now on goes into a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _line_of(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ""
    innermost = traceback.extract_stack(frame)[-1]
    return f"{Path(innermost.filename).name}:{innermost.lineno} ({innermost.name})"

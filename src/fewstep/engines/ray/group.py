"""The workers of one group as the driver sees them, and what becomes of the calls that they were given."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from safetensors import SafetensorError

from fewstep.engines.mesh import RankError, Ranks
from fewstep.engines.ray.placement import Group
from fewstep.engines.ray.worker import Worker
from fewstep.errors import UserError

START_S = 300.0
"""How long the processes of a group may take to start."""
LOOK_S = 0.2
"""How soon a failure is seen."""
PULSE_S = 5.0
"""How often a driver that waits asks its workers whether they live."""
SILENT_S = 30.0
"""How long a worker may not answer."""
GRACE_S = 1.0
"""How long the driver gathers failures before it names one, and how long workers that go by themselves may take."""
END_S = 10.0
"""How long a worker that was told to end may live."""


BEGINS = re.compile(r"^\S+/\d+: process \d+ on \S+$", re.MULTILINE)
"""The first line of a worker."""


class WorkerError(RankError):
    """A worker failed, died, or no longer answers; the message names it and says its last words."""


@dataclass(frozen=True, eq=False)
class Seat:
    """One worker: ``critic/0``."""

    name: str
    actor: Any
    log: Path | None
    place: Mapping[str, Any]

    def __str__(self) -> str:
        return f"worker {self.name} (process {self.place['pid']} on {self.place['host']})"

    @property
    def here(self) -> bool:
        """Whether it is a process of this machine that lives."""
        return self.place["host"] == socket.gethostname() and lives(self.place["pid"])

    def kill(self) -> None:
        """Ends the process at once, where it is on this machine."""
        if self.here:
            with suppress(ProcessLookupError):
                os.kill(self.place["pid"], signal.SIGKILL)


def last_words(log: Path | None) -> str:
    """The end of what a worker said after its first line, where it said something; before that stands in the log what
    other processes said in its place."""
    with suppress(OSError):
        text = BEGINS.split(log.read_text(errors="replace"))[-1] if log else ""
        lines = [line for line in text.splitlines() if line.strip()]
        if lines:
            return f"; its last words: {' | '.join(lines[-3:])}"
    return ""


Performed = tuple[Any, Seat, list[Any]]
"""What says that a worker is done, the worker, and its parcels."""


class Workers:
    """The workers of a group, each in its bundle of the placement group."""

    def __init__(self, group: Group, placed: Any, bundles: Sequence[int], gpus: float, logs: Path | None):
        self.group, self.seats = group, list[Seat]()
        self._meeting: tuple[str, int] | None = None
        actor: Any = ray.remote(concurrency_groups={"pulse": 1})(Worker)  # type: ignore[call-overload]
        self._logs = [logs / f"{group.name}-{rank}.log" if logs else None for rank in range(group.size)]
        self._actors = [
            actor.options(
                num_cpus=group.section.cpus,
                num_gpus=gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=bundle),
            ).remote(group.name, Ranks(rank, group.size), str(log) if log else None)
            for rank, (bundle, log) in enumerate(zip(bundles, self._logs, strict=True))
        ]

    def arrive(self) -> None:
        """Waits until all of them have started."""
        asked = [actor.place.remote() for actor in self._actors]
        places = [self._answer(rank, call) for rank, call in enumerate(asked)]
        found = enumerate(zip(self._actors, self._logs, places, strict=True))
        self.seats = [Seat(f"{self.group.name}/{rank}", *known) for rank, known in found]

    def meeting(self) -> tuple[str, int] | None:
        """Where they meet; None where there is one."""
        if len(self._actors) > 1 and self._meeting is None:
            self._meeting = self._answer(0, self._actors[0].open_store.remote())
        return self._meeting

    def _answer(self, rank: int, call: Any) -> Any:
        """What a worker says while it starts. Raises WorkerError."""
        try:
            return ray.get(call, timeout=START_S)
        except RayActorError as error:
            said = last_words(self._logs[rank]) or f"; Ray says: {_end_of(error)}"
            fate = f"died while it started: killed, or crashed{said}"
        except GetTimeoutError:
            fate = f"did not start within {START_S:.0f} s{last_words(self._logs[rank])}"
        raise WorkerError(f"worker {self.group.name}/{rank} {fate}")

    def call(self, method: str, *arguments: Any) -> dict[Any, Seat]:
        """The same call on every worker: what each will return, and who returns it."""
        return {getattr(seat.actor, method).remote(*arguments): seat for seat in self.seats}

    def pass_on(
        self, method: str, call: Sequence[Any], parcels: Sequence[Sequence[Any]], returns: int
    ) -> list[Performed]:
        """The same call on every worker, each with its own parcels; ``returns`` parcels come from each."""
        found = []
        for seat, mine in zip(self.seats, parcels, strict=True):
            made = getattr(seat.actor, method).options(num_returns=1 + returns).remote(*call, *mine)
            done, *sent = made if returns else [made]
            found.append((done, seat, sent))
        return found


def _end_of(error: Exception) -> str:
    """The last lines of what Ray says, where the cause stands."""
    return " | ".join([line.strip() for line in str(error).splitlines() if line.strip()][-3:])


def settle(calls: Mapping[Any, Seat], seats: Iterable[Seat], limit_s: float | None = None) -> None:
    """Waits until all calls are done; meanwhile the workers are asked whether they live.

    limit_s: how long one call may take. Raises what a worker raised where it is the user's to mend, else WorkerError.
    """
    left, watch = list(calls), _Watch(list(seats), limit_s)
    while left:
        done, left = ray.wait(left, num_returns=len(left), timeout=LOOK_S)
        failures = _failures({ref: calls[ref] for ref in done})
        if failures:
            more, _ = ray.wait(left, num_returns=len(left), timeout=GRACE_S) if left else ([], [])
            raise _told(failures + _failures({ref: calls[ref] for ref in more}))
        watch.look()


class _Watch:
    """Asks the workers every now and then what they are at."""

    def __init__(self, seats: Sequence[Seat], limit_s: float | None):
        self._seats, self._limit_s = seats, limit_s
        self._asked: dict[Any, Seat] = {}
        self._next = time.monotonic() + PULSE_S
        self._since = 0.0

    def look(self) -> None:
        now = time.monotonic()
        if self._asked:
            self._hear(now)
        elif now >= self._next:
            self._asked = {seat.actor.pulse.options(concurrency_group="pulse").remote(): seat for seat in self._seats}
            self._since = now

    def _hear(self, now: float) -> None:
        answered, silent = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        if silent and now - self._since > SILENT_S:
            names = " and ".join(str(self._asked[ref]) for ref in silent)
            raise WorkerError(f"{names}: no answer for {SILENT_S:.0f} s; it was stopped, or its machine is gone")
        if silent:
            return
        asked, self._asked, self._next = self._asked, {}, now + PULSE_S
        with suppress(RayError):  # a worker that died is found by its call
            self._refuse_stalled({asked[ref]: answer for ref, answer in zip(answered, ray.get(answered), strict=True)})

    def _refuse_stalled(self, answers: Mapping[Seat, Mapping[str, Any]]) -> None:
        late = [
            f"{seat} has been at {answer['doing']} for {answer['for_s']:.0f} s, now in {answer['line']}"
            for seat, answer in answers.items()
            if self._limit_s is not None and answer["for_s"] > self._limit_s
        ]
        if late:
            raise WorkerError(f"{'; '.join(late)}: more than engine.timeout_s = {self._limit_s:g}")


def _failures(calls: Mapping[Any, Seat]) -> list[tuple[Seat, Exception]]:
    """The calls that are over and went wrong. What they return is not fetched where it is large: calls are told done by
    a value of their own."""
    found = []
    for ref, seat in calls.items():
        try:
            ray.get(ref)
        except Exception as error:
            found.append((seat, error))
    return found


def _told(failures: Sequence[tuple[Seat, Exception]]) -> Exception:
    """One failure for all: that of a worker that died, else of one that raised by itself, else of any."""

    def rank(failure: tuple[Seat, Exception]) -> int:
        error = failure[1]
        if isinstance(error, RayActorError):
            return 0
        return 2 if isinstance(error, RankError) else 1

    seat, error = min(failures, key=rank)
    if isinstance(error, RayActorError):
        return WorkerError(f"{seat} died: killed, or crashed{last_words(seat.log)}")
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, (UserError, OSError, SafetensorError)):  # the last one is what a full disk looks like
        return cause
    return WorkerError(f"{seat} failed: {type(cause).__name__}: {cause}")


def ended(seats: Sequence[Seat]) -> None:
    """Ends all workers, and waits until those of this machine are gone. They are given a moment to go as Ray wants it,
    which tells of every other death."""
    for seat in seats:
        with suppress(Exception):
            ray.kill(seat.actor)
    _wait_for(seats, GRACE_S)
    for seat in seats:
        seat.kill()
    _wait_for(seats, END_S)


def _wait_for(seats: Sequence[Seat], most_s: float) -> None:
    until = time.monotonic() + most_s
    while any(seat.here for seat in seats) and time.monotonic() < until:
        time.sleep(0.05)


def lives(pid: int) -> bool:
    """Whether a process of this machine is there, and not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""The phases of a method, run without computing: what each asks of the networks, and what it holds meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fewstep.costs.counted import CountedDiscriminator, counted
from fewstep.costs.kept import Inside
from fewstep.costs.ledger import Held, Ledger
from fewstep.costs.work import Work
from fewstep.engines.process import parameters_of
from fewstep.engines.roles import Role
from fewstep.methods.api import Method, Phase
from fewstep.methods.ode_init import OdeInit
from fewstep.models.families import ModelSection
from fewstep.models.wan.conditioner import ClassLabelSection, EmbeddingCond, LabelCond
from fewstep.records import Batch, Trajectory
from fewstep.rng import Draw

MOST_STOPS = 8
"""Random stops that are gone through one by one; of more, as many evenly spaced ones."""
LONG_RUN = 1_000_000
"""An iteration behind every warm-up."""


@dataclass(frozen=True)
class Sized:
    """A role as the counts need it: its network's numbers, and whether it is trained. section None: the discriminator,
    which reads the features of ``reads``, of so many layers."""

    section: ModelSection | None
    trained: bool
    reads: str = ""
    num_features: int = 1

    def frame_tokens(self, shape: tuple[int, int, int, int]) -> int:
        """Of a frame of samples (frames, channels, height, width); 0 for the discriminator."""
        if self.section is None:
            return 0
        _, rows, columns = self.section.architecture.patch
        return (shape[2] // rows) * (shape[3] // columns)


@dataclass(frozen=True)
class Setting:
    """How networks run; nothing here changes what they compute."""

    precision: torch.dtype = torch.bfloat16
    recompute: bool = False
    compiled: frozenset[str] = frozenset()
    """Roles whose blocks are compiled."""


@dataclass
class PhaseCost:
    """Of one phase and one row of the batch: a mean over the random stops, peaks over all of them.

    times: how often an iteration has it. part: the share of the batch's rows that it sees.
    """

    name: str
    trains: tuple[str, ...]
    roles: tuple[str, ...]
    """Roles that it calls."""
    times: int = 1
    part: float = 1.0
    works: Counter[Work] = field(default_factory=Counter)
    """How often each work is done, on average."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls of each role's network, on average."""
    draws: float = 0.0
    """Tensors of random numbers, on average."""
    peaks: tuple[Held, ...] = ()
    history: int = 0

    def add(self, ledger: Ledger, share: float) -> None:
        """One of the iterations that the mean is taken over."""
        for work, count in ledger.works.items():
            self.works[work] += count * share  # type: ignore[assignment]
        for name, count in ledger.calls.items():
            self.calls[name] += count * share  # type: ignore[assignment]
        self.draws += ledger.draws * share
        self.peaks = highest([*self.peaks, *ledger.peaks])
        self.history = max(self.history, ledger.history)


def highest(peaks: Sequence[Held]) -> tuple[Held, ...]:
    """Those that no other covers."""
    distinct = list(dict.fromkeys(peaks))
    return tuple(peak for peak in distinct if not any(o is not peak and o.covers(peak) for o in distinct))


class CountedRole(Role):
    """A role on a network that counts."""

    @contextmanager
    def _computing(self) -> Iterator[None]:
        yield


class CountedAverage(CountedRole):
    """The student under its averaged weights, while its own wait beside them."""

    @contextmanager
    def _computing(self) -> Iterator[None]:
        network: Any = self.network
        with torch.no_grad():
            kept = network.ledger.hold(4 * network.num_weights, "cut")
            yield
            del kept


@dataclass(frozen=True)
class Stopping(Draw):
    """Draws without values. What all rows share, such as the random stop, is ``choice``: one after the other of all
    that are possible."""

    choice: int = 0
    rolls: bool = False
    """Whether every second choice is one of rolling forcing."""
    ledger: Ledger | None = None
    """Where draws are counted."""

    def normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        if self.ledger is not None:
            self.ledger.draws += 1
        return torch.empty((len(self.key), *shape), dtype=dtype, device="meta")

    def uniform(self, name: str, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
        return self.normal(name, shape, dtype)

    def shared_index(self, name: str, count: int) -> int:
        if name == "rolling":
            return self.choice % 2
        choice = self.choice // 2 if self.rolls else self.choice
        return choice % count if count <= MOST_STOPS else (2 * choice + 1) * count // (2 * MOST_STOPS) % count


def trace(
    method: Method, sizes: Mapping[str, Sized], shape: tuple[int, int, int, int], setting: Setting, *, text: int = 512
) -> list[PhaseCost]:
    """The phases of an iteration after every warm-up, alike ones together, for one row of the batch.

    shape: of one sample. text: tokens of its conditioning, where the networks read embeddings.
    """
    return Tracer(method, sizes, shape, setting, text).phases()


class Tracer:
    """Runs iterations, one for each random stop; see :func:`trace`."""

    def __init__(
        self, method: Any, sizes: Mapping[str, Sized], shape: tuple[int, int, int, int], setting: Setting, text: int
    ):
        self.method, self.shape, self.text, self.ledger = method, shape, text, Ledger()
        self.networks = networks_of(sizes, setting, self.ledger)
        self.roles: dict[str, Role] = {
            name: CountedRole(name, network, setting.precision) for name, network in self.networks.items()
        }
        if "ema" in method.roles:
            self.roles["ema"] = CountedAverage("ema", self.networks["student"], setting.precision)
        self.found: dict[Any, PhaseCost] = {}
        self.carry: Any = None
        rollout = getattr(method, "rollout_of", None)
        self.rolls = getattr(rollout, "rolling_blocks", 1) > 1
        self.chunks = getattr(rollout, "stream_chunks", 1)
        steps = 1 if rollout is None else len(rollout.sigmas)
        self.choices = min(max(steps * (1 + self.rolls), self.chunks), MOST_STOPS * (1 + self.rolls))

    def phases(self) -> list[PhaseCost]:
        with self.ledger:
            batch = batch_of(self.method, self.networks["student"], self.shape, self.text)
            for choice in range(self.choices):
                self.iteration(choice, batch)
        return list(self.found.values())

    def iteration(self, choice: int, batch: Batch) -> None:
        """All phases once; of alike ones the first stands for all."""
        number = LONG_RUN - LONG_RUN % self.chunks + choice
        given: dict[Any, Any] = {}
        carry, records = self.carry, {}
        for phase in self.method.phases(number):
            kind = (phase.name.partition(".")[0], phase.run.__name__, phase.part[1], phase.trains)
            if kind in given:
                self.found[kind].times += choice == 0
            else:
                draw = Stopping(0, phase.name, number, batch.key, choice, self.rolls, self.ledger)
                known = {**self.roles, **records, "batch": batch, "draw": draw, "carry": carry}
                given[kind] = self.perform(phase, kind, known)
            if phase.gives:
                records[phase.gives] = given[kind]
        self.ledger.begin()

    def perform(self, phase: Phase, kind: Any, known: dict[str, Any]) -> Any:
        """One phase, added to what is found; returns its record."""
        for name, network in self.networks.items():
            network.learn(name in phase.trains)
        self.ledger.begin()
        arguments = {name: known.get(name) for name in parameters_of(phase.run)}
        made = None
        if phase.trains:
            losses = phase.run(**arguments)
            torch.stack([values.mean() for values in losses.values()]).sum().backward()
            del losses
        else:
            with torch.no_grad():
                made = phase.run(**arguments)
            if phase.carries:
                made, self.carry = made
        called = tuple(name for name in arguments if name in self.roles and known[name] is not None)
        cost = self.found.setdefault(kind, PhaseCost(kind[0], phase.trains, called, part=1 / phase.part[1]))
        cost.add(self.ledger, 1 / self.choices)
        for network in self.networks.values():
            network.learn(False)
        return made


def networks_of(sizes: Mapping[str, Sized], setting: Setting, ledger: Ledger) -> dict[str, Any]:
    """A network that counts for every role."""
    made: dict[str, Any] = {}
    for name, size in sizes.items():
        if size.section is not None:
            shape, compiled = size.section.architecture, name in setting.compiled
            inside = Inside(shape, setting.precision, size.trained, setting.recompute, compiled)
            made[name] = counted(size.section, name, inside, ledger)
    for name, size in sizes.items():
        if size.section is None:
            made[name] = CountedDiscriminator(made[size.reads].width, size.num_features, ledger)
    return made


def batch_of(method: Any, network: Any, shape: tuple[int, int, int, int], text: int) -> Batch:
    """One row of what the method reads."""
    key = torch.empty(1, dtype=torch.int64, device="meta")
    x0 = torch.empty((1, *shape), device="meta")
    trajectory = None
    if isinstance(method, OdeInit):
        states = torch.empty((1, len(method.sigmas), *shape), device="meta")
        trajectory = Trajectory(key, states, torch.empty((1, *shape), device="meta"))
    section = network.section
    if isinstance(section.conditioner, ClassLabelSection):
        cond: Any = LabelCond(torch.empty(1, dtype=torch.int64, device="meta"))
    else:
        cond = EmbeddingCond(torch.empty((1, text, section.architecture.text_dim), device="meta"))
    return Batch(key, x0, cond, cond, trajectory)

"""Which roles live in which group of workers, and how many workers a group has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field, model_validator

from fewstep.engines.api import EngineSection
from fewstep.engines.process import parameters_of
from fewstep.errors import UserError
from fewstep.methods.api import Method, Phase
from fewstep.section import Section

ALL, CRITIC, STUDENT, ROLLOUT = "all", "critic", "student", "rollout"


class GroupSection(Section):
    """The workers of one group."""

    gpus: int | None = Field(default=None, ge=1)
    """GPUs of the group, a worker for each."""
    workers: int | None = Field(default=None, ge=1)
    """Workers of the group, where the networks compute on the CPU; write either this or ``gpus``."""
    cpus: float = Field(default=1.0, gt=0)
    """CPU cores that Ray sets aside for each worker; a worker that computes on the CPU runs as many threads."""

    @model_validator(mode="after")
    def _one_size(self) -> GroupSection:
        if (self.gpus is None) == (self.workers is None):
            raise ValueError("write 'gpus' (on GPUs, a worker for each) or 'workers' (on the CPU), one of them")
        return self

    @property
    def size(self) -> int:
        """Workers of the group."""
        return self.gpus or self.workers or 0


class GroupsSection(Section):
    """The groups of workers."""

    all: GroupSection | None = None
    """The one group of ``layout: shared``; left out, every GPU of this machine that ``rollout`` leaves, or one worker
    on a CPU."""
    critic: GroupSection | None = None
    """Of ``split`` and ``colocated``: the group of teacher, critic and discriminator."""
    student: GroupSection | None = None
    """Of ``split`` and ``colocated``: the group of the student and its average."""
    rollout: GroupSection | None = None
    """With ``shared`` and ``split``: workers that make the student's samples and do nothing else, on a copy of its
    weights that is renewed after each of its updates; left out, the student's own group makes them."""


class RaySection(EngineSection):
    """Groups of worker processes that Ray starts on one machine or on many."""

    name: Literal["ray"] = "ray"  # type: ignore[assignment]
    address: str | None = None
    """Of a Ray cluster to join: ``auto`` for that of this machine, or ``host:port``; left out, Ray is started on this
    machine for the run alone."""
    layout: Literal["shared", "split", "colocated"] = "shared"
    """``shared``: every worker holds a part of every role. ``split``: the critic group has teacher, critic and
    discriminator on GPUs of its own, the student group the student. ``colocated``: the same two groups on the same
    GPUs, one asleep in the memory of the host while the other computes."""
    groups: GroupsSection = GroupsSection()
    """How many workers each group has."""
    overlap: bool = False
    """With ``split`` or a group ``rollout``: the samples of the next iteration are made while the other workers are at
    those of this one; they come from weights that are one update older."""
    max_restarts: int = Field(default=0, ge=0)
    """How often the run goes on by itself from its newest complete checkpoint after a worker failed."""

    @model_validator(mode="after")
    def _groups_of_the_layout(self) -> RaySection:
        wanted = (ALL,) if self.layout == "shared" else (CRITIC, STUDENT)
        written = {name for name in (ALL, CRITIC, STUDENT) if getattr(self.groups, name) is not None}
        if self.groups.rollout is not None and self.layout == "colocated":
            raise ValueError(
                "'groups.rollout' is for workers on GPUs of their own, and with 'layout: colocated' groups take turns; "
                "leave it out, or write 'layout: split'"
            )
        if written - set(wanted):
            raise ValueError(
                f"'layout: {self.layout}' has the {_listed(wanted)}; leave out 'groups.{min(written - set(wanted))}'"
            )
        if self.layout != "shared" and written != set(wanted):
            raise ValueError(
                f"'layout: {self.layout}' needs the size of both groups; write groups: {{critic: {{gpus: 1}}, student: "
                "{gpus: 1}}, or 'workers' in place of 'gpus' on a CPU"
            )
        if self.overlap and self.layout != "split" and self.groups.rollout is None:
            raise ValueError(
                f"'overlap' is for 'layout: split', where both groups compute at once, not {self.layout}; or write the "
                "size of 'groups.rollout' with 'layout: shared'"
            )
        return self


@dataclass(frozen=True)
class Group:
    """Workers that hold their roles together."""

    name: str
    roles: tuple[str, ...]
    section: GroupSection

    @property
    def size(self) -> int:
        return self.section.size

    @property
    def rolls(self) -> bool:
        """Whether it makes samples and nothing else, and has the student's weights alone."""
        return self.name == ROLLOUT


def groups_of(section: RaySection, method: Method, iterations: int, device: torch.device) -> tuple[Group, ...]:
    """The groups of a run, in the order in which they work in an iteration's end: the critic's before the student's;
    last that of the workers which only roll out.

    device: what the networks compute on. Raises UserError where the method's phases do not allow the layout, or the
    groups do not suit the device.
    """
    rollout = section.groups.rollout
    if section.layout == "shared":
        everybody = section.groups.all or _everything(device, rollout)
        found: tuple[Group, ...] = (Group(ALL, method.roles, everybody),)
    else:
        homes, sizes = split(method, iterations), section.groups
        assert sizes.critic is not None  # the section has seen to it
        assert sizes.student is not None
        found = (Group(CRITIC, homes[CRITIC], sizes.critic), Group(STUDENT, homes[STUDENT], sizes.student))
    if rollout is not None:
        _refuse_idle(method, iterations)
        found += (Group(ROLLOUT, ("student",), rollout),)
    for group in found:
        _refuse_device(group, device)
    if section.overlap and getattr(getattr(method, "rollout_of", None), "stream_chunks", 1) > 1:
        raise UserError(
            "engine.overlap: rollouts that go on across iterations (sampling.stream_chunks) wait for the student's "
            "update; write engine.overlap=false"
        )
    return found


def split(method: Method, iterations: int) -> dict[str, tuple[str, ...]]:
    """The roles of the student group and of the critic group: those that meet in a phase live together.

    Raises UserError where the student meets a role of the critic group, or there is none.
    """
    phases = _phases(method, iterations)
    with_student = tuple(name for name in method.roles if name in ("student", "ema"))
    others = tuple(name for name in method.roles if name not in (*with_student, *getattr(method, "offline", ())))
    name = _name(method)
    if not others:
        raise UserError(
            f"engine.layout: method '{name}' computes with the student alone, which leaves a second group nothing to "
            "do; write engine.layout=shared"
        )
    for phase in phases:
        used = roles_of(phase, method)
        if set(used) & set(with_student) and set(used) & set(others):
            raise UserError(
                f"engine.layout: phase '{phase.name}' of method '{name}' computes with {_and(used)} together, so they "
                "cannot live in two groups; write engine.layout=shared"
            )
    _refuse_travelling_carry(phases, method, with_student)
    return {CRITIC: others, STUDENT: with_student}


def roles_of(phase: Phase, method: Method) -> tuple[str, ...]:
    """The roles that a phase computes with."""
    return tuple(name for name in method.roles if name in (*parameters_of(phase.run), *phase.trains))


def home(phase: Phase, method: Method, groups: Sequence[Group]) -> str:
    """The group that runs a phase: that of the workers which roll out, where there is one and the phase is theirs; else
    the first that has all its roles."""
    if _rolls(phase, method) and any(group.rolls for group in groups):
        return ROLLOUT
    return next(group.name for group in groups if set(roles_of(phase, method)) <= set(group.roles))


def _rolls(phase: Phase, method: Method) -> bool:
    """Whether a phase makes a record with the student alone, and trains nothing."""
    return phase.gives is not None and not phase.trains and roles_of(phase, method) == ("student",)


def _refuse_idle(method: Method, iterations: int) -> None:
    """Raises UserError where workers that roll out have nothing to do, or what they would make must stay elsewhere."""
    rolling = [phase for phase in _phases(method, iterations) if _rolls(phase, method)]
    if not rolling:
        raise UserError(
            f"engine.groups.rollout: method '{_name(method)}' makes no samples with the student alone, which leaves "
            "these workers nothing to do; leave it out"
        )
    if any(phase.carries for phase in rolling):
        raise UserError(
            "engine.groups.rollout: rollouts that go on across iterations (sampling.stream_chunks) have histories that "
            "the student's update reads too, so they stay with it; leave it out"
        )


def _phases(method: Method, iterations: int) -> list[Phase]:
    """Those of the first and of the last iteration, which are all that there are."""
    return [phase for iteration in sorted({0, iterations - 1}) for phase in method.phases(iteration)]


def _name(method: Method) -> str:
    return getattr(getattr(method, "section", None), "name", type(method).__name__)


def _refuse_travelling_carry(phases: Sequence[Phase], method: Method, with_student: tuple[str, ...]) -> None:
    """A carry, which may be as large as a history, stays where it is made."""
    made = {set(roles_of(phase, method)) <= set(with_student) for phase in phases if phase.carries}
    for phase in phases:
        if made and "carry" in parameters_of(phase.run) and {set(roles_of(phase, method)) <= set(with_student)} != made:
            raise UserError(
                f"engine.layout: phase '{phase.name}' takes what the rollouts of the other group go on from, which "
                "stays there; write engine.layout=shared"
            )


def _everything(device: torch.device, rollout: GroupSection | None) -> GroupSection:
    if device.type != "cuda":
        return GroupSection(workers=1)
    return GroupSection(gpus=max(torch.cuda.device_count() - (rollout.size if rollout else 0), 1))


def _refuse_device(group: Group, device: torch.device) -> None:
    section = group.section
    if device.index is not None:
        raise UserError(f"engine.device = {device}: Ray gives each worker a GPU; write engine.device=auto or cuda")
    if device.type == "cpu" and section.gpus is not None:
        raise UserError(
            f"engine.groups.{group.name}.gpus = {section.gpus}: the networks compute on the CPU here; write "
            f"engine.groups.{group.name}='{{workers: {section.gpus}}}'"
        )
    if device.type == "cuda" and section.workers is not None:
        raise UserError(
            f"engine.groups.{group.name}.workers = {section.workers}: a worker computes on a GPU here; write "
            f"engine.groups.{group.name}='{{gpus: {section.workers}}}', or engine.device=cpu"
        )


def _listed(names: Sequence[str]) -> str:
    return f"group{'s' if len(names) > 1 else ''} {_and([f'{name!r}' for name in names])}"


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

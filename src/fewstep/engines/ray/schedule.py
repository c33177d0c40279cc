"""In which order the groups' phases are handed out.

Every group performs its own phases in the order of the method, so roles change as they do in one process; between
groups only records bind. Any order that keeps both gives the same numbers.

Workers that only roll out have a copy of the student, so for them one thing binds more: the driver hands them the
weights of all updates that were handed out before a rollout, and of none that come after it. Each worker does what it
is handed in that order, so the copy is what the order says, however long anything takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fewstep.engines.process import parameters_of
from fewstep.engines.ray.placement import ROLLOUT, Group, home
from fewstep.methods.api import Method


@dataclass(frozen=True)
class Step:
    """A phase as a group performs it; ``index`` counts the phases of the iteration."""

    iteration: int
    index: int
    phase: str
    group: str
    takes: dict[str, int] = field(default_factory=dict)
    """Records that another group makes: by name, the index of the phase that gives it."""
    sends: tuple[str, ...] = ()
    """Groups that take the record that this phase gives."""
    trains: tuple[str, ...] = ()
    """Roles."""


def steps(method: Method, groups: Sequence[Group], iteration: int) -> list[Step]:
    """The phases of an iteration in the order of the method, each with its group."""
    phases = list(method.phases(iteration))
    homes = [home(phase, method, groups) for phase in phases]
    takes: list[dict[str, int]] = []
    latest: dict[str, int] = {}
    for index, phase in enumerate(phases):
        known = {name: latest[name] for name in parameters_of(phase.run) if name in latest}
        takes.append({name: giver for name, giver in known.items() if homes[giver] != homes[index]})
        if phase.gives:
            latest[phase.gives] = index
    sends = [
        tuple(dict.fromkeys(homes[taker] for taker, found in enumerate(takes) if giver in found.values()))
        for giver in range(len(phases))
    ]
    return [
        Step(iteration, index, phase.name, homes[index], takes[index], sends[index], phase.trains)
        for index, phase in enumerate(phases)
    ]


def in_turns(ordered: Sequence[Step]) -> list[Step]:
    """The steps with as few changes from group to group as their records allow: a group goes on until it lacks one."""
    left, done, found = list(ordered), set(), []
    while left:
        group = left[0].group
        waiting = False
        for step in [step for step in left if step.group == group]:
            waiting = waiting or not set(step.takes.values()) <= done
            if not waiting:
                found.append(step)
                done.add(step.index)
                left.remove(step)
    return found


def leading(ordered: Sequence[Step]) -> list[Step]:
    """Of each group the first steps of an iteration that take nothing from another group and train nothing: those that
    can run while the iteration before is under way."""
    found: list[Step] = []
    begun: set[str] = set()
    for step in ordered:
        if step.takes or step.trains:
            begun.add(step.group)
        if "student" in step.trains:
            begun.add(ROLLOUT)  # what is rolled out after an update shows it
        if step.group not in begun:
            found.append(step)
    return found

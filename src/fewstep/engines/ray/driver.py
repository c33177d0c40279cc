"""The driver: hands the phases of a method to groups of workers. It holds references to records, never their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fewstep.checkpoint.meta import Meta
from fewstep.checkpoint.save import Checkpoint, CheckpointSection, checkpoint_folder
from fewstep.engines.ray.cluster import bundles_of, cluster, imported
from fewstep.engines.ray.placement import ROLLOUT, Group, RaySection
from fewstep.engines.ray.schedule import Step, early, in_turns, leading, steps
from fewstep.engines.ray.transport import meets
from fewstep.engines.ray.worker import Begin
from fewstep.methods.api import Method

if TYPE_CHECKING:
    from fewstep.engines.ray.group import Seat, Workers


ON_THE_WAY = 2
"""Pieces of the student's weights that may be under way to the workers that roll out."""


class Driver:
    """Runs iterations on workers, which live inside its context."""

    mesh = None
    """The driver is one process."""

    def __init__(
        self,
        section: RaySection,
        method: Method,
        groups: Sequence[Group],
        begin: Begin,
        *,
        logs: Path | None = None,
        cut: Callable[[int], bool] = lambda iteration: False,
    ):
        """begin: makes the share of a worker, in its process. logs: the folder for what workers say. cut: whether a run
        may end, or be saved, when so many iterations are done; no work is begun across that."""
        self.section, self.method, self.groups = section, method, tuple(groups)
        self._begin, self._logs, self._cut = begin, logs, cut
        self._open = ExitStack()
        self._workers: dict[str, Workers] = {}
        self._calls: dict[Any, Seat] = {}
        self._sent: dict[tuple[int, int], dict[str, list[list[Any]]]] = {}
        """By iteration and phase, then by the group that takes: from each sender, what it has for each taker."""
        self._ahead: dict[int, set[int]] = {}
        """By iteration, the phases that were handed out before its turn."""
        self.between = True
        """Whether no update of an iteration was made whose turn has not come: then the run can end or be saved."""
        self._awake = ""
        self._pieces, self._stale = 0, False
        """Of the student's weights; and whether the workers that roll out lack an update of them."""

    def begin(self, method: Method, groups: Sequence[Group], begin: Begin) -> None:
        """Every worker makes its share of a run, in place of an earlier one; ``groups`` are as large as before."""
        self.method, self.groups = method, tuple(groups)
        self._sent, self._ahead, self.between = {}, {}, True
        for group in self.groups:
            workers = self._workers[group.name]
            self._turn(group.name)
            self._calls |= workers.call("begin", begin, group, workers.meeting())
        self._settle(self._calls)
        self._calls = {}
        self._stale = ROLLOUT in self._workers
        if self._stale:
            self._pieces = self._ask(self._student, "pieces")[0]

    def run(self, iteration: int) -> dict[str, float]:
        """All phases of one iteration. Returns its metrics, and how long each group waited for the others."""
        for step in self._order(iteration):
            self._hand_out(step)
        last = {name: workers.call("finish", iteration) for name, workers in self._workers.items()}
        now = self._calls | {call: seat for calls in last.values() for call, seat in calls.items()}
        self._calls = {}
        self._go_ahead(iteration + 1)
        self._settle(now, self.section.timeout_s)
        self._sent = {place: parts for place, parts in self._sent.items() if place[0] > iteration}
        metrics: dict[str, float] = {}
        for calls in last.values():
            metrics |= imported().get(next(iter(calls)))
        return metrics

    def gauges(self) -> dict[str, float]:
        """Times of phases and memory, of the first worker of each group since the last call."""
        found: dict[str, float] = {}
        for group in self._workers:
            for name, value in self._ask(group, "gauges")[0].items():
                found[name] = max(value, found.get(name, 0.0))
        return found

    def validate(self, iteration: int) -> dict[str, float]:
        """Results of the averaged student, by the group that has it."""
        return self._ask(self._student, "validate", iteration)[0]

    def counters(self) -> dict[str, tuple[int, int]]:
        """Of every trained role, how many updates were made and how many skipped."""
        return {name: found for group in self._workers for name, found in self._ask(group, "counters")[0].items()}

    def save(self, checkpoints: Path, meta: Meta | None, keep: CheckpointSection) -> None:
        """Every group writes the files of its roles into one folder, which then is completed."""
        assert meta is not None  # the driver is the first process of its run
        needed = sum(self._ask(group, "size_bytes")[0] for group in self._workers)
        with checkpoint_folder(checkpoints, meta.iteration, meta.to_json(), keep, needed) as folder:
            for group in self._workers:
                self._ask(group, "save", str(folder.absolute()))

    def load(self, checkpoint: Checkpoint) -> None:
        """Every group reads the files of its roles."""
        for group in self._workers:
            self._ask(group, "load", str(checkpoint.path.absolute()))
        self._stale = ROLLOUT in self._workers

    def __enter__(self) -> Driver:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def seats(self) -> list[Any]:
        """All workers."""
        return [seat for workers in self._workers.values() for seat in workers.seats]

    @property
    def _student(self) -> str:
        return next(group.name for group in self.groups if "student" in group.roles)

    def _start(self) -> None:
        imported()
        from fewstep.engines.ray.group import Workers

        gpus, together = any(group.section.gpus for group in self.groups), self.section.layout == "colocated"
        bundles, places = bundles_of(self.section, self.groups, gpus)
        placed = self._open.enter_context(cluster(self.section, bundles))
        share = 0.0 if not gpus else 0.5 if together else 1.0
        for group in self.groups:
            self._workers[group.name] = Workers(group, placed, places[group.name], share, self._logs)
        for workers in self._workers.values():
            workers.arrive()
        self.begin(self.method, self.groups, self._begin)

    def _end(self) -> None:
        if self._workers:
            from fewstep.engines.ray.group import ended

            ended(self.seats)
        self._open.close()

    def _order(self, iteration: int) -> list[Step]:
        """What is handed out for an iteration: its phases and, with ``overlap``, the leading ones of the next iteration
        among them, which need not wait."""
        mine = steps(self.method, self.groups, iteration)
        if self.section.layout == "colocated":
            return in_turns(mine)
        if not self.section.overlap:
            return mine
        early_ones = self._ahead.pop(iteration, set())
        mine = [step for step in mine if step.index not in early_ones]
        if self._cut(iteration + 1):
            return mine
        first = leading(mine) if not early_ones else []
        following = leading(steps(self.method, self.groups, iteration + 1))
        self._ahead[iteration + 1] = {step.index for step in following}
        return first + following + [step for step in mine if step not in first]

    def _go_ahead(self, iteration: int) -> None:
        """With ``overlap``: what groups without the student do next, while the student is updated."""
        handed = self._ahead.get(iteration, set())
        following = early(steps(self.method, self.groups, iteration), handed) if handed else []
        for step in following:
            self._hand_out(step)
            handed.add(step.index)
        self.between = not any(step.trains for step in following)

    def _hand_out(self, step: Step) -> None:
        """A phase to all workers of its group, each with references to the rows that it takes from elsewhere."""
        workers = self._workers[step.group]
        self._turn(step.group)
        if step.group == ROLLOUT and self._stale:
            self._renew()
        self._stale = self._stale or "student" in step.trains
        parcels: list[list[Any]] = [[] for _ in workers.seats]
        counts: dict[str, int] = {}
        for name, giver in step.takes.items():
            sent, takers = self._sent[step.iteration, giver][step.group], len(workers.seats)
            for taker in range(takers):
                mine = [parts[taker] for sender, parts in enumerate(sent) if meets(sender, len(sent), taker, takers)]
                parcels[taker] += mine
                counts[name] = len(mine)
        sizes = tuple(len(self._workers[name].seats) for name in step.sends)
        made = workers.pass_on("perform", (step.iteration, step.index, counts, sizes), parcels, sum(sizes))
        self._calls |= {done: seat for done, seat, _ in made}
        first = 0
        for name, size in zip(step.sends, sizes, strict=True):
            place = self._sent.setdefault((step.iteration, step.index), {})
            place[name] = [sent[first : first + size] for _, _, sent in made]
            first += size

    def _renew(self) -> None:
        """The student's weights to the workers that roll out, piece by piece; none is cut off before an earlier one was
        taken, so that few lie in Ray's memory."""
        student, rollout = self._workers[self._student], self._workers[ROLLOUT]
        takers, taken = len(rollout.seats), list[list[Any]]()
        for number in range(self._pieces):
            before = taken[number - ON_THE_WAY] if number >= ON_THE_WAY else []
            gave = student.pass_on("give", (number, takers), [before for _ in student.seats], takers)
            parcels = [[sent[taker] for _, _, sent in gave] for taker in range(takers)]
            took = rollout.pass_on("take", (number, number == self._pieces - 1), parcels, 0)
            taken.append([done for done, _, _ in took])
            self._calls |= {done: seat for done, seat, _ in (*gave, *took)}
        self._stale = False

    def _turn(self, group: str) -> None:
        """With ``colocated``: the group computes next, after the other one has gone to sleep."""
        if self.section.layout != "colocated" or group == self._awake:
            return
        asleep = self._workers[self._awake].call("sleep") if self._awake else {}
        self._calls |= asleep | self._workers[group].call("after", *asleep)
        self._awake = group

    def _ask(self, group: str, method: str, *arguments: Any) -> list[Any]:
        """The same call on every worker of a group, and what they return."""
        self._turn(group)
        calls = self._workers[group].call(method, *arguments)
        self._settle(calls)
        return imported().get(list(calls))

    def _settle(self, calls: Mapping[Any, Seat], limit_s: float | None = None) -> None:
        """Waits for what was handed out. Raises WorkerError that names a worker, or what is the user's to mend."""
        from fewstep.engines.ray.group import settle

        settle(calls, self.seats, limit_s)

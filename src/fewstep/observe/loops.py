"""How far a loop outside training is: a bar on a terminal that vanishes with the loop, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fewstep.observe.wording import duration
from fewstep.watched import heard_by


class LoopLine:
    """Is called with what a loop does, how many of its turns are done, and of how many. interval_s: seconds between
    plain lines, of all loops together."""

    def __init__(self, console: Console, *, interval_s: float = 10.0, now: Callable[[], float] = time.monotonic):
        self._console, self._interval_s, self._now = console, interval_s, now
        self._began_at, self._printed_at = now(), float("-inf")
        self._bar: Progress | None = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if done == 0:
            self._began_at = self._now()
        if self._console.is_terminal:
            self._draw(what, done, total)
        elif done < total and self._now() - self._printed_at >= self._interval_s:
            self._printed_at = self._now()
            self._console.print(f"{what} {self._status(done, total)}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Gives the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, what: str, done: int, total: int) -> None:
        if done == 0:
            self.close()
            columns = TextColumn("{task.description}", markup=False), BarColumn(20), TextColumn("{task.fields[status]}")
            self._bar = Progress(*columns, console=self._console, refresh_per_second=4, transient=True)
            self._bar.add_task(what, total=total, status=self._status(0, total))
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, status=self._status(done, total))
        if done >= total:
            self.close()

    def _status(self, done: int, total: int) -> str:
        if not 0 < done < total:
            return f"{done}/{total}"
        left = (self._now() - self._began_at) / done * (total - done)
        return f"{done}/{total} | {duration(left)} left"


@contextmanager
def telling(console: Console | None = None) -> Iterator[None]:
    """Inside, loops say how far they are; on standard error unless another console is given."""
    line = LoopLine(console or Console(stderr=True))
    try:
        with heard_by(line):
            yield
    finally:
        line.close()

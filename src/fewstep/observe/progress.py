"""The progress line: a live bar on a terminal, a plain line now and then where the output goes to a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from fewstep.observe.wording import duration, number

SEPARATOR = " | "


class ProgressLine:
    """Iteration of how many, time left (or the phase where it is not training), samples per second, the latest values.
    A live bar leaves out, from the end, what its terminal is too narrow for.

    done: iterations that earlier processes finished. interval_s: seconds between plain lines. The console is standard
    output unless another is given. As a context manager it gives the terminal back even after an error.
    """

    def __init__(
        self,
        name: str,
        iterations: int,
        done: int = 0,
        *,
        console: Console | None = None,
        interval_s: float = 15.0,
        now: Callable[[], float] = time.monotonic,
    ):
        self.name, self.iterations, self.done = name, iterations, done
        self._console, self._interval_s, self._now = console or Console(), interval_s, now
        self._opened_at, self._printed_at = now(), float("-inf")
        self._first_update: tuple[float, int] | None = None
        self._values: Mapping[str, float] = {}
        self._phase, self._closed = "", False
        self._bar = self._make_bar() if self._console.is_terminal else None

    def _make_bar(self) -> Progress:
        status = TextColumn(
            "{task.fields[status]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
        )
        name = TextColumn("{task.description}", markup=False, style="bold")
        drawn = BarColumn(bar_width=self._bar_width())
        bar = Progress(name, drawn, status, console=self._console, refresh_per_second=4)
        self._task = bar.add_task(self.name, total=self.iterations, completed=self.done, status=self._fitting())
        return bar

    def update(self, iteration: int, values: Mapping[str, float] | None = None) -> None:
        """``iteration`` iterations are done; ``values`` are those of a new row of metrics."""
        self._first_update = self._first_update or (self._now(), iteration)
        self.done, self._phase = iteration, ""
        if values is not None:
            self._values = values
        self._show(force=False)

    def phase(self, name: str) -> None:
        """What happens between iterations: ``validation``, ``checkpoint``; ends with the next update."""
        self._phase = name
        self._show(force=True)

    def note(self, message: str) -> None:
        """A sentence of its own, above the bar."""
        self._print(message)

    def close(self, message: str = "") -> None:
        """Ends the line: where the run stands, and ``message`` after it. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.stop()
        took = duration(self._now() - self._opened_at)
        here = "finished" if self.done >= self.iterations else "stopped"
        self._print(f"{self.name}: {here} after {self.done} of {self.iterations} iterations; this session took {took}")
        if message:
            self._print(message)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _show(self, force: bool) -> None:
        if self._bar is not None:
            self._bar.start()
            self._bar.update(self._task, completed=self.done, status=self._fitting())
        elif force or self._now() - self._printed_at >= self._interval_s:
            self._printed_at = self._now()
            self._print(f"{self.name} {SEPARATOR.join(self._status())}")

    def _status(self) -> list[str]:
        """The parts of the line, the most needed first."""
        parts = [f"{self.done}/{self.iterations}"]
        if self._phase:
            parts.append(self._phase)
        elif self.done < self.iterations and (left := self._time_left()):
            parts.append(f"{left} left")
        return [*parts, *headlines(self._values)]

    def _fitting(self) -> str:
        """As many parts as the terminal has room for, beside the name and the bar; the first two always."""
        parts = self._status()
        room = self._console.width - cell_len(self.name) - self._bar_width() - 2
        while len(parts) > 2 and cell_len(SEPARATOR.join(parts)) > room:
            parts.pop()
        return SEPARATOR.join(parts)

    def _bar_width(self) -> int:
        return min(20, self._console.width // 10)

    def _time_left(self) -> str:
        """By the mean time of an iteration since the first one of this process ended, so that start-up is not in it."""
        since, first = self._first_update or (0.0, self.done)
        if self.done <= first:
            return ""
        return duration((self._now() - since) / (self.done - first) * (self.iterations - self.done))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def headlines(values: Mapping[str, float]) -> list[str]:
    """What of a row fits into one line: the samples per second and the loss of each role. A student that has a ``_rms``
    shows it instead of its loss, whose value then means nothing."""
    rms = [name for name in values if name.startswith("student/") and name.endswith("_rms")]
    losses = [name for name in values if name.endswith("/loss") and not (rms and name == "student/loss")]
    shown = [f"{name.replace('/', ' ')} {number(values[name])}" for name in [*losses, *rms]]
    if "samples_per_s" in values:
        shown.insert(0, f"{number(round(values['samples_per_s']))} samples/s")
    return shown

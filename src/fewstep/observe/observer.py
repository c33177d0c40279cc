"""The one object that a training loop talks to: rows to all sinks, the alarm, the progress line, the report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from fewstep.observe.alarm import LatentAlarm, SkipAlarm
from fewstep.observe.metrics import MetricBuffer, Row, TrainingClock
from fewstep.observe.progress import ProgressLine
from fewstep.observe.report import write_report
from fewstep.observe.sinks import ObserveSection, Sink, open_sinks, read_rows
from fewstep.observe.wording import number


class Observer:
    """Records a run in its folder.

    recipe: the resolved recipe as plain values, for trackers. iteration, time_s: where this process begins, 0 for a new
    run; what the folder holds of later iterations is superseded, not deleted. full_speed: samples per second at the
    devices' peak, by which ``mfu`` is measured.
    The packages that the section needs are there (``missing_packages``).
    """

    def __init__(
        self,
        section: ObserveSection,
        run_folder: Path,
        *,
        name: str,
        iterations: int,
        recipe: Mapping[str, Any],
        iteration: int = 0,
        time_s: float = 0.0,
        full_speed: float | None = None,
        console: Console | None = None,
    ):
        self.section, self.run_folder = section, run_folder
        path = run_folder / "metrics.jsonl"
        earlier = read_rows(path) if path.exists() else []
        self.clock = TrainingClock(time_s)
        self._iteration, self._report_after = iteration, 0.0
        self._buffer = MetricBuffer(self.clock, full_speed)
        self._apart: dict[str, float] = {}
        known = [row for row in earlier if row.iteration <= iteration]
        self._alarms = (LatentAlarm(known), SkipAlarm(known))
        self._validated = {row.iteration for row in known if row.kind == "validation"}
        self.progress = ProgressLine(name, iterations, iteration, console=console)
        self._sinks: list[Sink] = []
        for sink in open_sinks(section, run_folder, name=name, recipe=recipe, iteration=iteration, warn=self.warning):
            self._sinks.append(sink)
        if earlier:
            self._write(Row("resume", iteration, time_s, message=f"Resumed after iteration {iteration}."))
            left = "" if iteration < iterations else "; nothing is left to do, more iterations=... make it longer"
            self.progress.note(f"{name}: going on from iteration {iteration} of {iterations}{left}")

    def train(self, iteration: int, values: Mapping[str, Tensor | float | int], num_samples: int = 0) -> None:
        """The metrics of one iteration. Waits for the device only at multiples of ``observe.every``."""
        self._iteration = iteration
        self._buffer.add(iteration, {**values, **self._apart}, num_samples)
        self._apart = {}
        if iteration % self.section.every == 0:
            self.flush()
        else:
            self.progress.update(iteration)

    def flush(self) -> None:
        """Writes what was collected since the last row."""
        row = self._buffer.flush()
        if row is None:
            return
        self._write(row)
        self.progress.update(row.iteration, row.values)
        for message in (*self._alarms[0].check(row), *self._alarms[1].check(row)):
            self.warning(message)

    def lacks_validation(self, iteration: int) -> bool:
        """Whether a resumed run stands at an iteration whose validation was cut off."""
        return iteration not in self._validated

    def validation(self, iteration: int, values: Mapping[str, float | int]) -> None:
        """The results of one validation, and a new report unless that would take more than 5 % of the time."""
        distances = {name.rpartition(".steps")[2]: number(v) for name, v in values.items() if "/frechet." in name}
        if distances:
            told = [f"{value} at {steps} step{'s' * (steps != '1')}" for steps, value in distances.items()]
            self.progress.note(f"validation at {iteration}: Frechet distance {', '.join(told)}")
        self._write(
            Row("validation", iteration, self.clock.elapsed_s, {name: float(value) for name, value in values.items()})
        )
        if self.section.report and time.monotonic() > self._report_after:
            self.report()

    def event(self, message: str) -> None:
        """Something worth knowing later, such as a checkpoint."""
        self._write(Row("event", self._iteration, self.clock.elapsed_s, message=message))

    def warning(self, message: str) -> None:
        """Something to look at: kept in the run and shown above the progress line."""
        self._write(Row("warning", self._iteration, self.clock.elapsed_s, message=message))
        self.progress.note(f"Warning: {message}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """``validation`` or ``checkpoint``: shown in the progress line and not counted as training time.

        What was collected is written first, so that a run resumed from that checkpoint has lost no row. How long it
        took stands in the next row of training.
        """
        self.flush()
        began = time.perf_counter()
        with self.clock.paused():
            self.progress.phase(name)
            yield
        self._apart[f"phase/time_s.{name}"] = time.perf_counter() - began

    def report(self) -> Path | None:
        """Writes the report; a failure is a warning, since training must outlive it."""
        began = time.monotonic()
        try:
            return write_report(self.run_folder)
        except Exception as error:
            self.warning(f"report.html could not be written: {error}")
            return None
        finally:
            now = time.monotonic()
            self._report_after = now + 20 * (now - began)

    def close(self, message: str = "") -> None:
        """The last row, the last report, the last line; ``message`` says what to do next."""
        try:
            self.flush()
            if self.section.report:
                self.report()
        finally:
            for sink in reversed(self._sinks):
                sink.close()
            self.progress.close(message)

    def _write(self, row: Row) -> None:
        for sink in self._sinks:
            sink.write(row)


class Unobserved:
    """In place of an observer on every process but the first, which records the run for all of them."""

    def train(self, iteration: int, values: Mapping[str, Tensor | float | int], num_samples: int = 0) -> None: ...

    def lacks_validation(self, iteration: int) -> bool:
        return False

    def validation(self, iteration: int, values: Mapping[str, float | int]) -> None: ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self, message: str = "") -> None: ...

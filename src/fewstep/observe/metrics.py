"""Rows of metrics: collected on the device at every iteration, fetched together when a row is written.

Names carry the role before a slash and the place after a dot: ``critic/loss``, ``student/grad_norm``,
``latents/std.stop0``, ``validation/frechet.steps4``, ``phase/time_s.rollout``, ``student/weights_mib``,
``samples_per_s``, ``mfu``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

RESERVED = ("kind", "iteration", "time_s", "message")
"""Names that a row uses for itself."""

LAST = ("lr", "updates", "skipped")
"""Last parts of names whose rows hold the latest value; all others the mean over the iterations they were in."""


@dataclass(frozen=True)
class Row:
    """One line of ``metrics.jsonl``.

    kind: ``train``, ``validation``, ``event``, ``warning`` or ``resume`` (the run went on from ``iteration``, and what
    stands above for later iterations is void). iteration: finished iterations. time_s: seconds of training so far, all
    resumes together, without validation and checkpoints. message: one sentence, for events and warnings.
    """

    kind: str
    iteration: int
    time_s: float
    values: Mapping[str, float] = field(default_factory=dict)
    message: str = ""

    def __post_init__(self) -> None:
        taken = [name for name in self.values if name in RESERVED]
        if taken:
            raise ValueError(f"a metric cannot be named '{taken[0]}': a row uses that name itself")


class TrainingClock:
    """Seconds of training, from ``elapsed_s`` on (what the checkpoint of an earlier process holds)."""

    def __init__(self, elapsed_s: float = 0.0, now: Callable[[], float] = time.perf_counter):
        self._now, self._elapsed_s = now, elapsed_s
        self._since: float | None = now()

    @property
    def elapsed_s(self) -> float:
        return self._elapsed_s + (0.0 if self._since is None else self._now() - self._since)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time that is not training: validation, checkpoints. May be nested."""
        if self._since is None:
            yield
            return
        self._elapsed_s, self._since = self.elapsed_s, None
        try:
            yield
        finally:
            self._since = self._now()


class MetricBuffer:
    """Metrics since the last row. :meth:`add` never waits for a device; :meth:`flush` does so once per device.

    full_speed: samples per second at which the devices would do nothing but the model's operations, at their peak;
    None where that is not known.
    """

    def __init__(self, clock: TrainingClock, full_speed: float | None = None):
        self._clock, self._full_speed = clock, full_speed
        self._start(0)

    def add(self, iteration: int, values: Mapping[str, Tensor | float | int], num_samples: int = 0) -> None:
        """The metrics of one iteration; ``num_samples``: rows of data it trained on.

        Tensors are copied, so they may change later. Raises ValueError where one holds more than one value.
        """
        self._iteration = iteration
        self._num_samples += num_samples
        for name, value in values.items():
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"metric '{name}' has shape {tuple(value.shape)}: it must be one number; take the mean"
                    )
                value = value.detach().reshape(()).clone()
            if name.rpartition("/")[2] in LAST:
                self._values[name] = [value]
            else:
                self._values.setdefault(name, []).append(value)

    def flush(self) -> Row | None:
        """One row of everything since the last one, with ``samples_per_s`` over that time and ``mfu``, the share of the
        full speed that it is; None if there is nothing."""
        if not self._values and not self._num_samples:
            return None
        names = [name for name, values in self._values.items() for _ in values]
        numbers = fetched([value for values in self._values.values() for value in values])
        columns: dict[str, list[float]] = {name: [] for name in self._values}
        for name, value in zip(names, numbers, strict=True):
            columns[name].append(value)
        row_values = {name: sum(column) / len(column) for name, column in columns.items()}
        elapsed_s = self._clock.elapsed_s
        if self._num_samples and elapsed_s > self._since_s:
            row_values["samples_per_s"] = self._num_samples / (elapsed_s - self._since_s)
            if self._full_speed:
                row_values["mfu"] = row_values["samples_per_s"] / self._full_speed
        row = Row("train", self._iteration, elapsed_s, row_values)
        self._start(self._iteration)
        return row

    def _start(self, iteration: int) -> None:
        self._iteration, self._num_samples, self._since_s = iteration, 0, self._clock.elapsed_s
        self._values: dict[str, list[Tensor | float | int]] = {}


def fetched(values: Sequence[Tensor | float | int]) -> list[float]:
    """The values as numbers, in one transfer per device (float64 where the device has it)."""
    numbers = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    by_device: dict[torch.device, list[int]] = {}
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, []).append(place)
    for device, places in by_device.items():
        wide = torch.float32 if device.type == "mps" else torch.float64
        stacked = torch.stack([torch.as_tensor(values[place]).to(wide) for place in places])
        for place, value in zip(places, stacked.tolist(), strict=True):
            numbers[place] = value
    return numbers

"""Which curves a report shows: the metrics of the rows, grouped by role, one chart a metric."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from fewstep.observe.metrics import Row
from fewstep.observe.report.charts import Chart, Series

ROLES = ("student", "teacher", "critic", "discriminator")

_COLOURS = {"student": "c0", "critic": "c1", "discriminator": "c2", "teacher": "c3"}
_TITLES = {
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "dmd_rms": "rms of the DMD gradient",
    "sid": "SiD loss",
    "sid_rms": "rms of the SiD gradient",
    "gradient_rms": "rms of the gradient",
    "gan": "GAN loss",
    "frechet": "Frechet distance",
    "mean": "mean of the student's latents",
    "std": "std of the student's latents",
    "samples_per_s": "samples per second",
    "mfu": "share of the GPU's peak (MFU)",
    "time_s": "seconds of each kind of phase",
    "allocated_mib": "memory now, MiB",
    "peak_mib": "memory at most, MiB",
}
_NOTES = {
    "frechet": "Lower is better. Training time leaves out validation and checkpoints.",
    "mean": "A warning is given when a mean moves by more than half a std from its first value.",
    "std": "A warning is given when a std leaves half to twice its first value.",
    "time_s": "In an iteration; checkpoint and validation, one each.",
    "mfu": "Operations of the networks, nothing counted twice, against the peak in bfloat16.",
}
_ORDER = (
    "loss",
    "gan",
    "dmd_rms",
    "sid",
    "sid_rms",
    "gradient_rms",
    "frechet",
    "accuracy",
    "grad_norm",
    "lr",
    "mean",
    "std",
)
_COUNTERS = ("updates", "skipped")
_IN_TABLES = ("weights_mib", "optimizer_mib", "ema_mib")

Points = list[tuple[float, float]]


@cache
def split(name: str) -> tuple[str, str, str]:
    """A metric's group, its own name and its place: ``latents/std.stop0`` is ``("latents", "std", "stop0")``."""
    group, _, rest = name.rpartition("/")
    metric, _, place = rest.partition(".")
    return group, metric, place


def charts_by_group(rows: Iterable[Row], over: str = "iteration") -> dict[str, list[Chart]]:
    """The charts of every group of metrics, roles first; counters and sizes are left out.

    over: ``iteration`` or ``time``.
    """
    lines: dict[str, dict[str, dict[str, Points]]] = {}
    for row in rows:
        x = row.time_s if over == "time" else float(row.iteration)
        for name, value in row.values.items():
            group, metric, place = split(name)
            if metric not in (*_COUNTERS, *_IN_TABLES):
                lines.setdefault(group, {}).setdefault(metric, {}).setdefault(place, []).append((x, value))
    groups = sorted(lines, key=lambda group: (ROLES.index(group) if group in ROLES else len(ROLES), group))
    return {group: [_chart(group, metric, lines[group], over) for metric in _sorted(lines[group])] for group in groups}


def counters(rows: Sequence[Row], group: str) -> str:
    """The last counts of a role: ``150 updates, 2 skipped``; empty where it has none."""
    last: dict[str, float] = {}
    for row in rows:
        last.update({metric: row.values[name] for metric in _COUNTERS if (name := f"{group}/{metric}") in row.values})
    return ", ".join(f"{value:,.0f} {metric}" for metric, value in last.items())


def _chart(group: str, metric: str, metrics: dict[str, dict[str, Points]], over: str) -> Chart:
    places = metrics[metric]
    note = _NOTES.get(metric, "")
    if group == "student" and metric == "loss" and _by_gradient(metrics):
        note = "Of this loss only the gradient means something; judge by the rms of the gradient and by validation."
    series = [
        Series(_words(place), _COLOURS.get(group, "c0") if len(places) == 1 else f"c{rank % 8}", places[place])
        for rank, place in enumerate(sorted(places, key=_natural))
    ]
    title = _TITLES.get(metric, metric.replace("_", " "))
    return Chart(title, series, over, note, _width(group, metric), linear=metric in ("lr", "samples_per_s", "mfu"))


def _width(group: str, metric: str) -> str:
    if metric == "frechet":
        return "full"
    return "half" if group in ("validation", "latents", "phase") else "third"


def _by_gradient(metrics: Iterable[str]) -> bool:
    """Whether the student of these metrics descends a gradient that was made elsewhere, as in DMD."""
    return any(metric.endswith("_rms") for metric in metrics)


def _sorted(metrics: Iterable[str]) -> list[str]:
    order = [*_ORDER[1:], "loss"] if _by_gradient(metrics) else _ORDER
    return sorted(metrics, key=lambda metric: (order.index(metric) if metric in order else len(order), metric))


def _natural(place: str) -> tuple[str, int]:
    """``steps20`` after ``steps4``."""
    head = place.rstrip("0123456789")
    return head, int(place[len(head) :] or 0)


def _words(place: str) -> str:
    """``steps4`` is ``4 steps``, ``stop0`` is ``stop 0``."""
    head, count = _natural(place)
    if not place or place == head:
        return place
    return f"{count} step" + "s" * (count != 1) if head == "steps" else f"{head} {count}"

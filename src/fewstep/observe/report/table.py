"""The tables: models and step counts against quality and cost; what each role keeps in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from fewstep.observe.metrics import Row
from fewstep.observe.wording import number

_HEADINGS = {
    "name": "Model",
    "num_steps": "Steps",
    "network_calls": "Network calls",
    "frechet": "Frechet distance",
    "accuracy": "Accuracy",
    "item_accuracy": "Item accuracy",
    "motion_accuracy": "Motion accuracy",
    "motion_error": "Motion error, px",
    "precision": "Precision",
    "recall": "Recall",
    "coverage": "Coverage",
    "ms_per_image": "ms per sample",
    "num_samples": "Samples",
}
_SIZES = {"weights_mib": "weights", "optimizer_mib": "optimizer", "ema_mib": "EMA"}
_HIGHEST = ("accuracy", "item_accuracy", "motion_accuracy", "precision", "recall", "coverage")
_BEST = {"frechet": min, "motion_error": min, **dict.fromkeys(_HIGHEST, max)}


def evaluation_table(entries: Sequence[dict[str, Any]]) -> str:
    """One row an entry, in the order given. The best value of each column of quality is marked, and rows whose name
    begins with ``student`` are tinted. Real data, the entry of 0 steps, have neither steps nor calls and are never the
    best. Columns that no entry fills are left out; what else an entry knows stays in ``evaluation.json``."""
    columns = [key for key in _HEADINGS if any(entry.get(key) is not None for entry in entries)]
    if not columns:
        return ""
    best = {key: _best([entry for entry in entries if not _is_real(entry)], key) for key in columns}
    longest = max((value for entry in entries if (value := _finite(entry.get("frechet"))) is not None), default=0.0)
    heads = "".join(f"<th>{escape(_HEADINGS[key])}</th>" for key in columns)
    lines = []
    for entry in entries:
        cells = "".join(_cell(key, *_shown(entry, key, best[key]), longest) for key in columns)
        kind = ' class="student"' if str(entry.get("name")).startswith("student") else ""
        lines.append(f"<tr{kind}>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def memory_table(rows: Sequence[Row]) -> str:
    """What each role keeps on one rank, by the last row that says so; empty where none does."""
    last: dict[str, float] = {}
    for row in rows:
        last |= {name: value for name, value in row.values.items() if name.rpartition("/")[2] in _SIZES}
    if not last:
        return ""
    roles = list(dict.fromkeys(name.partition("/")[0] for name in last))
    heads = "".join(f"<th>{title}</th>" for title in ("Memory on one rank, MiB", *_SIZES.values(), "together"))
    lines = []
    for role in roles:
        values = [last.get(f"{role}/{size}") for size in _SIZES]
        cells = ["" if value is None else number(value) for value in values]
        cells.append(number(sum(value for value in values if value is not None)))
        lines.append(f"<tr><th>{escape(role)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _is_real(entry: dict[str, Any]) -> bool:
    return entry.get("num_steps") == 0


def _shown(entry: dict[str, Any], key: str, best: float | None) -> tuple[Any, float | None]:
    """What a cell holds, and the value that is marked in it."""
    if not _is_real(entry):
        return entry.get(key), best
    return (None if key in ("num_steps", "network_calls") else entry.get(key)), None


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _best(entries: Sequence[dict[str, Any]], key: str) -> float | None:
    """The best value of a column; None where all are the same, or better and worse mean nothing."""
    values = {value for entry in entries if (value := _finite(entry.get(key))) is not None}
    return _BEST[key](values) if key in _BEST and len(values) > 1 else None


def _cell(key: str, value: Any, best: float | None, longest: float) -> str:
    if key == "name":
        return f"<th>{escape(str(value))}</th>"
    text = number(value) if isinstance(value, (int, float)) else ("" if value is None else str(value))
    finite = _finite(value)
    classes = ["best"] * (finite is not None and finite == best)
    bar = ""
    if key == "frechet" and finite is not None and longest > 0:
        classes.append("bar")
        bar = f' style="--share: {max(0.0, 100 * finite / longest):.1f}%"'
    kind = f' class="{" ".join(classes)}"' if classes else ""
    return f"<td{kind}{bar}>{escape(text)}</td>"

"""The sections of the page. Each takes what the run holds and returns HTML, or nothing where it has nothing to show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from fewstep.observe.metrics import Row
from fewstep.observe.report.charts import Chart, draw
from fewstep.observe.report.contents import Contents, Grid
from fewstep.observe.report.curves import ROLES, charts_by_group, counters
from fewstep.observe.report.images import Image
from fewstep.observe.report.table import evaluation_table, memory_table
from fewstep.observe.wording import duration, number

_SMALL_SIDE = 640
"""Pictures narrower than this are enlarged without blurring."""


def heading(contents: Contents) -> str:
    """Name, what this is, and the figures that matter first."""
    facts = [
        ("Method", contents.setting("method", "name")),
        ("Data", contents.setting("data", "name")),
        ("Batch", contents.setting("data", "batch")),
        ("Seed", contents.setting("seed")),
    ]
    line = ", ".join(f"{name.lower()} {escape(str(value))}" for name, value in facts if value is not None)
    tiles = "".join(
        f'<div class="tile"><p class="what">{what}</p><p class="value">{escape(value)}</p>'
        f'<p class="more">{escape(more)}</p></div>'
        for what, value, more in _tiles(contents)
    )
    return (
        f'<p class="over">fewstep run report</p><h1>{escape(contents.name)}</h1>'
        f'<p class="lead">{escape(_what_this_is(contents))}</p>'
        + (f'<p class="lead facts">{line[:1].upper()}{line[1:]}.</p>' if line else "")
        + f'<div class="tiles">{tiles}</div>'
    )


def _what_this_is(contents: Contents) -> str:
    steps = contents.setting("sampling", "steps")
    teacher = contents.setting("teacher", "init")
    if teacher is not None:
        student = f"A {steps}-step student" if steps is not None else "A few-step student"
        return f"{student}, distilled from the teacher {teacher}."
    if contents.recipe:
        return "A model trained on data" + (f", sampled with {steps} steps." if steps is not None else ".")
    return "A training run of which no recipe is left in the folder."


def _tiles(contents: Contents) -> Iterable[tuple[str, str, str]]:
    trained = contents.rows_of("train", "validation")
    done = max((row.iteration for row in trained), default=0)
    total = contents.setting("iterations")
    if isinstance(total, int):
        yield "Iterations", f"{done:,}", "finished" if done >= total else f"of {total:,}; not finished"
    else:
        yield "Iterations", f"{done:,}", ""
    if trained:
        yield "Training time", duration(trained[-1].time_s), "without validation and checkpoints"
    rates = sorted(value for row in trained if math.isfinite(value := row.values.get("samples_per_s", math.nan)))
    if rates:
        yield "Throughput", number(round(rates[len(rates) // 2])), "samples per second, median"
    yield from _quality_tile(contents)
    count = len(contents.rows_of("warning")) + len(contents.problems)
    yield "Warnings", str(count), "see below" if count else "none was given"


def _quality_tile(contents: Contents) -> Iterable[tuple[str, str, str]]:
    """The best Frechet distance of the validations, at the step count of the recipe where that was validated."""
    found = [
        (value, row.iteration, name)
        for row in contents.rows_of("validation")
        for name, value in row.values.items()
        if name.startswith("validation/frechet") and math.isfinite(value)
    ]
    wanted = f"validation/frechet.steps{contents.setting('sampling', 'steps')}"
    found = [entry for entry in found if entry[2] == wanted] or found
    if found:
        value, iteration, name = min(found)
        steps = name.rpartition(".steps")[2]
        at = f"{steps} steps, " if steps.isdigit() else ""
        last = next(last for last, _, other in reversed(found) if other == name)
        samples = contents.setting("validation", "samples")
        few = f"{samples:,} samples" if isinstance(samples, int) else "few samples"
        more = f"{at}iteration {iteration:,}; last {number(last)}. Validation on {few} shows a tendency only"
        yield "Best Frechet distance", number(value), more


def warnings_section(contents: Contents) -> str:
    rows = contents.rows_of("warning")
    listed = [_entry(row, "<b>Warning.</b> ") for row in rows]
    listed += [f"<li><time>this report</time><span>{escape(problem)}</span></li>" for problem in contents.problems]
    return f'<ul class="log warnings">{"".join(listed)}</ul>' if listed else ""


def quality_section(contents: Contents) -> str:
    groups = charts_by_group(contents.rows_of("validation"), over="time")
    charts = [chart for group in groups.values() for chart in group]
    return _lead("Validation over training time, always with the same noise.") + _charts(charts) if charts else ""


def comparison_section(contents: Contents) -> str:
    table = evaluation_table(contents.evaluation)
    picture = ""
    if contents.comparison is not None:
        caption = "Teacher and student from the same noise; each row says its model and its number of steps."
        picture = f'<div class="comparison">{_picture(contents.comparison, caption)}</div>'
    return table + picture


def samples_section(contents: Contents) -> str:
    by_steps: dict[int, list[Grid]] = {}
    for grid in contents.grids:
        by_steps.setdefault(grid.num_steps, []).append(grid)
    parts = []
    for num_steps, grids in sorted(by_steps.items()):
        pictures = "".join(_picture(grid.image, f"Iteration {grid.iteration:,}") for grid in grids)
        plural = "" if num_steps == 1 else "s"
        parts.append(f'<h3>{num_steps} step{plural}</h3><div class="grids">{pictures}</div>')
    return _lead("The same noise at every validation.") + "".join(parts) if parts else ""


def curves_section(contents: Contents) -> str:
    groups = contents.training_charts
    parts = []
    for role in (group for group in groups if group in ROLES):
        count = counters(contents.rows_of("train"), role)
        small = f"<small>{count}</small>" if count else ""
        parts.append(f"<h3>{role}{small}</h3>{_charts(groups[role])}")
    lead = _lead("Over iterations; each value is the mean since the one before. A cross marks where it was not finite.")
    return lead + "".join(parts) if parts else ""


def latents_section(contents: Contents) -> str:
    charts = contents.training_charts.get("latents", [])
    lead = _lead("Of the student's samples where their rollouts stopped; stop 0 is the first step.")
    return lead + _charts(charts) if charts else ""


def other_section(contents: Contents) -> str:
    groups = contents.training_charts
    charts = [chart for group, found in groups.items() if group not in (*ROLES, "latents") for chart in found]
    return (_charts(charts) if charts else "") + memory_table(contents.rows_of("train"))


def recipe_section(contents: Contents) -> str:
    if not contents.recipe_text:
        return ""
    return f"<details open><summary>recipe.yaml</summary><pre>{escape(contents.recipe_text)}</pre></details>"


def environment_section(contents: Contents) -> str:
    facts = _flat(contents.environment)
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>' if rows else ""


def events_section(contents: Contents) -> str:
    rows = contents.rows_of("event", "resume")
    return f'<ul class="log">{"".join(_entry(row) for row in rows)}</ul>' if rows else ""


SECTIONS = (
    ("warnings", "Warnings", warnings_section),
    ("quality", "Quality against training time", quality_section),
    ("comparison", "Teacher and student", comparison_section),
    ("samples", "Samples over time", samples_section),
    ("curves", "Curves by role", curves_section),
    ("latents", "Latents", latents_section),
    ("speed", "Speed, memory and the rest", other_section),
    ("events", "Events", events_section),
    ("recipe", "Recipe", recipe_section),
    ("environment", "Environment", environment_section),
)
"""Anchor, title and builder of each section, in the order of the page."""


def _lead(text: str) -> str:
    return f'<p class="lead">{text}</p>'


def _charts(charts: Iterable[Chart]) -> str:
    return f'<div class="charts">{"".join(draw(chart) for chart in charts)}</div>'


def _picture(image: Image, caption: str) -> str:
    small = ' class="small"' if image.width < _SMALL_SIDE else ""
    source = f'<img{small} src="{image.source}" width="{image.width}" height="{image.height}" alt="{escape(caption)}">'
    return f'<figure class="picture">{source}<figcaption>{escape(caption)}</figcaption></figure>'


def _entry(row: Row, mark: str = "") -> str:
    when = f"iteration {row.iteration:,}, {duration(row.time_s)}"
    return f"<li><time>{when}</time><span>{mark}{escape(row.message)}</span></li>"


def _flat(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)

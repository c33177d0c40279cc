"""What a run folder holds for its report. Anything may be missing; what is damaged is named, never raised."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fewstep.observe.metrics import Row
from fewstep.observe.report.charts import Chart
from fewstep.observe.report.curves import charts_by_group
from fewstep.observe.report.images import Image, load_image
from fewstep.observe.sinks import read_rows

MAX_GRIDS = 12
"""Sample grids that a report shows, of all step counts together."""

_GRID_NAME = re.compile(r"iteration-(\d+)\.steps(\d+)\.png")


@dataclass(frozen=True)
class Grid:
    """The samples of one validation: the same noise at every iteration."""

    iteration: int
    num_steps: int
    image: Image


@dataclass
class Contents:
    """Everything that the page shows. ``problems`` are sentences about what could not be read."""

    name: str
    rows: list[Row] = field(default_factory=list)
    recipe_text: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    evaluation: list[dict[str, Any]] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    comparison: Image | None = None
    problems: list[str] = field(default_factory=list)

    def rows_of(self, *kinds: str) -> list[Row]:
        return [row for row in self.rows if row.kind in kinds]

    @cached_property
    def training_charts(self) -> dict[str, list[Chart]]:
        """The charts of the training rows by group of metrics, over iterations."""
        return charts_by_group(self.rows_of("train"))

    def setting(self, *path: str) -> Any:
        """A value of the recipe, or None where the recipe has none there."""
        value: Any = self.recipe
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_contents(run_folder: Path) -> Contents:
    """Reads the folder. Raises FileNotFoundError where it does not exist."""
    if not run_folder.is_dir():
        raise FileNotFoundError(f"{run_folder}: there is no such run folder")
    contents = Contents(name=run_folder.resolve().name)
    _read_metrics(run_folder / "metrics.jsonl", contents)
    _read_recipe(run_folder / "recipe.yaml", contents)
    environment = _read_json(run_folder / "environment.json", contents)
    if isinstance(environment, dict):
        contents.environment = environment
    evaluation = _read_json(run_folder / "evaluation.json", contents)
    if isinstance(evaluation, list):
        contents.evaluation = [entry for entry in evaluation if isinstance(entry, dict)]
    _read_images(run_folder / "samples", contents)
    return contents


def _read_metrics(path: Path, contents: Contents) -> None:
    if not path.exists():
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        contents.rows = read_rows(path)
    contents.problems += [str(warning.message) for warning in caught]


def _read_recipe(path: Path, contents: Contents) -> None:
    if not path.exists():
        return
    contents.recipe_text = path.read_text(encoding="utf-8", errors="replace")
    try:
        recipe = yaml.safe_load(contents.recipe_text)
    except (yaml.YAMLError, ValueError):
        contents.problems.append("recipe.yaml is not valid YAML; it is shown as it is.")
        return
    if isinstance(recipe, dict):
        contents.recipe = recipe
        contents.name = str(recipe.get("name") or contents.name)


def _read_json(path: Path, contents: Contents) -> Any:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        contents.problems.append(f"{path.name} is not valid JSON; it is left out.")
        return None


def _read_images(folder: Path, contents: Contents) -> None:
    names = {path: _GRID_NAME.fullmatch(path.name) for path in sorted(folder.glob("iteration-*.png"))}
    found = [(int(match[2]), int(match[1]), path) for path, match in names.items() if match]
    for num_steps, iteration, path in _chosen(sorted(found)):
        if (image := _image(path, contents)) is not None:
            contents.grids.append(Grid(iteration, num_steps, image))
    if (folder / "compare.png").exists():
        contents.comparison = _image(folder / "compare.png", contents)


def _chosen(found: list[tuple[int, int, Path]]) -> list[tuple[int, int, Path]]:
    """At most MAX_GRIDS of them: for each step count, spread evenly from the first to the last."""
    by_steps: dict[int, list[tuple[int, int, Path]]] = {}
    for entry in found:
        by_steps.setdefault(entry[0], []).append(entry)
    share = max(1, MAX_GRIDS // max(1, len(by_steps)))
    return [entry for grids in by_steps.values() for entry in spread(grids, share)][:MAX_GRIDS]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the items, evenly spaced, the last one always and the first one where two fit."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[-1]]
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _image(path: Path, contents: Contents) -> Image | None:
    try:
        return load_image(path)
    except (OSError, ValueError) as error:
        contents.problems.append(f"samples/{path.name} could not be read ({error}); it is left out.")
        return None

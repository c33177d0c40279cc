"""The recipes that come with fewstep by name (``wan_nano/sft``), the runs that they make, and the results that come
along (``wan_nano/teacher``)."""

from __future__ import annotations

import re
from pathlib import Path

import fewstep

MAKES_THE_TEACHER = "sft"
"""Beside a folder ``teacher``, the recipe whose result that is."""


def recipes_folder() -> Path:
    """``recipes/`` inside the installed package or, in a checkout, at its root."""
    package = Path(fewstep.__file__).parent
    installed = package / "recipes"
    folder = installed if installed.is_dir() else package.parents[1] / "recipes"
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def shipped_recipes() -> dict[str, Path]:
    """Every recipe by name, in the order of the names."""
    folder = recipes_folder()
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.glob("**/*.yaml"))}


def recipe_of_run(run: str) -> str | None:
    """The name of the shipped recipe whose run is called so; None if no recipe makes it."""
    for name, path in shipped_recipes().items():
        if re.search(rf"^name: {re.escape(run)}$", path.read_text(encoding="utf-8"), re.MULTILINE):
            return name
    return None


def shipped_result(recipe: str) -> Path | None:
    """The export of what a shipped recipe makes, where it comes with fewstep."""
    family, _, name = recipe.rpartition("/")
    teacher = recipes_folder() / family / "teacher"
    return teacher if name == MAKES_THE_TEACHER and (teacher / "fewstep.json").is_file() else None


def how_to_get(recipe: str, key: str = "") -> str:
    """What to do where the run of a shipped recipe is not there. key: what stands before a place, ``teacher.init=``."""
    shipped = shipped_result(recipe)
    if shipped is None:
        return f"recipe {recipe} makes it: fewstep train {recipe}"
    return f"what recipe {recipe} makes comes with fewstep: write {key}{shipped}, or train it: fewstep train {recipe}"

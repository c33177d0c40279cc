"""The recipes that come with fewstep, by name (``wan_nano/sft``)."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import fewstep
from fewstep.errors import UserError

if TYPE_CHECKING:
    from fewstep.config import Recipe


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


def find_recipe(name: str) -> Path:
    """The file of a path or of a shipped recipe's name. Raises UserError, with the nearest name, if there is none."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = shipped_recipes()
    known = name.removesuffix(".yaml").removeprefix("recipes/")
    if known in shipped:
        return shipped[known]
    close = difflib.get_close_matches(known, shipped, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"the shipped ones are {', '.join(shipped)}"
    raise UserError(f"{name}: there is no such recipe file, and no shipped recipe of that name; {hint}")


def run_recipe(run: str) -> Recipe | None:
    """The shipped recipe whose run has this name; None if no recipe makes it."""
    from fewstep.config import load_recipe

    for path in shipped_recipes().values():
        if f"\nname: {run}\n" in path.read_text():
            return load_recipe(path)
    return None

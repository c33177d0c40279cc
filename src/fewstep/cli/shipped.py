"""The recipe that a user means, by path or by name (``wan_nano/sft``)."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

from fewstep.errors import UserError
from fewstep.shipped import recipe_of_run, recipes_folder, shipped_recipes

__all__ = ["find_recipe", "recipes_folder", "run_recipe", "shipped_recipes"]

if TYPE_CHECKING:
    from fewstep.config import Recipe


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

    name = recipe_of_run(run)
    return None if name is None else load_recipe(shipped_recipes()[name])

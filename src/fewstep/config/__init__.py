"""Recipes: a YAML file and overrides become one checked :class:`Recipe`.

Nothing is parsed and then ignored: an unknown key is refused with a suggestion, and everything that is wrong is told at
once, with file and line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fewstep.config.explain import Explained, explain
from fewstep.config.load import check, dump_recipe, read_recipe
from fewstep.config.recipe import Recipe, known_methods, method_of, recipe_type
from fewstep.config.yaml_text import Written
from fewstep.errors import UserError, UserErrors

__all__ = [
    "Explained",
    "Recipe",
    "dump_recipe",
    "explain_recipe",
    "known_methods",
    "load_recipe",
    "method_of",
    "recipe_type",
]


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a file, each override ``section.field=value`` in its place; its plugins are imported.

    Raises UserError, or UserErrors with everything that is wrong, each as ``file:line: section.field = value: what is
    wrong; write ...``.
    """
    return _load(Path(path), overrides)[0]


def explain_recipe(path: Path | str, overrides: Sequence[str] = ()) -> list[Explained]:
    """Every key of the resolved recipe with its value, where that comes from, its meaning and unit. Raises as
    :func:`load_recipe` does."""
    return explain(*_load(Path(path), overrides))


def _load(path: Path, overrides: Sequence[str]) -> tuple[Recipe, Written]:
    written = read_recipe(path, overrides)
    named = written.values.get("plugins")
    plugins = tuple(named) if isinstance(named, list) and all(isinstance(name, str) for name in named) else ()
    try:
        root = recipe_type(plugins)
    except UserError as error:
        raise UserErrors([*written.errors, f"{written.origin(('plugins',))}: {error}"]) from error
    return check(written, root), written

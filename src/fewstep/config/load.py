"""From a recipe file to a complete :class:`Recipe`, and back."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fewstep.config.overrides import apply_overrides
from fewstep.config.problems import Problem, line, lookup, problems_of
from fewstep.config.schema import fields_at
from fewstep.config.yaml_text import KeyPath, Written, read_yaml, write_yaml
from fewstep.errors import UserError, UserErrors
from fewstep.section import Section

S = TypeVar("S", bound=Section)


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Written:
    """What the file says, with the overrides in place; nothing is judged yet.

    Raises UserError if the file is absent, is not YAML, or holds something else than keys and values.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UserError(f"{path}: the recipe cannot be read: {reason}") from None
    written = read_yaml(text, str(path))
    if not isinstance(written.values, dict):
        raise UserError(f"{path}: a recipe is made of 'key: value' lines, and this is not; see recipes/ for examples")
    return apply_overrides(written, overrides)


def check(written: Written, root: type[S]) -> S:
    """What was written as a ``root``. Raises UserErrors with everything that is wrong, in the order of the file.

    Rules that join several sections need all of these to be sound. So the faulty keys are taken out and the rest is
    judged again, until nothing new is found; what rests on a key taken out is no finding.
    """
    values, found = copy.deepcopy(written.values), _truth_for_number(written.values, root)
    while True:
        result, problems = _judge(values, root)
        new = [problem for problem in problems if not any(_rests_on(problem, earlier) for earlier in found)]
        if not new:
            break
        found += new
        for problem in new:
            _take_out(values, problem.path, root)
    if result is None or found or written.errors:
        found.sort(key=lambda problem: _order(problem, written))
        raise UserErrors(written.errors + [line(problem, written) for problem in found])
    return result


def _judge(values: Any, root: type[S]) -> tuple[S | None, list[Problem]]:
    try:
        return root.model_validate(values), []
    except ValidationError as error:
        return None, problems_of(error, root, values)


def _truth_for_number(values: Any, root: type[Section]) -> list[Problem]:
    """``true`` where the schema wants a number: pydantic alone reads it as 1."""
    return [
        Problem(path, "does not fit; write a number")
        for path, value in _leaves(values)
        if isinstance(value, bool) and _wants_number(root, values, path)
    ]


def _leaves(values: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    inner = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else None
    if inner is None:
        yield path, values
    for step, value in inner or ():
        yield from _leaves(value, (*path, step))


def _wants_number(root: type[Section], values: Any, path: KeyPath) -> bool:
    parts = set().union(*(_parts(field.annotation) for field in fields_at(root, values, _named(path))))
    return bool(parts & {int, float}) and bool not in parts


def _parts(annotation: Any) -> set[Any]:
    arguments = typing.get_args(annotation)
    return {annotation}.union(*(_parts(argument) for argument in arguments))


def _rests_on(problem: Problem, earlier: Problem) -> bool:
    """Whether the key that ``earlier`` took out, or a section around it, takes part in the problem. A key that no
    section has takes part in nothing but the completeness of its own section."""
    out = _named(earlier.path)
    if earlier.unread:
        return problem.path in (out, out[:-1]) and problem.path != ()
    places = (problem.path, *problem.others)
    return any(place[: len(out)] == out or (out[: len(place)] == place != ()) for place in places)


def _take_out(values: Any, path: KeyPath, root: type[Section]) -> None:
    """Takes the key out; a number that must be there is 1 from now on."""
    place = _named(path)
    fields = fields_at(root, values, place)
    around = lookup(values, place[:-1])
    if place and isinstance(around, dict):
        around.pop(place[-1], None)
        if any(field.is_required() and _parts(field.annotation) & {int, float} for field in fields):
            around[place[-1]] = 1


def _named(path: KeyPath) -> KeyPath:
    """The path down to its last key; an entry of a list is taken out with the whole list."""
    names = [index for index, step in enumerate(path) if isinstance(step, str)]
    return path[: names[-1] + 1] if names else ()


def _order(problem: Problem, written: Written) -> tuple[str, int]:
    place, _, number = written.origin(problem.path).rpartition(":")
    return (place, int(number)) if number.isdigit() else ("~", 0)


def dump_recipe(recipe: Section) -> str:
    """The recipe with every default written out; ``load_recipe`` reads an equal one from it."""
    return write_yaml(recipe.model_dump(mode="json"))

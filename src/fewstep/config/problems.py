"""Everything that is wrong with a recipe, one line each: ``place: section.field = value: what is wrong; write ...``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from fewstep.config.schema import candidates, doc, fields_at, type_name
from fewstep.config.suggest import where_it_belongs
from fewstep.config.yaml_text import KeyPath, Written, dotted
from fewstep.section import Section


@dataclass(frozen=True)
class Problem:
    """``message`` says what is wrong with the value at ``path`` and what to write; ``others`` are further values that
    the judgement rests on; ``unread`` marks a key that no section has."""

    path: KeyPath
    message: str
    others: tuple[KeyPath, ...] = ()
    unread: bool = False


class Problems(ValueError):
    """Several of them, raised by a section whose values do not go together."""

    def __init__(self, problems: Sequence[Problem]):
        super().__init__("; ".join(f"{dotted(problem.path)}: {problem.message}" for problem in problems))
        self.problems = tuple(problems)


def line(problem: Problem, written: Written) -> str:
    """The problem as the user reads it."""
    name, absent = dotted(problem.path), object()
    value = lookup(written.values, problem.path, absent)
    shown = "" if value is absent or isinstance(value, dict) else f" = {plain(value)}"
    origin = written.origin(problem.path)
    if origin == f"override {name}":
        return f"{origin}{shown}: {problem.message}"
    return f"{origin}:{f' {name}{shown}:' if name else ''} {problem.message}"


def plain(value: Any) -> str:
    """A value as it would stand in a recipe."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(plain, value))}]"
    return (
        {True: "true", False: "false", None: "null"}[value]
        if value is None or value is True or value is False
        else f"{value!r}"
    )


def lookup(values: Any, path: KeyPath, absent: Any = None) -> Any:
    """The value at ``path``, or ``absent``."""
    for step in path:
        inner: Any = dict(enumerate(values)) if isinstance(values, list) else values
        if not isinstance(inner, dict) or step not in inner:
            return absent
        values = inner[step]
    return values


def problems_of(error: ValidationError, root: type[Section], values: Any) -> list[Problem]:
    """One problem for each place that pydantic complains about."""
    ruled: list[Problem] = []
    found: dict[KeyPath, Problem] = {}
    for details in error.errors():
        raised = (details.get("ctx") or {}).get("error")
        if isinstance(raised, Problems):
            ruled += raised.problems
            continue
        path = _path(details, values)
        message = _message(details, root, values, path)
        if path in found:  # the value fits none of several types
            message = f"does not fit; write <{_types(root, values, path)}>"
        found[path] = Problem(path, message, unread=details["type"] == "extra_forbidden")
    return [*found.values(), *ruled]


def _path(details: ErrorDetails, values: Any) -> KeyPath:
    """The place in the recipe. pydantic adds the tags of sections on the way, which are left out, and the types that
    were tried for a value, where the place ends."""
    path: list[str | int] = []
    steps = details["loc"]
    for index, step in enumerate(steps):
        last_missing = index == len(steps) - 1 and details["type"] == "missing" and isinstance(step, str)
        if isinstance(values, dict) and (step in values or last_missing):
            values = values.get(step)
        elif isinstance(values, list) and isinstance(step, int) and step < len(values):
            values = values[step]
        elif isinstance(values, dict):
            continue
        else:
            break
        path.append(step)
    if details["type"] in ("union_tag_invalid", "union_tag_not_found"):
        path.append((details.get("ctx") or {})["discriminator"].strip("'"))
    return tuple(path)


_TYPES = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text (in quotes where it looks like a number)",
    "list_type": "a list, such as [a, b]",
    "tuple_type": "a list, such as [a, b]",
    "finite_number": "a finite number",
    "path_type": "a path",
}
_LIMITS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
    "multiple_of": ("multiple_of", "a multiple of"),
}


def _message(details: ErrorDetails, root: type[Section], values: Any, path: KeyPath) -> str:
    kind, context = details["type"], details.get("ctx") or {}
    if kind == "extra_forbidden":
        return f"no such key; {where_it_belongs(root, values, path)}"
    if kind == "missing" and isinstance(details["loc"][-1], int):
        return f"has too few entries; write a {_types(root, values, path)}"
    if kind in ("missing", "union_tag_not_found"):
        return f"is missing; write {_expected(root, values, path)}"
    if kind == "string_pattern_mismatch":
        return f"does not fit; write {_expected(root, values, path)}"
    if kind in ("literal_error", "union_tag_invalid"):
        options = context.get("expected") or context.get("expected_tags", "")
        choices = [choice.strip().strip("'") for choice in options.replace(" or ", ",").split(",")]
        close = difflib.get_close_matches(str(lookup(values, path)), choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"is not a choice; write one of: {', '.join(choices)}{hint}"
    if kind in _TYPES:
        return f"does not fit; write {_TYPES[kind]}"
    if kind in _LIMITS:
        name, words = _LIMITS[kind]
        return f"is out of range; write a number {words} {context[name]}"
    if kind in ("too_short", "too_long"):
        bound = (
            f"at least {context.get('min_length')}" if kind == "too_short" else f"at most {context.get('max_length')}"
        )
        return f"has {context.get('actual_length')} entries; write {bound}"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        own = candidates(root, values, path)
        names = f" with keys of {', '.join(own[0].model_fields)}" if own else ""
        return f"does not fit; write a section{names}"
    if kind == "value_error":
        return str(context.get("error"))
    return details["msg"][:1].lower() + details["msg"][1:]


def _expected(root: type[Section], values: Any, path: KeyPath) -> str:
    """What belongs at ``path``, from the type and the document line of the field."""
    docs = {doc(field) for field in fields_at(root, values, path)}
    text = docs.pop() if len(docs) == 1 else ""
    return f"{dotted(path)}: <{_types(root, values, path)}>" + (f" ({text})" if text else "")


def _types(root: type[Section], values: Any, path: KeyPath) -> str:
    return " | ".join(dict.fromkeys(type_name(field.annotation) for field in fields_at(root, values, path)))

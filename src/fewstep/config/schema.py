"""What the sections of a recipe accept, read off their types: every key, its document line, its default, its range."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fewstep.config.yaml_text import KeyPath, dotted
from fewstep.section import Section


@dataclass(frozen=True)
class Key:
    """One key that some recipe may hold. ``variants`` are the choices that must be made for it to be read, such as
    ``{("method",): ("name", "dmd2")}``."""

    path: KeyPath
    section: type[Section]
    field: FieldInfo
    variants: Mapping[KeyPath, tuple[str, str]]

    @property
    def name(self) -> str:
        return dotted(self.path)

    @property
    def doc(self) -> str:
        return doc(self.field)

    @property
    def default(self) -> Any:
        """The value where a recipe is silent, or ``...`` where it must say."""
        value = self.field.get_default(call_default_factory=True, validated_data={})
        return ... if value is PydanticUndefined else value


def keys(
    root: type[Section], path: KeyPath = (), variants: Mapping[KeyPath, tuple[str, str]] | None = None
) -> Iterator[Key]:
    """Every key below ``root``, sections before what they hold. A section with variants gives the keys of each."""
    for name, field in root.model_fields.items():
        here = (*path, name)
        yield Key(here, root, field, variants or {})
        for member in members(field.annotation):
            chosen = variant(member)
            yield from keys(member, here, {**(variants or {}), **({here: chosen} if chosen else {})})


def members(annotation: Any) -> list[type[Section]]:
    """The section types that an annotation admits, through unions, ``Annotated`` and lists."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, Section) else []
    if hasattr(annotation, "__value__"):
        return members(annotation.__value__)
    found: list[type[Section]] = []
    arguments = typing.get_args(annotation)
    for argument in arguments[:1] if typing.get_origin(annotation) is typing.Annotated else arguments:
        found += [member for member in members(argument) if member not in found]
    return found


def variant(section: type[Section]) -> tuple[str, str] | None:
    """The key and value that choose this section among others: its first field of one literal text."""
    for name, field in section.model_fields.items():
        if typing.get_origin(field.annotation) is Literal:
            values = typing.get_args(field.annotation)
            if len(values) == 1 and isinstance(values[0], str):
                return name, values[0]
    return None


def candidates(root: type[Section], values: Any, path: KeyPath) -> list[type[Section]]:
    """The section types that may stand at ``path``: the chosen one where ``values`` tells, else all."""
    options: list[type[Section]] = [root]
    for step in path:
        values = _child(values, step)
        if isinstance(step, str):
            fields = [option.model_fields[step] for option in options if step in option.model_fields]
            options = [member for field in fields for member in members(field.annotation)]
        options = [option for option in options if _is_chosen(option, values)] or options
    return options


def fields_at(root: type[Section], values: Any, path: KeyPath) -> list[FieldInfo]:
    """The field at ``path``, of every section that ``values`` leave possible around it; none for the root itself."""
    sections = candidates(root, values, path[:-1]) if path else []
    return [section.model_fields[str(path[-1])] for section in sections if str(path[-1]) in section.model_fields]


def _is_chosen(option: type[Section], values: Any) -> bool:
    tag = variant(option)
    return tag is None or (isinstance(values, dict) and values.get(tag[0]) == tag[1])


def _child(values: Any, step: str | int) -> Any:
    if isinstance(values, dict):
        return values.get(step)
    return values[step] if isinstance(values, list) and isinstance(step, int) and step < len(values) else None


def doc(field: FieldInfo) -> str:
    """The document string of a field; of a section without one, the first paragraph of its class."""
    if field.description:
        return " ".join(field.description.split()).replace("``", "`")
    return next((first_paragraph(member) for member in members(field.annotation)), "")


def first_paragraph(section: type[Section]) -> str:
    """What a section is, in the words of its class."""
    return " ".join((section.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")


_PLURALS = {"whole number": "whole numbers", "number": "numbers", "text": "texts", "section": "sections"}


def type_name(annotation: Any) -> str:
    """An annotation in the words of a reader: ``number``, ``whole number``, ``'ode' | 'renoise'``, ``section``."""
    simple = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    if annotation in simple:
        return simple[annotation]
    if hasattr(annotation, "__value__"):
        return type_name(annotation.__value__)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " | ".join(repr(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_name(argument) for argument in arguments))
    if origin in (list, tuple):
        inner = dict.fromkeys(type_name(argument) for argument in arguments if argument is not Ellipsis)
        count = "" if origin is list or Ellipsis in arguments else f"{len(arguments)} "
        return f"list of {count}{' | '.join(_PLURALS.get(name, name) for name in inner)}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return "path" if getattr(annotation, "__name__", "") == "Path" else getattr(annotation, "__name__", "value")


_SYMBOLS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "multiple_of": "a multiple of", "min_length": "at least"}


def limits(field: FieldInfo) -> str:
    """The range of a field, such as ``> 0, <= 1``; empty where any value of the type will do."""
    found = []
    for constraint in [*field.metadata, *_constraints(field.annotation)]:
        for attribute, symbol in _SYMBOLS.items():
            value = getattr(constraint, attribute, None)
            if value is not None:
                found.append(f"{symbol} {value}" + (" long" if attribute == "min_length" else ""))
    return ", ".join(dict.fromkeys(found))


def _constraints(annotation: Any) -> list[Any]:
    """Those inside an annotation, of the entries of a list or of one type among several."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is not typing.Annotated:
        return [constraint for argument in arguments for constraint in _constraints(argument)]
    own = [part for extra in arguments[1:] for part in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
    return own + _constraints(arguments[0])


_UNITS = {
    "_s": "seconds",
    "_ms": "milliseconds",
    "_gib": "GiB",
    "_tokens": "tokens",
    "_frames": "latent frames",
    "_updates": "updates",
    "_iterations": "iterations",
}


def unit(name: str) -> str:
    """The unit that a key's name carries (glossary of docs/glossary.md), or an empty text."""
    return next((text for suffix, text in _UNITS.items() if name.endswith(suffix)), "")

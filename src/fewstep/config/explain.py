"""Every key of a resolved recipe: its value, where that comes from, what it means and in what unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fewstep.config.problems import plain
from fewstep.config.schema import doc, first_paragraph, limits, unit, variant
from fewstep.config.yaml_text import KeyPath, Written, dotted
from fewstep.section import Section


@dataclass(frozen=True)
class Explained:
    """One key. ``origin`` is ``file:line``, ``override``, or ``default``; ``unit`` gives the range too."""

    key: str
    value: str
    origin: str
    doc: str
    unit: str


def explain(recipe: Section, written: Written) -> list[Explained]:
    """The keys of ``recipe``, which was checked from ``written``, in the order of the schema."""
    return list(_explain(recipe, written, ()))


def _explain(section: Section, written: Written, path: KeyPath) -> Iterator[Explained]:
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), (*path, name)
        if isinstance(value, Section):
            yield from _explain(value, written, here)
            continue
        if isinstance(value, tuple) and any(isinstance(item, Section) for item in value):
            for index, item in enumerate(value):
                yield from _explain(item, written, (*here, index))
            continue
        measure = ", ".join(part for part in (unit(name), limits(field)) if part)
        text = doc(field) or (first_paragraph(type(section)) if variant(type(section)) == (name, value) else "")
        yield Explained(dotted(here), plain(_short(value)), _origin(here, written), text, measure)


def _origin(path: KeyPath, written: Written) -> str:
    origin = written.origins.get(path)
    if origin is None:
        return "default"
    return "override" if origin.startswith("override") else origin


def _short(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, tuple, type(None))) else str(value)

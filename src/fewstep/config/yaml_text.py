"""Reading YAML with the line of every key, and writing it so that it reads back equal.

Scalars follow the core schema of YAML 1.2, not the one of YAML 1.1 that PyYAML has by default: ``1e-3`` is a number,
``on``, ``off``, ``yes``, ``no``, ``12:30`` and ``2024-01-01`` are text, ``010`` is ten. Repeated keys, anchors and tags
are refused: a recipe says each thing once, in place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml
from yaml.composer import ComposerError

from fewstep.errors import UserError

KeyPath = tuple[str | int, ...]
"""Where a value stands: keys and list positions from the root."""


def dotted(path: KeyPath) -> str:
    """``section.field`` as the user writes it."""
    return ".".join(map(str, path))


_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_CORE_SCHEMA = {
    "null": (re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
    "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
    "int": (re.compile(r"[-+]?[0-9]+"), list("-+0123456789")),
    "float": (_FLOAT, list("-+.0123456789")),
}
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            raise ComposerError(
                None,
                None,
                f"anchors and aliases ('{event.anchor}') are not read; write the value out",
                event.start_mark,
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either version of YAML would not read as text."""


for _name, (_pattern, _first) in _CORE_SCHEMA.items():
    _whole = re.compile(rf"^(?:{_pattern.pattern})$")
    _Loader.add_implicit_resolver(_TAG + _name, _whole, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _whole, _first)


@dataclass
class Written:
    """Plain values as they were written, the place of each (``origins[path]`` is ``file:line`` or an override), and
    what was wrong with the writing."""

    values: Any
    origins: dict[KeyPath, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def origin(self, path: KeyPath) -> str:
        """The place of ``path``, or of the nearest section around it that was written."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return "recipe"


def read_yaml(text: str, place: str, *, lines: bool = True) -> Written:
    """The value of a YAML text, and ``place:line`` (without ``lines`` only ``place``) of everything inside it; repeated
    keys are among its errors. Raises UserError where the text is not YAML."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{place}:{mark.line + 1}" if mark is not None and lines else place
        hint = "; indent with spaces" if "'\\t'" in (error.problem or "") else ""
        raise UserError(f"{where}: this cannot be read as a recipe: {error.problem or error.context}{hint}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{place}: this is not YAML: {error}") from None
    reader = _Reader(place, lines)
    value = reader.read(node, ()) if node is not None else None
    return Written(value, reader.origins, reader.repeated)


class _Reader:
    """Turns nodes into plain values and notes where each stood."""

    def __init__(self, place: str, lines: bool):
        self.place, self.lines = place, lines
        self.origins: dict[KeyPath, str] = {}
        self.repeated: list[str] = []

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        self.origins.setdefault(path, self.where(node))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, (*path, index)) for index, child in enumerate(node.value)]
        return _scalar(node)

    def mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, child in node.value:
            key = str(key_node.value)
            if key in values:
                first = self.origins[(*path, key)]
                name = dotted((*path, key))
                self.repeated.append(f"{self.where(key_node)}: {name} is written twice (first at {first}); remove one")
            self.origins[(*path, key)] = self.where(key_node)
            values[key] = self.read(child, (*path, key))
        return values

    def where(self, node: yaml.Node) -> str:
        return f"{self.place}:{node.start_mark.line + 1}" if self.lines else self.place


def _scalar(node: yaml.Node) -> Any:
    text, kind = node.value, node.tag.removeprefix(_TAG)
    try:
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        return text
    return {"null": None, "bool": text.lower() == "true"}.get(kind, text)


def write_yaml(values: dict[str, Any]) -> str:
    """``values`` in the order given, innermost sections on one line; ``read_yaml`` gives it back equal."""
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True, indent=2
    )

"""``section.field=value`` on the command line: the value is read as YAML, sections on the way are made where absent."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from fewstep.config.yaml_text import KeyPath, Written, dotted, read_yaml
from fewstep.errors import UserError


def apply_overrides(written: Written, overrides: Sequence[str]) -> Written:
    """What was written, with each override in its place, in the order given. Whether the path exists and the value fits
    is found later, with everything else; an override that has no place is among the errors."""
    result = Written(copy.deepcopy(written.values), dict(written.origins), list(written.errors))
    for override in overrides:
        try:
            _apply(result, override)
        except UserError as error:
            result.errors.append(str(error))
    return result


def _apply(written: Written, override: str) -> None:
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise UserError(
            f"override '{override}': write it as section.field=value, for instance student.optimizer.lr=1e-4"
        )
    place = f"override {name.strip()}"
    value = read_yaml(text, place, lines=False)
    path: KeyPath = ()
    node: Any = written.values
    for part in parts[:-1]:
        step: Any = _step(node, part, path, override)
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}
        node, path = node[step], (*path, step)
        written.origins.setdefault(path, place)
    last: Any = _step(node, parts[-1], path, override)
    node[last] = value.values
    path = (*path, last)
    for old in [key for key in written.origins if key[: len(path)] == path]:
        del written.origins[old]
    written.origins |= {path: place} | {(*path, *inner): where for inner, where in value.origins.items()}
    written.errors += value.errors


def _step(node: Any, part: str, path: KeyPath, override: str) -> str | int:
    """``part`` as the key of a section or the position in a list."""
    name = dotted(path)
    if isinstance(node, dict):
        return part
    if isinstance(node, list):
        if part.isdigit() and int(part) < len(node):
            return int(part)
        raise UserError(f"override '{override}': {name} has {len(node)} entries, counted from 0; write {name}=[...]")
    raise UserError(f"override '{override}': {name} is {node!r} and has no '{part}'; write {name}=value")

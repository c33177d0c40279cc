"""The glossary and the code use the same words."""

from __future__ import annotations

import ast
import re

from tests.docs.prose import ROOT, rows

WORDS = [row for row in rows(ROOT / "docs" / "glossary.md") if row[0] != "word"]
SOURCES = sorted((ROOT / "src" / "fewstep").rglob("*.py"))


def _names(text: str) -> set[str]:
    """Every name, argument and attribute in Python code."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        for field in ("id", "arg", "attr", "name"):
            value = getattr(node, field, None)
            found |= {value} if isinstance(value, str) else set()
    return found


def test_every_identifier_of_the_glossary_is_in_the_code():
    known = set().union(*(_names(file.read_text()) for file in SOURCES))
    listed = {name for row in WORDS for name in re.findall(r"`(\w+)`", row[1])}
    assert len(listed) > 25
    assert listed <= known | {"teacher", "critic"}  # roles go by their names as strings and parameters


def test_the_words_of_elsewhere_are_no_names_in_flow_rollouts_and_methods():
    elsewhere = {name for row in WORDS for name in re.findall(r"`(\w+)`", row[3])}
    assert len(elsewhere) > 25
    for folder in ("flow", "rollout", "methods"):
        for file in (ROOT / "src" / "fewstep" / folder).rglob("*.py"):
            assert not _names(file.read_text()) & elsewhere, file

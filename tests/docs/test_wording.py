"""What must not stand in the tree: machines, tools of one workplace, forbidden words; and what pages are bound to."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from fewstep.methods import METHODS
from tests.docs.prose import PAGES, ROOT, page_id, rows

TEXTS = sorted(
    file
    for pattern in ("*.md", "*.toml", "*.txt", "Makefile", ".ci/run", ".pre-commit-config.yaml", "docs/**/*.md")
    for file in ROOT.glob(pattern)
) + sorted(
    file
    for folder in ("src", "tests", "recipes", "bench")
    for file in (ROOT / folder).rglob("*")
    if file.suffix in (".py", ".yaml", ".md") and file != Path(__file__)
)
FORBIDDEN = {
    "a place on one machine": r"/work/|/tmp/\w|/root/|/home/\w|\.\./shared",
    "a registry": r"pypi\.org|pythonhosted|npmjs|deb\.debian\.org|download\.pytorch",
    "a number of a ticket": r"\b[Ii]ssues? #?\d|\bPR #?\d",
    "a word of the workshop": r"\b(?:sub-?agents?|Claude|ChatGPT|LLM-generated)\b",
}


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_no_text_names(kind):
    pattern = re.compile(FORBIDDEN[kind])
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in TEXTS
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def test_no_module_is_called_by_what_says_nothing():
    """DESIGN: no utils, helpers, common, base, core, manager, misc, anywhere."""
    empty = {"utils", "util", "helpers", "helper", "common", "base", "core", "manager", "misc"}
    names = {path.stem for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*")}
    assert not names & empty


def test_the_instructions_for_contributors_stay_short():
    assert len((ROOT / "AGENTS.md").read_text().splitlines()) <= 120


def test_the_table_of_methods_lists_those_that_exist_and_no_other():
    """docs/methods.md has one table whose rows name a method in the first cell; a row that names its file
    (``methods/dmd2.py``) is a built method, a row without one is not built."""
    table = rows(ROOT / "docs" / "methods.md")
    named = {name: found for row in table for name, found in [(row[0].strip("`"), _files(row))] if found}
    built = {method.Section.model_fields["name"].default: Path(inspect.getfile(method)).name for method in METHODS}
    assert {name: files for name, files in named.items() if name in built} == {
        name: {file} for name, file in built.items()
    }
    assert set(named) <= set(built), "a row names a file for a method that METHODS does not list"
    for row in table:
        if row[0].strip("`") in built:
            assert any(re.search(r"recipes/\S+\.yaml|`\w+/\w+`", cell) for cell in row), f"{row[0]}: which recipe?"


def _files(row: list[str]) -> set[str]:
    return set(re.findall(r"methods/(\w+\.py)", " ".join(row)))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_page_has_one_title_and_no_line_of_trailing_spaces(page):
    lines = page.read_text().splitlines()
    assert next(line for line in lines if line and not line.startswith("<!--")).startswith("# ")
    assert not [line for line in lines if line != line.rstrip()]

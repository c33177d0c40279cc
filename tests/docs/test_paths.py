"""What the pages name is there: files, links, Makefile targets."""

from __future__ import annotations

import re

import pytest

from tests.docs.prose import PAGES, ROOT, commands, links, page_id, spans

MADE_AT_RUN_TIME = ("runs/", "my_lab/", "mixer/", "~", "/")
"""First letters of paths that a user makes or has."""
IN_A_RUN = {
    "samples/",
    "checkpoints/",
    "tensorboard/",
    "wandb/",
    "workers/",
    "transformer/",
    "scheduler/",
    "conditioner/",
}
"""Folders of a run or of an export."""
PLACES = (ROOT, ROOT / "src" / "fewstep", ROOT / "docs", ROOT / "src")
"""A path in prose starts at one of these; a bare name may stand anywhere in the package."""
FILE_LIKE = re.compile(r"[\w.*-]+(/[\w.*-]+)*(\.(py|md|yaml|toml|txt)|/)|(src|tests|docs|recipes|bench)/[\w./*-]+")


def _paths(page):
    for span in spans(page):
        if FILE_LIKE.fullmatch(span) and not span.startswith(MADE_AT_RUN_TIME):
            yield span


def _exists(path: str, page) -> bool:
    name = path.rstrip("/")
    if "/" not in name and any((ROOT / "src" / "fewstep").rglob(name)):
        return True
    return any(any(place.glob(name)) for place in (*PLACES, page.parent))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_path_in_a_code_span_exists(page):
    assert not [path for path in _paths(page) if path not in IN_A_RUN and not _exists(path, page)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_leads_to_a_file(page):
    assert not [target for target in links(page) if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_make_target_exists(page):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [
        found[1] for text in (*spans(page), *commands(page)) for found in [re.match(r"make ([a-z]+)\b", text)] if found
    ]
    assert set(named) <= targets


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_module_in_a_python_command_exists(page):
    for command in commands(page):
        script = re.match(r"(?:\S*/)?python3? (?:-m (\S+)|(\S+\.py))", command)
        if script and script[2]:
            assert (ROOT / script[2]).is_file(), command
        elif script and script[1].startswith(("tests.", "bench.", "fewstep")):
            assert any(place.glob(script[1].replace(".", "/") + "*") for place in PLACES), command


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_test_that_a_page_names_exists(page):
    for span in spans(page):
        file, found, name = span.partition("::")
        if found and file.startswith("tests/"):
            assert f"def {name}(" in (ROOT / file).read_text(), span

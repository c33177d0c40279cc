"""The pages of the project, cut into what the tests look at: code spans, links, fenced blocks, table rows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text. ``title`` is the file that its first line names as a comment."""

    language: str
    text: str

    @property
    def title(self) -> str | None:
        found = re.match(r"(?:#|//) (\S+\.\w+)$", self.text.partition("\n")[0])
        return found[1] if found else None


def page_id(page: Path) -> str:
    """A page as pytest shows it."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def without_blocks(page: Path) -> str:
    """The page's text between the fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans(page: Path) -> list[str]:
    """The inline code spans of a page."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", without_blocks(page))


def links(page: Path) -> list[str]:
    """The targets of links and images that lead to a file, without the place in it."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_blocks(page))
    return [target.partition("#")[0] for target in targets if not re.match(r"\w+:|#", target)]


def commands(page: Path) -> list[str]:
    """The commands in the page's shell blocks, one a line; lines that end in a backslash are joined, prompts removed.

    In a ``console`` block only the lines behind a prompt are commands.
    """
    found: list[str] = []
    for block in blocks(page):
        if block.language not in ("bash", "sh", "console"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            prompt = line.startswith("$ ")
            if prompt or block.language != "console":
                found.append(line.removeprefix("$ ").partition(" #")[0].strip())
    return [command for command in found if command and not command.startswith("#")]


def rows(page: Path) -> list[list[str]]:
    """The rows of all tables of a page, heads included, cell by cell."""
    lines = [line for line in without_blocks(page).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]
    return [row for row in cells if not set("".join(row)) <= set("-: ")]

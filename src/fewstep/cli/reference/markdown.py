"""Markdown from document strings."""

from __future__ import annotations

import inspect
import re


def cell(text: str) -> str:
    """One cell of a table: one line, bars escaped."""
    return " ".join(text.replace("|", "\\|").split())


def prose(text: str | None) -> str:
    """Paragraphs of one line each, in one kind of code quotes."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).replace("``", "`")

"""The page: the sections in their order, in one file without any outside resource."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

from fewstep.observe.report.contents import read_contents
from fewstep.observe.report.sections import SECTIONS, heading
from fewstep.observe.report.style import SCRIPT, STYLE

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(run_folder: Path) -> Path:
    """Writes ``report.html`` into the run folder from what it holds, in one step, and returns its path.

    A run that has only begun, or lacks files, gives a shorter page. Raises FileNotFoundError where there is no folder.
    """
    contents = read_contents(run_folder)
    parts = [(anchor, title, build(contents)) for anchor, title, build in SECTIONS]
    parts = [(anchor, title, body) for anchor, title, body in parts if body]
    links = "".join(f'<a href="#{anchor}">{anchor.capitalize()}</a>' for anchor, _, _ in parts)
    sections = "".join(f'<section id="{anchor}"><h2>{title}</h2>{body}</section>' for anchor, title, body in parts)
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(contents.name)} - fewstep report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{heading(contents)}<nav>{links}</nav>\n{sections}\n"
        "<footer>Written by fewstep. This file holds all that it shows and needs no network.</footer>\n"
        f"</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
    path = run_folder / "report.html"
    aside = path.with_suffix(".html.part")
    aside.write_text(page, encoding="utf-8", errors="replace")
    os.replace(aside, path)
    return path

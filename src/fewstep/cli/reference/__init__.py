"""The pages of docs/reference, made from the commands, the schema of recipes and the contracts.

``python -m fewstep.cli.reference`` writes them; a test fails where they are not what it would write.
"""

from __future__ import annotations

from pathlib import Path

from fewstep.cli.reference.commands import commands_page
from fewstep.cli.reference.config import config_page
from fewstep.cli.reference.hooks import hooks_page
from fewstep.cli.reference.masks import MASKS, mask_picture

MADE_BY = "<!-- Made by `python -m fewstep.cli.reference`; change the code, not this page. -->\n\n"


def pages() -> dict[str, str]:
    """Every page by file name."""
    bodies = {"cli.md": commands_page(), "config.md": config_page(), "hooks.md": hooks_page()}
    pictures = {f"masks/{name}.svg": mask_picture(*described) for name, described in MASKS.items()}
    return {name: MADE_BY + body for name, body in bodies.items()} | pictures


def write_pages(folder: Path) -> None:
    """Writes every page into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")

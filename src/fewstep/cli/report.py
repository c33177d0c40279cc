"""``fewstep report``: the page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewstep.cli.console import say
from fewstep.errors import UserError


def report(run: Annotated[Path, typer.Argument(help="Folder of a run, finished or not.", show_default=False)]) -> None:
    """Write `report.html` of a run: curves of every role, samples over time, quality, and the resolved recipe.

    It is one file that can be read offline and sent to somebody.
    """
    if not (run / "recipe.yaml").is_file():
        raise UserError(
            f"{run} is not the folder of a run (it has no recipe.yaml); give one, such as runs/nano-teacher"
        )
    from fewstep.observe.report import write_report

    say(f"Wrote {write_report(run)}")

"""``fewstep export``: the student as a folder that diffusers can load."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fewstep.cli.console import say

MODEL_HELP = "A run, one of its checkpoints, an export, or a diffusers folder."


class DType(StrEnum):
    """Types in which weights can be stored."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def export(
    model: Annotated[Path, typer.Argument(help=MODEL_HELP, show_default=False)],
    folder: Annotated[
        Path, typer.Argument(help="Folder to write; it appears complete or not at all.", show_default=False)
    ],
    raw: Annotated[bool, typer.Option("--raw", help="The trained weights instead of their average (EMA).")] = False,
    dtype: Annotated[DType, typer.Option("--dtype", help="Type in which the weights are stored.")] = DType.float32,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    """Export the student: a diffusers folder, and `fewstep.json` with all that running it as trained takes."""
    from fewstep.checkpoint.export import export as write
    from fewstep.checkpoint.source import open_source

    source = open_source(model)
    path = write(source, folder, "raw" if raw else "ema", dtype.value, overwrite=overwrite)
    say(f"Exported {model} (iteration {source.iteration}) to {path}. Look at it: fewstep sample {path}")

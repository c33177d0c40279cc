"""``fewstep plan``: memory, time and the best layout of a recipe on GPUs that nobody has rented yet."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from fewstep.cli.config import RECIPE_HELP, recipe_path
from fewstep.cli.console import out, say, show, table
from fewstep.cli.shipped import run_recipe
from fewstep.errors import UserError

if TYPE_CHECKING:
    from fewstep.costs.layouts import Layout

SHOWN = 12
"""Layouts in the table."""


def plan(
    recipe: Annotated[str, typer.Argument(help=RECIPE_HELP, show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.FIELD=VALUE", help="Values to change, read as YAML.", show_default=False),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs in all.", min=1)] = 1,
    kind: Annotated[str, typer.Option("--kind", help="Of GPU: `h200`, `h100` or `a100-80g`.")] = "h200",
    host_gpus: Annotated[int, typer.Option("--host-gpus", help="GPUs of one host.", min=1)] = 8,
    size: Annotated[
        str | None, typer.Option("--size", help="Of networks that are not there and whose names tell no size.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option("--shape", help="Of a sample, `FRAMESxCHANNELSxHEIGHTxWIDTH`; that of the data if left out."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Plan a recipe before renting: memory, time and the best layout on so many GPUs.

    Nothing is loaded, neither weights nor data need to be there: the phases of the method run on networks that count
    instead of computing. Times are estimates, fitted to measured runs; docs/scaling.md says how far they are off.
    """
    import torch

    from fewstep.config import load_recipe
    from fewstep.costs.estimate import Planner
    from fewstep.costs.layouts import EXTRA, ranked
    from fewstep.costs.sizes import sizes_of
    from fewstep.costs.told import as_plain, best_rows, layout_rows, phase_rows
    from fewstep.devices import kind_of
    from fewstep.engines.device import PRECISIONS

    device = kind_of(kind)
    loaded = load_recipe(recipe_path(recipe), overrides or [])
    sizes = sizes_of(loaded, size=size, shape=_shape(shape), find=run_recipe)
    precision = PRECISIONS.get(loaded.engine.precision, torch.bfloat16)  # auto, on a GPU
    planner = Planner(sizes, device, host_gpus=host_gpus, precision=precision)
    found = ranked(planner, gpus)
    if not found:
        raise UserError(
            f"--gpus {gpus}: a batch of {loaded.data.batch} does not divide among so many ranks; write a number of "
            f"GPUs that divides data.batch, or data.batch={-(-loaded.data.batch // gpus) * gpus}"
        )
    if as_json:
        typer.echo(json.dumps(as_plain(planner, found), indent=1))
        return
    for guess in sizes.guessed:
        say(guess, style="dim")
    say(
        f"{loaded.name}: {loaded.method.name}, batch {loaded.data.batch}, {planner.model_flops / 1e12:,.4g} TFLOP an "
        f"iteration, on {gpus} x {device.name} ({device.memory_gib:g} GiB each)"
    )
    best = found[0]
    layouts = table(
        f"Layouts, the fastest that fit first (each thing beside the plain one counts as {EXTRA - 1:.0%} slower)",
        "layout",
        "GiB a GPU",
        "",
        "s/iteration",
        "samples/s",
        "MFU",
        numbers=True,
    )
    for row in layout_rows(planner, found[:SHOWN]):
        layouts.add_row(*row)
    show(layouts)
    if not best.fits:
        say(f"Nothing fits into {device.memory_gib:g} GiB; more GPUs, a smaller batch or a smaller network will.")
    memory = table(
        f"Memory of one GPU: {best.layout.name}", "of", "weights", "gradients", "optimizer", "EMA", "GiB", numbers=True
    )
    for row in best_rows(best):
        memory.add_row(*row)
    show(memory)
    phases = table("One iteration", "phase", "times", "rows", "tokens", "TFLOP", "s", "bound by", numbers=True)
    for row in phase_rows(best):
        phases.add_row(*row)
    show(phases)
    out.print()
    words = [recipe, *map(shlex.quote, overrides or []), *best.layout.overrides(loaded)]
    where = "On every machine" if gpus > host_gpus and best.layout.engine == "process" else "Start it"
    say(f"{where}: {launcher(best.layout, host_gpus)}fewstep train {' '.join(words)}")


def launcher(layout: Layout, host_gpus: int) -> str:
    """What stands before the command that trains in this layout; Ray starts its workers itself."""
    if layout.engine != "process" or layout.gpus == 1:
        return ""
    if layout.gpus <= host_gpus:
        return f"torchrun --nproc-per-node {layout.gpus} -m "
    each = max(count for count in range(1, host_gpus + 1) if layout.gpus % count == 0)
    hosts = f"--nnodes {layout.gpus // each} --nproc-per-node {each}"
    return f"torchrun {hosts} --rdzv-backend c10d --rdzv-endpoint FIRST-MACHINE:29500 -m -- "


def _shape(text: str | None) -> tuple[int, int, int, int] | None:
    if text is None:
        return None
    try:
        frames, channels, height, width = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise UserError(f"--shape {text}: write FRAMESxCHANNELSxHEIGHTxWIDTH, such as 21x16x60x104") from None
    return frames, channels, height, width

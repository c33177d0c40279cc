"""``fewstep train``: run a recipe, or go on with a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewstep.cli.config import RECIPE_HELP, recipe_path
from fewstep.cli.console import STOPPED, say
from fewstep.errors import UserError

RUNS = Path("runs")


def train(
    recipe: Annotated[str, typer.Argument(help=RECIPE_HELP, show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.FIELD=VALUE", help="Values to change, read as YAML.", show_default=False),
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Folder of the run; `runs/<name of the recipe>` if left out.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint of the run.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the plan (roles, memory, phases), train nothing.")
    ] = False,
) -> None:
    """Train what a recipe describes.

    `fewstep train wan_nano/sft` starts a run. `fewstep train --resume runs/nano-teacher` goes on with one; `iterations`
    is the total, so `iterations=2000` there makes a finished run longer. Ctrl-C saves a checkpoint and stops (exit code
    130).
    """
    is_run = (Path(recipe) / "recipe.yaml").is_file()
    if is_run and not resume:
        raise UserError(f"{recipe} is a run; go on with it by `fewstep train --resume {recipe}`, or name a recipe")
    path = recipe_path(recipe)

    from fewstep.checkpoint.run_folder import RunFolder
    from fewstep.config import load_recipe
    from fewstep.describe import describe
    from fewstep.prepare import prepare
    from fewstep.train import train as run_plan

    loaded = load_recipe(path, overrides or [])
    place = run or (Path(recipe) if is_run else RUNS / loaded.name)
    folder = RunFolder.existing(place) if resume else RunFolder(place)
    plan = prepare(loaded)
    if dry_run:
        if plan.ranks.first:
            say(describe(plan))
        return
    if not resume and plan.ranks.first:
        folder = RunFolder.create(place)
    if not run_plan(plan, folder, resume=resume):
        raise typer.Exit(STOPPED)

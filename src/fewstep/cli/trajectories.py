"""``fewstep trajectories``: a teacher's trajectories, made before the training that reads them."""

from __future__ import annotations

from typing import Annotated

import typer

from fewstep.cli.config import RECIPE_HELP, recipe_path
from fewstep.errors import UserError


def trajectories(
    recipe: Annotated[str, typer.Argument(help=RECIPE_HELP, show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.FIELD=VALUE", help="Values to change, read as YAML.", show_default=False),
    ] = None,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Which of the processes this is, from 0.")] = 0,
    world: Annotated[int, typer.Option("--world", min=1, help="Processes that share the work.")] = 1,
) -> None:
    """Make the teacher's trajectories that a recipe trains on, as far as they are missing.

    `fewstep train` does this by itself. This command shares the work: start it once for each GPU, with another `--rank`
    and `engine.device=cuda:<number>`. Ctrl-C keeps what is finished (exit code 130); the same command goes on.
    """
    if rank >= world:
        raise UserError(f"--rank {rank} of --world {world}: ranks count from 0; write 0 to {world - 1}")
    path = recipe_path(recipe)

    from fewstep.config import load_recipe
    from fewstep.methods.ode_init import OdeInit
    from fewstep.prepare import prepare
    from fewstep.trajectories import generate

    plan = prepare(load_recipe(path, overrides or []))
    if not isinstance(plan.method, OdeInit):
        raise UserError(f"{path}: method '{plan.recipe.method.name}' trains on no trajectories; 'ode_init' does")
    generate(plan, rank=rank, world=world)

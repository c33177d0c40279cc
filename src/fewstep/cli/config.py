"""``fewstep config``: what is wrong with a recipe, and what each of its keys means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from fewstep.cli.console import USER_ERROR, complain, complaints, out, say
from fewstep.cli.shipped import find_recipe
from fewstep.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Check a recipe, or explain every key of it.")

RECIPE_HELP = "A recipe file, the name of a shipped recipe such as `wan_nano/sft`, or the folder of a run."


@app.command("check")
def check(
    recipes: Annotated[
        list[str], typer.Argument(metavar="RECIPE|SECTION.FIELD=VALUE", help=RECIPE_HELP, show_default=False)
    ],
) -> None:
    """Check recipes without running them: keys, values, and whether the sections go together.

    Everything that is wrong is told at once, with file and line. Overrides apply to every recipe that is named.
    """
    from fewstep.config import load_recipe

    names = [name for name in recipes if not is_override(name)]
    overrides = [name for name in recipes if is_override(name)]
    failed = 0
    for name in names:
        try:
            path = recipe_path(name)
            recipe = load_recipe(path, overrides)
        except UserError as error:
            complain(complaints(error) or [])
            failed += 1
        else:
            say(f"{path}: fine ({recipe.method.name}, {recipe.iterations} iterations)")
    if failed:
        raise typer.Exit(USER_ERROR)


@app.command("explain")
def explain(
    recipe: Annotated[str, typer.Argument(help=RECIPE_HELP, show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="SECTION.FIELD=VALUE", help="Values to change.", show_default=False),
    ] = None,
) -> None:
    """Show every key that the recipe's run reads: its value, where the value comes from, and what it means.

    There is no key that is accepted and not read: such keys are errors.
    """
    from fewstep.config import explain_recipe

    path = recipe_path(recipe)
    lines = explain_recipe(path, overrides or [])
    for line in lines:
        origin = f"line {line.origin.rsplit(':', 1)[1]}" if ":" in line.origin else line.origin
        details = "; ".join(part for part in (origin, line.unit) if part)
        shown = Text.assemble((line.key, "bold"), " = ", (line.value, "cyan"), (f"  ({details})", "dim"))
        out.print(shown, soft_wrap=True)
        if line.doc:
            out.print(Padding(Text(line.doc), (0, 0, 0, 4)))
    written = sum(line.origin != "default" for line in lines)
    say(f"\n{len(lines)} keys: {written} written, {len(lines) - written} by default. Not read: none.")


def is_override(argument: str) -> bool:
    """Whether an argument is ``section.field=value`` rather than a file."""
    return "=" in argument and not Path(argument).exists()


def recipe_path(name: str) -> Path:
    """The recipe file of a path, a shipped name, or a run."""
    inside = Path(name) / "recipe.yaml"
    return inside if inside.is_file() else find_recipe(name)

"""``fewstep recipes``: the recipes that come with fewstep."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
import yaml

from fewstep.cli.console import out, say, table
from fewstep.cli.shipped import find_recipe, shipped_recipes
from fewstep.errors import UserError

app = typer.Typer(no_args_is_help=True, help="List the shipped recipes, or copy one to change it.")


@app.command("list")
def list_recipes() -> None:
    """List the shipped recipes: name, method, iterations, and what each is for."""
    rows = table("Shipped recipes", "name", "method", "iterations", "what it makes")
    rows.columns[0].no_wrap = True
    for name, path in shipped_recipes().items():
        text = path.read_text(encoding="utf-8")
        recipe = yaml.safe_load(text)
        rows.add_row(name, recipe["method"]["name"], str(recipe["iterations"]), _purpose(text))
    out.print(rows)
    say("\nRun one with `fewstep train NAME`, or change a copy: `fewstep recipes copy NAME my_recipe.yaml`.")


@app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe, such as `wan_nano/sft`.", show_default=False)],
    to: Annotated[
        Path | None, typer.Argument(help="File or folder to write; by default the current folder.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")] = False,
) -> None:
    """Copy a shipped recipe, comments and all, to a file of your own."""
    source = find_recipe(name)
    target = to or Path(name.replace("/", "_").removesuffix(".yaml") + ".yaml")
    if target.is_dir():
        target = target / source.name
    if target.exists() and not overwrite:
        raise UserError(f"{target} exists; write another file, or --overwrite to replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    say(f"Copied to {target}. Check it with `fewstep config check {target}`, run it with `fewstep train {target}`.")


def _purpose(text: str) -> str:
    """The comment at the head of a recipe."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines)

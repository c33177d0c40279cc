"""The command line. Commands import what they need when they run, so that ``--help`` answers at once."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from fewstep import __version__
from fewstep.cli import config, recipes
from fewstep.cli.console import Commands
from fewstep.cli.demo import demo
from fewstep.cli.demo_video import demo_video
from fewstep.cli.doctor import doctor
from fewstep.cli.evaluate import evaluate
from fewstep.cli.export import export
from fewstep.cli.plan import plan
from fewstep.cli.report import report
from fewstep.cli.sample import sample
from fewstep.cli.stream import stream
from fewstep.cli.train import train
from fewstep.cli.trajectories import trajectories

app = typer.Typer(
    name="fewstep",
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"fewstep {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def fewstep(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere in a command.")] = False,
) -> None:
    """Distil a flow-matching image or video model into a student of one to four steps.

    Start with `fewstep demo`: a teacher and its 4-step student, trained on this machine in minutes.
    """


COMMANDS = {
    "demo": demo,
    "demo-video": demo_video,
    "plan": plan,
    "train": train,
    "trajectories": trajectories,
    "sample": sample,
    "stream": stream,
    "eval": evaluate,
    "export": export,
    "report": report,
    "doctor": doctor,
}

for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(recipes.app, name="recipes")
app.add_typer(config.app, name="config")


def main() -> None:
    """The program ``fewstep``."""
    # Threads that wait for each other give a core back within microseconds, before torch is loaded and reads it. As it
    # is, they hold it for milliseconds, and training on a CPU that does something else too takes several times longer.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    app()

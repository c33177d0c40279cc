"""The page of the commands, their arguments and options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from fewstep.cli import app
from fewstep.cli.reference.markdown import cell, prose


def commands_page() -> str:
    """The commands: what each is for, its arguments and options."""
    group: Any = typer.main.get_command(app)
    lines = ["# Commands\n", prose(group.help)]
    lines += [
        "",
        "`--debug` may stand anywhere in a command and shows tracebacks. Exit codes: 0 done; 1 the run failed; 2 "
        "something that you can mend (each thing on one line); 130 stopped by Ctrl-C, with a checkpoint if there was "
        "training.",
    ]
    for words, command in _commands(group, ("fewstep",)):
        lines += ["", f"## {' '.join(words)}\n", f"```\n{_usage(words, command)}\n```\n", prose(command.help)]
        rows = [_parameter(parameter) for parameter in command.params if parameter.name != "help"]
        if rows:
            lines += ["", "| argument or option | default | meaning |", "|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def _commands(group: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*words, name))
        else:
            yield (*words, name), command


def _usage(words: tuple[str, ...], command: Any) -> str:
    parts = list(words)
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            name = _argument(parameter)
            parts.append(name if parameter.required else f"[{name}]")
    options = any(parameter.param_type_name == "option" and parameter.name != "help" for parameter in command.params)
    return " ".join(parts + (["[OPTIONS]"] if options else []))


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name).upper()
    return f"{name}..." if parameter.nargs == -1 else name


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{_argument(parameter)}`"
    else:
        value = "" if parameter.is_flag else f" {parameter.name.upper()}"
        name = ", ".join(f"`{option}{value}`" for option in parameter.opts)
    default = "required" if parameter.required else _default(parameter)
    return f"| {cell(name)} | {default} | {cell(prose(parameter.help or ''))} |"


def _default(parameter: Any) -> str:
    value = parameter.default
    if value in (None, False, (), []):
        return ""
    return f"`{getattr(value, 'value', value)}`"

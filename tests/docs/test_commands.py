"""The ``fewstep`` commands in the pages are commands: sub-command, options and overrides exist."""

from __future__ import annotations

import re
import shlex

import pytest
import typer.main

from fewstep.cli import app
from fewstep.cli.shipped import shipped_recipes
from fewstep.config import load_recipe
from tests.docs.prose import PAGES, ROOT, commands, page_id, spans

COMMANDS = [
    pytest.param(command, id=f"{page_id(page)}: {command}")
    for page in PAGES
    for command in [*commands(page), *(span for span in spans(page) if span.startswith("fewstep "))]
    if re.match(r"(\.venv/bin/)?fewstep ", command)
]
PLACEHOLDER = re.compile(r"<\S*>|\.\.\.|\b[A-Z_]{3,}\b|…")


def parse(words: list[str]) -> tuple[str, list[str]]:
    """The command that ``words`` call, and its arguments without options; fails where one is unknown."""
    command, context, name = typer.main.get_command(app), None, "fewstep"
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        word, *words = words
        assert word in command.commands, f"'{name}' has no command '{word}', only {', '.join(command.commands)}"
        command, name = command.commands[word], f"{name} {word}"
    context = command.context_class(command, info_name=name)
    words = [word for word in words if word != "--debug"]
    values, rest, _ = command.make_parser(context).parse_args(words)
    given = [values[parameter.name] for parameter in command.params if parameter.param_type_name == "argument"]
    flat = [word for value in given if value is not None for word in (value if isinstance(value, tuple) else (value,))]
    return name, [str(word) for word in [*flat, *rest] if isinstance(word, str)]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_fewstep_command_parses(command):
    words = shlex.split(command)[1:]
    words = words[: next((i for i, word in enumerate(words) if word in ("|", "&&", ">", ";")), len(words))]
    name, arguments = parse(words)
    if name in ("fewstep train", "fewstep config check", "fewstep config explain"):
        _recipe_takes(arguments)


def _recipe_takes(arguments: list[str]) -> None:
    """A shipped recipe with the overrides of the command loads: its keys exist, its values are allowed."""
    shipped = shipped_recipes()
    recipes = [ROOT / word for word in arguments if (ROOT / word).is_file()]
    recipes += [ROOT / shipped[word] for word in arguments if word in shipped]
    overrides = [word for word in arguments if re.match(r"[\w.]+=", word) and not PLACEHOLDER.search(word)]
    for recipe in recipes:
        load_recipe(recipe, overrides)


def test_a_wrong_command_an_unknown_option_and_a_wrong_key_would_be_found():
    with pytest.raises(AssertionError, match="has no command 'trian'"):
        parse(["trian"])
    with pytest.raises(Exception, match="--overwrit"):
        parse(["recipes", "copy", "wan_nano/sft", "--overwritten"])
    with pytest.raises(ValueError, match=r"student\.optimizer"):
        _recipe_takes(["recipes/wan_nano/sft.yaml", "student.optimizer.rate=1"])

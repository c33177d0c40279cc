"""The project's files agree with each other."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.prose import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def test_every_dependency_is_pinned_within_its_bounds():
    named = [*PROJECT["dependencies"], *(name for extra in PROJECT["optional-dependencies"].values() for name in extra)]
    for requirement in map(Requirement, named):
        if requirement.name != PROJECT["name"]:
            pin = PINS.get(canonicalize_name(requirement.name))
            assert pin, f"{requirement.name} has no pin"
            assert requirement.specifier.contains(pin), f"{requirement} is pinned to {pin}"


def test_what_every_user_installs_stays_small():
    heavy = {"diffusers", "transformers", "accelerate", "ray", "wandb", "av", "scipy", "matplotlib"}
    assert not {Requirement(name).name for name in PROJECT["dependencies"]} & heavy


def test_the_hooks_run_the_tools_of_make_check():
    hooks, checks = (ROOT / ".pre-commit-config.yaml").read_text(), (ROOT / "Makefile").read_text()
    tools = set(re.findall(r"^\t\$\(BIN\)/([\w-]+(?: check| format| config check)?)", checks, re.MULTILINE))
    assert tools == {"ruff check", "ruff format", "pyright", "lint-imports", "codespell", "fewstep config check"}
    for tool in tools:
        assert f"entry: .venv/bin/{tool}" in hooks, tool

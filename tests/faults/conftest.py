"""Runs to be hurt, and sound ones to compare them with; what each fault took is shown at the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.launchers import ONE, Launcher
from tests.faults.sessions import Patient
from tests.recipes.tiny_runs import World

TABLE: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TABLE:
        terminalreporter.section("faults")
        for line in TABLE:
            terminalreporter.write_line(line)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A line of the table that is shown at the end."""
    return TABLE.append


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(tmp_path_factory.mktemp("faults") / "world")


@pytest.fixture(scope="session")
def sound(world: World) -> Callable[[Launcher, int, int], Patient]:
    """A run that nothing happened to, one for each launcher, length and interval of checkpoints."""
    made: dict[tuple[str, int, int], Patient] = {}

    def run(launcher: Launcher = ONE, iterations: int = 30, every: int = 4) -> Patient:
        key = (launcher.name, iterations, every)
        if key not in made:
            name = f"sound-{launcher.slug}-{iterations}-{every}"
            made[key] = Patient(world, name, iterations, every, task=launcher.task)
            made[key].finish(launcher)
            made[key].check_items()
        return made[key]

    return run

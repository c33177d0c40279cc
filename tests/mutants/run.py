"""Breaks the code in one place at a time: each break must turn one of the tests named for it red.

    python -m tests.mutants.run                  every mutant
    python -m tests.mutants.run --only NAME      one of them (may be repeated)

A mutant works on a copy of the tree; the tree itself is never touched. First the named tests are run on the sound code,
since a test that is red anyway catches nothing. The exit status is 1 if a mutant survives, cannot be applied any more,
or could not be judged.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests", "recipes", "docs", "pyproject.toml")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: ``caught`` by the test ``by``, or not, and then ``by`` says what happened instead."""

    mutant: Mutant
    caught: bool
    by: str
    time_s: float


def mutate(mutant: Mutant, root: Path) -> None:
    """Applies the mutant to the tree at ``root``. Raises ValueError if its text does not stand there exactly once."""
    file = root / "src" / "fewstep" / mutant.file
    text = file.read_text() if file.is_file() else ""
    found = text.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.file} holds the text to break {found} times, not once: renew the mutant")
    file.write_text(text.replace(mutant.old, mutant.new))


def judge(mutant: Mutant, root: Path = ROOT) -> Verdict:
    """Runs the mutant's tests on a broken copy of the tree at ``root``."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        broken = _copy(root, Path(folder))
        try:
            mutate(mutant, broken)
            status, output = _pytest(broken, mutant.tests)
        except (ValueError, subprocess.TimeoutExpired) as error:
            return Verdict(mutant, False, str(error), time.monotonic() - start)
    red = re.search(r"^(?:FAILED|ERROR) \S*?([^/\s]+::\S+)", output, re.MULTILINE)
    if status == 1 and red:
        return Verdict(mutant, True, red[1], time.monotonic() - start)
    by = "SURVIVED" if status == 0 else f"pytest ended with {status}: {output.strip().splitlines()[-1:]}"
    return Verdict(mutant, False, by, time.monotonic() - start)


def judge_all(mutants: Sequence[Mutant], jobs: int, root: Path = ROOT) -> Iterator[Verdict]:
    """The verdicts as they come, ``jobs`` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(judge, mutant, root) for mutant in mutants]):
            yield done.result()


def red_without_mutants(mutants: Sequence[Mutant], root: Path = ROOT) -> str:
    """What pytest says of the named tests on the sound code if they are not all green, else nothing."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        status, output = _pytest(_copy(root, Path(folder)), tests, timeout_s=None)
    return output if status else ""


def _copy(root: Path, folder: Path) -> Path:
    for name in COPIED:
        source, target = root / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target)
    return folder


def _pytest(root: Path, tests: Sequence[str], timeout_s: float | None = TIMEOUT_S) -> tuple[int, str]:
    """Exit status and output of pytest's ``tests`` in the tree at ``root``, up to the first failure."""
    options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-m", "faults or thorough or not faults"]
    environment = os.environ | {
        "PYTHONPATH": str(root / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)],
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.returncode, done.stdout + done.stderr


def _chosen(names: Sequence[str]) -> list[Mutant]:
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no mutant is called {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in names] or list(MUTANTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this mutant alone")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    arguments = parser.parse_args()
    mutants, console = _chosen(arguments.only), Console()
    if red := red_without_mutants(mutants):
        console.print(red, markup=False, highlight=False)
        console.print("These tests fail on the sound code: nothing can be said of the mutants.")
        return 1
    table = Table("mutant", Column("caught by", overflow="fold"), "s")
    survivors = 0
    for verdict in judge_all(mutants, arguments.jobs):
        console.print(f"{'caught  ' if verdict.caught else 'SURVIVED'}  {verdict.mutant.name}", highlight=False)
        table.add_row(verdict.mutant.name, verdict.by, f"{verdict.time_s:.0f}", style="" if verdict.caught else "red")
        survivors += not verdict.caught
    console.print(table, f"{len(mutants) - survivors} of {len(mutants)} mutants caught")
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main())

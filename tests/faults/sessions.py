"""Runs of ``fewstep train`` in processes of their own, that are hurt, looked at and gone on with.

A ``Launcher`` says how a run is started; a fault knows no more of it than how many processes train, and what is said of
one of them, so that every engine is put through the same table.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.save import load_checkpoint, newest_complete
from fewstep.cli.shipped import shipped_recipes
from fewstep.observe.sinks import read_rows
from tests.faults.launchers import BATCH, ONE, Launcher, Task
from tests.recipes.tiny_runs import World, origins, tensors, values

ROOT = Path(__file__).parents[2]
TOKEN = "FEWSTEP_FAULT_TOKEN"
ITEMS = 67
MOST_S = 60.0
"""What nothing may take: from a fault to the end of all processes."""
START_S = 300.0
"""What a start may take, on a machine that does something else too."""
SETTINGS = (f"data.batch={BATCH}", "validation=null", "observe.every=1", "observe.report=false")
QUICK = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
"""Ray's workers give way to every other process otherwise, and are slow on a machine that has much to do."""
PROCESS = re.compile(r"process (\d+) on")
"""Of the first line that a worker on Ray says."""


@dataclass
class Session:
    """One start of a run, with all processes that came of it, which a token in their environment tells apart."""

    launcher: Launcher
    process: subprocess.Popen[bytes]
    token: str
    log: Path
    workers: Path
    """The folder of what workers on Ray say."""
    began_at: float = field(default_factory=time.monotonic)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self) -> dict[int, dict[str, str]]:
        """The living processes of this session and their environments, zombies left out."""
        return living(self.token, self.process.pid)

    def ranks(self) -> dict[int, int]:
        """The process of each rank, or of each worker."""
        if self.launcher.workers:
            logs = [self.workers / f"{name.replace('/', '-')}.log" for name in self.launcher.workers]
            found = {rank: PROCESS.findall(log.read_text()) for rank, log in enumerate(logs) if log.exists()}
            return {rank: int(pids[-1]) for rank, pids in found.items() if pids and lives(int(pids[-1]))}
        if self.launcher.world == 1:
            return {0: self.process.pid} if self.process.poll() is None else {}
        return {int(told["RANK"]): pid for pid, told in self.pids().items() if "RANK" in told}

    def strike(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to a rank, which waits to be born where it is early."""
        self.wait(lambda: rank in self.ranks(), f"rank {rank}")
        os.kill(self.ranks()[rank], number)

    def wait(self, condition: Callable[[], bool], what: str, within_s: float = START_S, every_s: float = 0.02) -> None:
        until = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.said}"
            assert time.monotonic() < until, f"waited in vain for {what}:\n{self.said}"
            time.sleep(every_s)

    def end(self, within_s: float = MOST_S) -> float:
        """Waits until all of its processes are gone; returns the seconds that took."""
        began = time.monotonic()
        try:
            self.process.wait(within_s)
            while left := self.pids().keys() | set(self.ranks().values()):
                assert time.monotonic() - began < within_s, f"left behind: {left}\n{self.said}"
                time.sleep(0.05)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {within_s} s: {self.pids().keys()}\n{self.said}") from None
        finally:
            self.sweep()
        return time.monotonic() - began

    def sweep(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def lives(pid: int) -> bool:
    """Whether a process is there, and not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def living(token: str, session: int) -> dict[int, dict[str, str]]:
    """The living processes that have the token in their environment, or belong to the session of that process; Ray's
    workers write their name over their environment."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, sid = (place / "stat").read_text().rpartition(")")[2].split()[:4]
            words = (place / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if state != "Z" and (int(sid) == session or f"{TOKEN}={token}" in words):
            found[int(place.name)] = dict(word.split("=", 1) for word in words if "=" in word)
    return found


@dataclass
class Patient:
    """A run of ``iterations`` that is hurt in one session and goes on in others, however they are launched."""

    world: World
    name: str
    iterations: int
    every: int = 4
    settings: tuple[str, ...] = ()
    task: Task = ONE.task
    around: tuple[str, ...] = ()
    """A command that stands before the launcher's."""
    place: Path | None = None
    """The run's folder as the command is told it; that of its name in the world if left out."""
    seen_at: Path | None = None
    """The same folder as this process sees it, where that is another path."""
    sessions: list[Session] = field(default_factory=list)

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.seen_at or self.world.path / self.name)

    @property
    def rows_folder(self) -> Path:
        return self.world.path / f"{self.name}-rows"

    def start(self, launcher: Launcher, **environment: str) -> Session:
        """From the beginning, or from where it stands."""
        place, token = str(self.place or self.run.path), secrets.token_hex(8)
        settings = [*launcher.settings, *self.settings]
        if self.sessions:
            arguments = ["train", "--resume", place, *settings]
        else:
            for origin in origins(self.task.recipe).values():
                if not self.world.run(origin).path.exists():
                    self.world.train(origin, *SETTINGS, iterations=2)
            tiny = [*self.world.overrides(self.task.recipe, self.iterations), *SETTINGS, *self.task.settings]
            arguments = ["train", str(shipped_recipes()[self.task.recipe]), *tiny]
            arguments += [f"checkpoint.every={self.every}", *settings, "--run", place]
        rows = self.rows_folder / f"{len(self.sessions):03d}"
        rows.mkdir(parents=True)
        told = {TOKEN: token, "FAULT_ROWS": str(rows), "COLUMNS": "200", **QUICK, **environment}
        path = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        log = rows / "log.txt"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*self.around, *launcher.prefix, *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, **told},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.sessions.append(Session(launcher, process, token, log, self.run.workers))
        return self.sessions[-1]

    def finish(self, launcher: Launcher) -> None:
        """Goes on to the end."""
        session = self.start(launcher)
        session.end(START_S)
        assert session.process.returncode == 0, session.said

    def done(self) -> int:
        """Iterations of which there is a row of metrics."""
        return (
            max((row.iteration for row in read_rows(self.run.metrics)), default=0) if self.run.metrics.exists() else 0
        )

    def saved(self) -> int:
        """The iteration of the newest complete checkpoint."""
        newest = newest_complete(self.run.checkpoints)
        return load_checkpoint(newest).iteration if newest else 0

    def partials(self) -> list[Path]:
        return list(self.run.checkpoints.glob(".partial-*"))

    def state(self) -> dict[str, dict[str, Tensor]]:
        return tensors(self.run, self.iterations)

    def check_items(self) -> None:
        """Of the iterations that hold, every item once an epoch."""
        sessions = [noted(folder) for folder in sorted(self.rows_folder.iterdir())]
        assert_each_item_once(sessions, self.iterations, self.task.rows)

    def assert_equals(self, other: Patient, *, exact: bool = True) -> None:
        """Every tensor of the last checkpoint and every row of metrics; to the last bit, or to rounding."""
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-9, "atol": 1e-9}
        found, expected = self.state(), other.state()
        assert found.keys() == expected.keys()
        for group, named in expected.items():
            assert found[group].keys() == named.keys(), group
            for name, tensor in named.items():
                torch.testing.assert_close(found[group][name], tensor, **tolerance, msg=f"{group}: {name}")
        mine, theirs = (
            {key: row for key, row in values(patient.run).items() if key[0] == "train"} for patient in (self, other)
        )
        assert mine.keys() == theirs.keys() == {("train", i + 1) for i in range(self.iterations)}
        for key, row in theirs.items():
            for name, value in row.items():
                assert abs(mine[key][name] - value) <= (0 if exact else 1e-9 * (1 + abs(value))), (key, name)


def noted(folder: Path) -> list[dict]:
    """What the watched methods noted there, by iteration, and then by time."""
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda row: (row["iteration"], row["time_s"]))


def assert_each_item_once(sessions: list[list[dict]], iterations: int, rows: int) -> None:
    """Every row of every iteration was there, and each epoch has each item once; of an iteration that was done again
    the last time holds."""
    holds: dict[tuple[int, int], str] = {}
    for session in sessions:
        for row in session:
            for key, item in zip(row["keys"], row["items"], strict=True):
                holds[row["iteration"], key] = item
    places = sorted(holds)
    assert places == [(i, key) for i in range(iterations) for key in range(rows)]
    order = [holds[place] for place in places]
    for start in range(0, len(order) - ITEMS + 1, ITEMS):
        assert len(set(order[start : start + ITEMS])) == ITEMS, f"epoch {start // ITEMS}"
    assert max(Counter(order[len(order) - len(order) % ITEMS :]).values(), default=1) == 1

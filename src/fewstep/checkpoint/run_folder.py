"""The folder of a run: what stands where, and that one process at a time trains into it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fewstep.checkpoint.atomic import PARTIAL
from fewstep.checkpoint.save import newest_complete
from fewstep.checkpoint.source import Source, open_source
from fewstep.errors import UserError

__all__ = ["RunFolder", "Source", "open_source"]


@dataclass(frozen=True)
class RunFolder:
    """``runs/<name>/`` and the places in it."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def metrics(self) -> Path:
        """One row of JSON for every logged value."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        """Grids of samples over time."""
        return self.path / "samples"

    @property
    def workers(self) -> Path:
        """What each worker of a run on Ray said."""
        return self.path / "workers"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def evaluation(self) -> Path:
        """Measured quality."""
        return self.path / "evaluation.json"

    @property
    def environment(self) -> Path:
        """Versions of the programs and the machine that ran it."""
        return self.path / "environment.json"

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """The folder of a new run. Raises UserError if it already holds a run, or something else."""
        run = cls(path)
        if run.holds_a_run():
            newest = newest_complete(run.checkpoints)
            state = f"its newest complete checkpoint is {newest.name}" if newest else "without a complete checkpoint"
            raise UserError(
                f"{path} already holds a run ({state}); go on with it by 'fewstep train --resume {path}', take another "
                "folder (name=... or --run) or remove this one"
            )
        if path.exists() and (not path.is_dir() or any(not run._is_left(place) for place in path.iterdir())):
            raise UserError(f"{path} exists and is not the folder of a run; take another (name=... or --run)")
        path.mkdir(parents=True, exist_ok=True)
        return run

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        """The folder of a run that was begun. Raises UserError if there is none."""
        run = cls(path)
        if not run.holds_a_run():
            raise UserError(f"{path} holds no run that could be resumed; start one by 'fewstep train <recipe>'")
        return run

    def holds_a_run(self) -> bool:
        """Whether somebody began a run here."""
        return any(place.exists() for place in (self.recipe, self.metrics, self.checkpoints))

    def _is_left(self, place: Path) -> bool:
        """Whether a process that ended before its run had begun leaves this."""
        return place.name.startswith(_LEFT) or place == self.workers

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Inside, nobody else can lock the run; the lock ends with the process, however it ends.

        Raises UserError that says which process trains into the folder.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK).open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(
                    f"{self.path}: another process trains into this run ({file.read().strip()}); "
                    "wait for it, stop it, or take another folder (name=... or --run)"
                ) from None
            file.truncate(0)
            file.write(
                json.dumps(
                    {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
                )
            )
            file.flush()
            yield


SEEN = ".seen-"
"""Before the name of a file that one process writes, and others look for."""
_LOCK = ".lock"
_LEFT = (_LOCK, SEEN, PARTIAL)
"""What a process leaves that is killed before its run has begun."""

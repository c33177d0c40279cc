"""A Ray cluster of one machine that runs before and after the runs that join it, until it is killed."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.launchers import PYTHON
from tests.faults.sessions import MOST_S, QUICK, ROOT, TOKEN, living


class Head:
    """Its processes, found by a token. folder: Ray's own, whose name must be short."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.token, self.folder, self._session = secrets.token_hex(8), folder, 0
        self._environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **QUICK, **environment}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """As ``ray start --head`` does, which returns when it runs."""
        command = [PYTHON, "-m", "ray.scripts.scripts", "start", "--head", "--node-ip-address", "127.0.0.1"]
        command += ["--port", str(self.port), "--num-cpus", "4", "--temp-dir", str(self.folder)]
        command += ["--include-dashboard", "false", "--disable-usage-stats"]
        log = self.folder / "start.txt"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**self._environment, TOKEN: self.token},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._session = process.pid
        assert process.wait(MOST_S) == 0, log.read_text()

    def kill(self, *names: str) -> None:
        """Those of its processes; all of them if none is named."""
        for pid in living(self.token, self._session):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if not names or name in names:
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills what is left of it, until nothing is."""
        until = time.monotonic() + MOST_S
        while living(self.token, self._session):
            assert time.monotonic() < until
            self.kill()
            time.sleep(0.1)


@contextmanager
def ray_head(**environment: str) -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="head-"))
    head = Head(folder, environment)
    try:
        head.start()
        yield head
    finally:
        head.end()
        shutil.rmtree(folder, ignore_errors=True)

"""Processes that do the tasks of a bench: one for each device, which takes one task after the other, so that imports,
the start of CUDA and compiled code are paid for once."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

DONE, STOPPED, FAILED = "done", "stopped", "FAILED"
GRACE_S = 60.0
"""What a process has to stop in, before it is ended."""
_TAIL = 3000


@dataclass(frozen=True)
class Task:
    """told: what is so afterwards. do: can be pickled; returns False if it was stopped, by SIGINT, before its end.
    needs: files that must be there first. done: a file that is there afterwards. log: where it prints to."""

    told: str
    do: Callable[[], bool]
    needs: tuple[Path, ...]
    done: Path
    log: Path


def work(tasks: Sequence[Task], devices: Sequence[str], limit_s: float | None = None) -> bool:
    """Does the tasks, one at a time for each of ``devices``, the first that is ready before others. True if all are
    done.

    After ``limit_s`` seconds, or Ctrl-C, the running tasks are asked to stop; the same call later goes on. A task that
    fails is told of, with the end of its log; what needs it is left.
    """
    waiting, missing = list(tasks), len(tasks)
    end = time.monotonic() + limit_s if limit_s else float("inf")
    workers = [Worker(device) for device in devices] if tasks else []
    try:
        while True:
            for worker in workers:
                ready = (task for task in waiting if all(path.exists() for path in task.needs))
                if worker.task is None and (task := next(ready, None)):
                    waiting.remove(task)
                    worker.begin(task)
            busy = {worker.channel: worker for worker in workers if worker.task}
            left_s = None if end == float("inf") else end - time.monotonic()
            if not busy or (left_s is not None and left_s <= 0):
                break
            for channel in connection.wait(list(busy), left_s):
                missing -= busy[channel].end()  # type: ignore[index]
    except KeyboardInterrupt:
        print("Stopping; the same command goes on.", flush=True)
    finally:
        missing -= stop(workers)
    return missing == 0


def stop(workers: Sequence[Worker]) -> int:
    """Ctrl-C for every worker that is busy, once, and an end for what has not stopped after ``GRACE_S``. Returns how
    many of their tasks were done by then."""
    busy, num_done = [worker for worker in workers if worker.task], 0
    for worker in busy:
        worker.interrupt()
    end = time.monotonic() + GRACE_S
    for worker in busy:
        if worker.channel.poll(max(end - time.monotonic(), 0.1)):
            num_done += worker.end()
    for worker in workers:
        worker.close()
    return num_done


class Worker:
    """A process, begun with its first task, on the GPU ``cuda:0``, ``cuda:1``, ... or on the ``cpu``."""

    def __init__(self, device: str):
        self.device = device
        self.task: Task | None = None
        """What it does now."""
        self._start()

    def _start(self) -> None:
        context = get_context("spawn")
        self.channel, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,))
        with seen_alone(self.device):  # imports, which come before ``serve``, may look for GPUs
            self._process.start()
        other.close()

    def begin(self, task: Task) -> None:
        self.task = task
        self.channel.send(task)

    def end(self) -> bool:
        """Whether the task that it was at is done; says so, or why not. A process that died is replaced."""
        task, self.task = self.task, None
        assert task is not None
        try:
            outcome = self.channel.recv()
        except (EOFError, OSError):
            self._process.join()
            outcome = f"{FAILED} (its process ended: {self._process.exitcode})"
            self._start()
        if outcome == DONE:
            task.done.touch()
        print(f"{time.strftime('%H:%M:%S')} {self.device} {task.told}: {outcome}", flush=True)
        if outcome.startswith(FAILED):
            print(f"{task.log}:\n{task.log.read_text(errors='replace')[-_TAIL:] if task.log.exists() else ''}")
        return outcome == DONE

    def interrupt(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGINT)

    def close(self) -> None:
        """A worker that is idle ends by itself when nobody can give it tasks any more."""
        self.channel.close()
        self._process.join(5.0 if self.task is None else 0.1)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def serve(channel: connection.Connection) -> None:
    """The life of a worker. It has a session of its own: signals of the terminal do not reach it. Should the bench be
    killed, it stops as if asked to."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # where a shell's background job ignores it
    threading.Thread(target=stop_with_parent, daemon=True).start()
    try:
        while True:
            channel.send(attempt(channel.recv()))
            release()
    except (EOFError, KeyboardInterrupt):
        return


def stop_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)


def attempt(task: Task) -> str:
    """How the task ended. What it prints goes to its log, from here on."""
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("ab") as log:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(log.fileno(), number)
    try:
        return DONE if task.do() else STOPPED
    except KeyboardInterrupt:
        return STOPPED
    except Exception:
        traceback.print_exc()
        return FAILED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def release() -> None:
    """Gives back what the last task held. What was compiled for it is kept, for networks of the same form."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextmanager
def seen_alone(device: str) -> Iterator[None]:
    """Processes that are begun inside have no GPU but ``device``, counted among those that are visible here."""
    name = "CUDA_VISIBLE_DEVICES"
    here = os.environ.get(name)
    number = device.removeprefix("cuda:")
    os.environ[name] = "" if device == "cpu" else here.split(",")[int(number)] if here else number
    try:
        yield
    finally:
        del os.environ[name]
        if here is not None:
            os.environ[name] = here


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", nargs="+", metavar="DEVICE", help="cuda:0 cuda:1 ..., or cpu; all GPUs if left out"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes for each device; distorts times alone")


def devices_of(options: argparse.Namespace) -> list[str]:
    """A device for every worker."""
    import torch

    devices = options.devices or [f"cuda:{number}" for number in range(torch.cuda.device_count())] or ["cpu"]
    return devices * options.jobs

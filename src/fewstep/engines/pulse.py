"""Signs of life that ranks give while their own code waits for something, and listen to.

A collective tells that somebody is missing when its time is up, and that is long, since a rank may have work of its
own, such as a checkpoint to write. A process that was stopped, or whose machine is gone, is found by its silence long
before; on GPUs it is named, where NCCL's watchdog would end the others without a word.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

BEAT_S = 1.0
SILENCE_S = 15.0
"""How long a rank may be silent. Only what keeps the interpreter's lock as long looks like silence and is none."""
OVER = "over"
"""What a rank says last: from now on it may be silent."""


@contextmanager
def heartbeat(
    store: Any, rank: int, world: int, silent: Callable[[int], None], launcher: int | None = None
) -> Iterator[None]:
    """Inside, this rank gives signs of life. Where the next rank has given none for ``SILENCE_S``, ``silent`` is called
    with its number, in a thread.

    store: a ``torch.distributed.Store`` that all ranks share. launcher: the process that ends all ranks where one
    fails. When it is gone, this one is asked to stop by SIGTERM: else nobody would ever end it.
    """
    over = threading.Event()
    thread = threading.Thread(
        target=_live, args=(store.clone(), rank, (rank + 1) % world, silent, launcher, over), daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * BEAT_S)


def _live(
    store: dist.Store, rank: int, other: int, silent: Callable[[int], None], launcher: int | None, over: threading.Event
) -> None:
    beats, heard, heard_at, kept = 0, b"", time.monotonic(), True
    while not over.wait(BEAT_S):
        if launcher not in (None, os.getppid()):
            os.kill(os.getpid(), signal.SIGTERM)
            return
        if not kept:
            continue
        try:
            store.set(f"pulse/{rank}", str(beats := beats + 1))
            now = store.get(f"pulse/{other}") if store.check([f"pulse/{other}"]) else heard
        except dist.DistError:  # whoever keeps the store is gone, the launcher perhaps; nothing can be heard any more
            kept = False
            continue
        if now != heard:
            heard, heard_at = now, time.monotonic()
        elif heard not in (b"", OVER.encode()) and time.monotonic() - heard_at > SILENCE_S:
            silent(other)
            return
    with suppress(dist.DistError):
        store.set(f"pulse/{rank}", OVER)


def tell_launcher(error: BaseException) -> None:
    """Hands the last words to torchrun, which repeats those of the first rank that failed when all have ended."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None:
        return
    words = "\n  ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    about = {"py_callstack": words, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": words, "extraInfo": about}}))

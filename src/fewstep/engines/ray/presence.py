"""Whether Ray itself is still there: its head, and its daemon on the driver's machine.

Without its head Ray lets everything go on for a while, and then ends this process without a word of the run. So a
thread looks whether both still answer.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fewstep.engines.mesh import RankError
from fewstep.engines.ray.cluster import imported

LOOK_S = 1.0
LOST_LOOKS = 5
"""How often in a row something does not answer before it is gone; Ray itself waits for 20 s."""
Place = tuple[str, int]


@contextmanager
def present(seats: Sequence[Any], advice: str) -> Iterator[None]:
    """Inside, Ray runs. Where it is gone, this process ends its workers (``seats``), says so, and ends too: leaving Ray
    in good order would take until Ray itself gives up. advice: what is said of the run."""
    address, places = places_of_ray()
    over = threading.Event()
    leave = partial(_leave, seats, address, advice)
    thread = threading.Thread(target=_look, args=(places, leave, over), daemon=True)
    thread.start()
    try:
        yield
    except RankError:  # a worker is missed, perhaps since Ray is gone
        if gone := [name for name, place in places.items() if not answers(place)]:
            leave(gone)
        raise
    finally:
        over.set()
        thread.join(2 * LOOK_S)


def places_of_ray() -> tuple[str, dict[str, Place]]:
    """The address of the head, and where it and the daemon of this machine listen."""
    ray = imported()
    context = ray.get_runtime_context()
    address, node = context.gcs_address, context.get_node_id()
    host, _, port = address.rpartition(":")
    mine = next(found for found in ray.nodes() if found["NodeID"] == node)
    daemon = (mine["NodeManagerAddress"], mine["NodeManagerPort"])
    return address, {"its head": (host, int(port)), "its daemon on this machine": daemon}


def answers(place: Place) -> bool:
    """Whether somebody listens there."""
    try:
        socket.create_connection(place, LOOK_S).close()
    except OSError:
        return False
    return True


def _look(places: dict[str, Place], leave: Callable[[list[str]], None], over: threading.Event) -> None:
    silent = dict.fromkeys(places, 0)
    while not over.wait(LOOK_S):
        silent = {name: 0 if answers(place) else silent[name] + 1 for name, place in places.items()}
        if gone := [name for name, looks in silent.items() if looks >= LOST_LOOKS]:
            leave(gone)


def _leave(seats: Sequence[Any], address: str, advice: str, gone: Sequence[str]) -> None:
    for seat in seats:
        seat.kill()
    words = f"Ray at {address} is gone: {' and '.join(gone)} no longer answers"
    sys.stderr.write(f"\nerror: {words}\nComplete checkpoints are kept. {advice}\n")
    sys.stderr.flush()
    os._exit(1)

"""Ray itself: started for one run, or joined; and room for the workers on it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fewstep.engines.ray.placement import Group, RaySection
from fewstep.errors import UserError

ROOM_S = 60.0
"""How long the run waits until the cluster has room for its workers."""
Bundle = dict[str, float]


@contextmanager
def cluster(section: RaySection, bundles: Sequence[Bundle]) -> Iterator[Any]:
    """Inside, Ray runs and has set ``bundles`` aside, which it yields as a placement group.

    A Ray that was started for the run ends with it, and every process of it; one that this program uses already stays.
    Raises UserError where Ray is not installed, cannot be reached, or has no room.
    """
    ray = imported()
    begun = not ray.is_initialized()
    if begun:
        start(section, bundles)
    placed = None
    try:
        placed = _set_aside(ray, bundles)
        yield placed
    finally:
        with suppress(Exception):
            if placed is not None:
                ray.util.remove_placement_group(placed)
            if begun:
                ray.shutdown()


def imported() -> Any:
    """The package, whose import takes a second."""
    try:
        import ray
    except ImportError:
        raise UserError(
            "engine.name = ray: the package 'ray' is not installed; pip install 'fewstep[ray]', or write "
            "engine.name=process"
        ) from None
    return ray


def bundles_of(section: RaySection, groups: Sequence[Group], gpus: bool) -> tuple[list[Bundle], dict[str, list[int]]]:
    """What is to be set aside, and for each group the bundles of its workers: one for each worker, or with
    ``colocated`` one for a worker of each group."""
    found: list[Bundle] = []
    places: dict[str, list[int]] = {}
    for group in groups:
        first = 0 if section.layout == "colocated" else len(found)
        places[group.name] = list(range(first, first + group.size))
        found += [{"CPU": 0.0} for _ in range(first + group.size - len(found))]
        for place in places[group.name]:
            found[place]["CPU"] += group.section.cpus
            if gpus:
                found[place]["GPU"] = 1.0
    return found, places


def start(section: RaySection, bundles: Sequence[Bundle]) -> None:
    """Starts Ray on this machine, or joins the cluster that the section names."""
    ray = imported()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings: dict[str, Any] = {"address": section.address or "local", "log_to_driver": False, "logging_level": "ERROR"}
    if section.address is None:
        cpus = max(os.cpu_count() or 1, -int(-sum(bundle["CPU"] for bundle in bundles) // 1))
        settings |= {"include_dashboard": False, "num_cpus": cpus}
    found = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, sys.path)
    )  # workers find the modules that this program finds
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**settings)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"engine.address = {section.address}: Ray cannot be reached: {error}; start it there by `ray start "
            "--head`, or leave engine.address out"
        ) from error
    finally:
        os.environ.pop("PYTHONPATH") if found is None else os.environ.update(PYTHONPATH=found)
        if main:
            signal.signal(signal.SIGTERM, handler)  # Ray takes it away


def _set_aside(ray: Any, bundles: Sequence[Bundle]) -> Any:
    total = {kind: sum(bundle.get(kind, 0.0) for bundle in bundles) for kind in ("CPU", "GPU")}
    has = ray.cluster_resources()
    lacking = [
        f"{needed:g} {kind}s (it has {has.get(kind, 0):g})"
        for kind, needed in total.items()
        if needed > has.get(kind, 0)
    ]
    if lacking:
        raise UserError(f"engine.groups: the workers need {' and '.join(lacking)} of Ray; write smaller groups")
    placed = ray.util.placement_group(list(bundles), strategy="PACK")
    if not placed.wait(ROOM_S):
        raise UserError(
            f"engine.groups: Ray has no room for {len(bundles)} workers with {bundles[0]} each: other jobs hold it, or "
            "no machine has as much; wait for them, or write smaller groups"
        )
    return placed

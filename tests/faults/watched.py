"""The methods of the runs that are hurt: they note which items they saw, and fail where they are told to."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.sft import SFT, SFTSection
from fewstep.models.api import FlowModel
from fewstep.records import Batch, Rollout, Scores
from fewstep.rng import Draw
from fewstep.shapes import PerSample


class WatchedSection(SFTSection):
    """Flow matching on data, watched."""

    name: Literal["watched"] = "watched"  # type: ignore[assignment]


class Watched(SFT):
    """What the environment says:

    FAULT_ROWS: a folder; every process appends to a file of its own which items its rows of an iteration were.
    FAULT_PACE: seconds that an iteration takes at least. FAULT: ``raise`` or ``hang``, then the rank, then the
    iteration (``raise:1:7``).
    """

    Section = WatchedSection

    def student_losses(self, student: FlowModel, batch: Batch, draw: Draw) -> dict[str, PerSample]:
        see(batch, draw)
        return super().student_losses(student, batch, draw)


class WatchedDMD2Section(DMD2Section):
    """Distribution matching distillation, watched."""

    name: Literal["watched_dmd2"] = "watched_dmd2"  # type: ignore[assignment]


class WatchedDMD2(DMD2):
    """The same in every rollout; and it notes when it begins to compare scores."""

    Section = WatchedDMD2Section

    def rollout(self, student: FlowModel, batch: Batch, draw: Draw) -> Rollout:
        see(batch, draw)
        return super().rollout(student, batch, draw)

    def scores(
        self, teacher: FlowModel, critic: FlowModel, discriminator: Any, rollout: Rollout, batch: Batch, draw: Draw
    ) -> Scores:
        note(draw, [], [])
        return super().scores(teacher, critic, discriminator, rollout, batch, draw)


def see(batch: Batch, draw: Draw) -> None:
    """Notes the rows, takes its time, and fails where it is told to."""
    assert batch.x0 is not None
    fail_if_told(draw.iteration)
    time.sleep(float(os.environ.get("FAULT_PACE", "0")))
    items = [hashlib.sha1(row.float().numpy().tobytes()).hexdigest()[:12] for row in batch.x0]
    note(draw, batch.key.tolist(), items)


def note(draw: Draw, keys: list[int], items: list[str]) -> None:
    if folder := os.environ.get("FAULT_ROWS"):
        row = {"iteration": draw.iteration, "phase": draw.phase, "keys": keys, "items": items, "time_s": time.time()}
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def fail_if_told(iteration: int) -> None:
    kind, rank, at = os.environ.get("FAULT", "none:0:0").split(":")
    if iteration != int(at) or int(rank) != (dist.get_rank() if dist.is_initialized() else 0):
        return
    if kind == "raise":
        raise ArithmeticError("the loss went astray")
    if kind == "hang":
        time.sleep(600)


METHODS = (Watched, WatchedDMD2)

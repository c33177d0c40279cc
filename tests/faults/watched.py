"""The method of the runs that are hurt: flow matching that notes which items it saw, and fails where it is told to."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Literal

from fewstep.methods.sft import SFT, SFTSection
from fewstep.models.api import FlowModel
from fewstep.records import Batch
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
        assert batch.x0 is not None
        fail_if_told(draw.iteration)
        time.sleep(float(os.environ.get("FAULT_PACE", "0")))
        if folder := os.environ.get("FAULT_ROWS"):
            items = [hashlib.sha1(row.float().numpy().tobytes()).hexdigest()[:12] for row in batch.x0]
            row = {"iteration": draw.iteration, "keys": batch.key.tolist(), "items": items, "time_s": time.time()}
            with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        return super().student_losses(student, batch, draw)


def fail_if_told(iteration: int) -> None:
    kind, rank, at = os.environ.get("FAULT", "none:0:0").split(":")
    if iteration != int(at) or os.environ.get("RANK", "0") != rank:
        return
    if kind == "raise":
        raise ArithmeticError("the loss went astray")
    if kind == "hang":
        time.sleep(600)


METHODS = (Watched,)

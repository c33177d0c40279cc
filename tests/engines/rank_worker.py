"""What each rank of ``test_ranks.py`` runs: ``python -m tests.engines.rank_worker FOLDER JOB ...``, started as torchrun
starts it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fewstep.checkpoint.save import CheckpointSection, save_checkpoint, take_part
from fewstep.engines.mesh import Mesh, Ranks, join
from fewstep.engines.process import ProcessEngine
from fewstep.methods.api import Method
from fewstep.methods.consistency import Consistency, ConsistencySection
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.gan import GANSection
from fewstep.methods.sid import SiD, SiDSection
from fewstep.methods.teacher_forcing import TeacherForcing, TeacherForcingSection
from fewstep.rollout.few_step import FewStep
from fewstep.rollout.self_forcing import SelfForcing
from tests.engines.worlds import LADDER, SHAPE, dmd2, engine, sft, streams

DOUBLE, CPU = torch.float64, torch.device("cpu")
ITERATIONS, BATCH, CLIP = 3, 4, (3, *SHAPE[1:])
TIMEOUT_S = 20.0
KEEP = CheckpointSection(every=1, keep_last=9)


def self_forcing() -> Method:
    """Student, teacher and critic see blocks of one frame."""
    made: Any = DMD2(
        DMD2Section(critic_updates=2, guidance_scale=3.0), SelfForcing(LADDER, "renoise", CLIP, dtype=DOUBLE)
    )
    made.needs_causal = True
    return made


METHODS: dict[str, Callable[[], Method]] = {
    "sft": sft,
    "dmd2_fresh_gan": lambda: dmd2(DOUBLE),
    "dmd2_shared": lambda: dmd2(DOUBLE, gan=None, critic_batches="shared"),
    "sid_gan_on_teacher": lambda: SiD(
        SiDSection(critic_updates=1, gan=GANSection(features="teacher", student_weight=0.3)),
        FewStep(LADDER, "renoise", SHAPE, dtype=DOUBLE),
    ),
    "teacher_forcing": lambda: TeacherForcing(TeacherForcingSection(history_sigma_max=0.4)),
    "consistency": lambda: Consistency(ConsistencySection(nodes=7)),
    "self_forcing": self_forcing,
    "streams": lambda: streams(dtype=DOUBLE),
}
"""Methods at tiny size, by name."""


def made(name: str, mesh: Mesh | None = None) -> ProcessEngine:
    """Micro-batches of one row on ranks, whole batches in one process."""
    return engine(
        METHODS[name](), dtype=DOUBLE, batch=BATCH, mesh=mesh, micro_batch=1 if mesh and name == "sft" else None
    )


def main() -> None:
    torch.set_num_threads(1)
    folder, jobs = Path(sys.argv[1]), sys.argv[2:]
    with join(Ranks.launched(), CPU, timeout_s=TIMEOUT_S) as mesh:
        for job in jobs:
            t = time.time()
            running = made(job, mesh)
            rows = [running.run(i) for i in range(ITERATIONS)]
            state = running.state()
            if mesh is None or mesh.ranks.first:
                save_checkpoint(folder / job, ITERATIONS, state, {}, KEEP)
                (folder / job / "rows.json").write_text(json.dumps([{k: float(v) for k, v in r.items()} for r in rows]))
            else:
                take_part(state)
            print(job, time.time() - t, flush=True)


if __name__ == "__main__":
    main()

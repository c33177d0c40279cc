"""Two ranks that look at each other: ``python -m tests.engines.unwell FOLDER``, for ``test_health.py``. In turn all is
well, rank 1 has another recipe, does not see the folder, needs more memory than there is, and has a clock that is fast.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch

from fewstep.engines import health
from fewstep.engines.health import Needs, examine
from fewstep.engines.mesh import Ranks, join


def main() -> None:
    ranks, folder = Ranks.launched(), Path(sys.argv[1])
    second = ranks.rank == 1
    well = Needs({"the recipe": "a"}, 2**20, folder / "run")
    cases = {
        "well": well,
        "recipe": replace(well, same={"the recipe": "b" if second else "a"}),
        "folder": replace(well, folder=folder / "elsewhere") if second else well,
        "memory": replace(well, memory=2**60),
        "clock": well,
    }
    with join(ranks, torch.device("cpu"), timeout_s=20.0) as mesh:
        assert mesh is not None
        for name, needs in cases.items():
            if name == "clock" and second:  # a real one cannot be put forward for one process alone
                health.time = SimpleNamespace(
                    time=lambda: time.time() + 7.0, monotonic=time.monotonic, sleep=time.sleep
                )  # type: ignore[assignment]
            began = time.monotonic()
            try:
                found = examine(mesh, torch.device("cpu"), needs)
                said = "\n".join([found.line, *found.warnings])
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            (folder / f"{name}-{ranks.rank}.txt").write_text(f"{time.monotonic() - began}\n{said}")


if __name__ == "__main__":
    main()

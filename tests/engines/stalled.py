"""Two ranks, the second of which stalls: ``python -m tests.engines.stalled``, for ``test_launched.py``."""

from __future__ import annotations

import time

import torch

from fewstep.engines.mesh import Ranks, join

if __name__ == "__main__":
    ranks = Ranks.launched()
    with join(ranks, torch.device("cpu"), timeout_s=2.0) as mesh:
        assert mesh is not None
        mesh.any(False)
        if ranks.rank == 1:
            time.sleep(120)
        mesh.any(False)

"""Two ranks, the second of which stalls: ``python -m tests.engines.stalled [stopped]``, for ``test_launched.py``."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from fewstep.engines import pulse
from fewstep.engines.mesh import Ranks, join

if __name__ == "__main__":
    stopped = "stopped" in sys.argv
    pulse.SILENCE_S = 5.0
    ranks = Ranks.launched()
    with join(ranks, torch.device("cpu"), timeout_s=300.0 if stopped else 2.0, advice="Start again.") as mesh:
        assert mesh is not None
        mesh.any(False)
        if ranks.rank == 1:
            time.sleep(3.0)
            if stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(120)
        mesh.any(False)

"""Ray itself: whether it still answers, and what is said where it does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from fewstep.engines.ray.presence import answers
from tests.engines.test_ranks import ROOT

LOOKING = """
import functools, sys, threading
from fewstep.engines.ray import presence
presence.LOOK_S = 0.05
heard, silent = (("127.0.0.1", int(port)) for port in sys.argv[1:])
leave = functools.partial(presence._leave, [], "here:6379", "Go on.")
presence._look({"its head": silent, "its daemon on this machine": heard}, leave, threading.Event())
"""


def test_a_process_whose_ray_has_lost_its_head_says_so_and_ends():
    with socket.create_server(("127.0.0.1", 0)) as heard:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            silent = closed.getsockname()
            assert answers(silent)
        assert not answers(silent)
        ended = subprocess.run(
            [sys.executable, "-c", LOOKING, str(heard.getsockname()[1]), str(silent[1])],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 1
    assert "error: Ray at here:6379 is gone: its head no longer answers\n" in ended.stderr
    assert ended.stderr.endswith("Complete checkpoints are kept. Go on.\n")

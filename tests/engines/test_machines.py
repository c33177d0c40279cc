"""Two machines, played by two agents of torchrun in different folders, which meet at one address."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fewstep.cli.shipped import shipped_recipes
from tests.engines.test_ranks import ROOT
from tests.recipes.tiny_runs import World, tensors, values

SFT = "wan_nano/sft"
EXACT = ("data.batch=4", "engine.precision=float64", "validation=null")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World.make(tmp_path / "world")


def machines(world: World, place: str) -> list[tuple[int, str]]:
    """Exit status and output of an agent in a folder of its own, for each of two; the run goes to ``place``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    train = ["train", str(shipped_recipes()[SFT]), *world.overrides(SFT, 3), *EXACT, "--run", place]
    agents = []
    for name in ("first", "second"):
        folder = world.path / name
        folder.mkdir()
        agents.append(
            subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *meet, "-m", "--", "fewstep", *train],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        said = [agent.communicate(timeout=180)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [(agent.returncode, text) for agent, text in zip(agents, said, strict=True)]


@pytest.mark.thorough
@pytest.mark.usefixtures("unchecked_shapes")
def test_two_machines_train_what_one_process_trains(world: World):
    """Invariant 51."""
    ended = machines(world, str(world.path / "two"))
    assert [status for status, _ in ended] == [0, 0], ended
    assert any("2 ranks on 1 machine: same programs" in text for _, text in ended)
    one = world.train(SFT, *EXACT, into="one")
    found, expected = tensors(world.run("two"), 3), tensors(one, 3)
    assert found.keys() == expected.keys()
    for group, named in expected.items():
        for name, tensor in named.items():
            torch.testing.assert_close(found[group][name], tensor, rtol=1e-9, atol=1e-9, msg=f"{group}: {name}")
    assert values(world.run("two")).keys() == values(one).keys()


@pytest.mark.faults
def test_machines_that_do_not_share_the_run_folder_are_refused(world: World):
    """A relative path means another folder on each."""
    ended = machines(world, "runs/two")
    assert all(status for status, _ in ended)
    said = "".join(text for _, text in ended)
    assert "runs/two: the run needs a shared folder, and rank 1 of 2 on" in said, said

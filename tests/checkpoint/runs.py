"""Checkpoints and runs of real tiny networks, and the processes that are killed while they write."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewstep.checkpoint.background import Saver
from fewstep.checkpoint.meta import Meta
from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.save import CheckpointSection, load_checkpoint, newest_complete, save_checkpoint
from fewstep.models.wan.sizes import WanSection
from fewstep.rollout.few_step import SamplingSection
from tests.models.tiny import LABELS, tiny_section, tiny_wan

KEEP = CheckpointSection(every=1, keep_last=2)
CLASSES = ("shirt", "shoe", "bag", "coat", "hat")
SECTION = tiny_section(LABELS)

PLAIN = {
    "first_block_steps": None,
    "history_sigma": 0.0,
    "given_frames": 0,
    "stop": "shared",
    "rolling_blocks": 1,
    "stream_chunks": 1,
    "overlap_frames": 0,
}
"""What a sampler of whole clips says of blocks."""


def tiny_meta(iteration: int = 3, section: WanSection = SECTION, **changes: Any) -> Meta:
    values: dict[str, Any] = {
        "iteration": iteration,
        "recipe": {"name": "tiny", "iterations": 6, "lr": 1e-3},
        "models": {"student": section.model_dump(mode="json"), "critic": section.model_dump(mode="json")},
        "sampling": SamplingSection(steps=4, shift=5.0, solver="renoise"),
        "codec": {"name": "identity", "mean": [0.1, 0.0, -0.2, 0.3], "std": [0.5, 0.6, 0.7, 0.9]},
        "stage": "student",
        "counters": {"student": iteration, "critic": 5 * iteration},
        "time_s": 1.25,
        "classes": CLASSES,
        "latent_shape": (1, 4, 8, 6),
        "versions": {"fewstep": "0.1.0", "torch": torch.__version__, "python": "3.11"},
    }
    return Meta.model_validate(values | changes)


@functools.cache
def weights(section: WanSection, seed: int) -> dict[str, Tensor]:
    return tiny_wan(section, seed=seed).state_dict()


def states(section: WanSection = SECTION) -> dict[str, dict[str, Tensor]]:
    """Groups as an engine writes them; student, average and critic all differ."""
    named = {name: dict(weights(section, seed)) for seed, name in enumerate(("student", "ema", "critic"))}
    return named | {"student.optimizer": {"updates": torch.tensor(3), "exp_avg/head.modulation": torch.randn(1, 2, 48)}}


def write_run(path: Path, *iterations: int, meta: Meta | None = None, groups: dict | None = None) -> RunFolder:
    """A run with a checkpoint at each of the iterations."""
    run = RunFolder.create(path)
    run.recipe.write_text("name: tiny\n")
    for iteration in iterations:
        described = (meta or tiny_meta()).model_copy(update={"iteration": iteration})
        save_checkpoint(run.checkpoints, iteration, groups or states(), described.to_json(), KEEP)
    return run


def kills_in_a_process(folder: Path) -> list[list[str]]:
    """What ``kill`` prints, from a process of its own: it forks, which a process that runs tests should not."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.checkpoint.runs", str(folder)]
    ran = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return [line.split() for line in ran.stdout.splitlines()]


def save_full_of(value: int, checkpoints: Path, iteration: int, beside: bool = False) -> None:
    full = {name: torch.full((50, 100), value) for name in ("weight", "bias")}
    groups = {"student": full, "ema": full, "critic": full}
    with Saver() as saver:
        saver.save(checkpoints, iteration, groups, {}, CheckpointSection(every=1, keep_last=1, asynchronous=beside))


def report(checkpoints: Path, promised: int) -> int:
    """Prints the iteration that must be there, the one that is found, if it is intact, and what was left behind."""
    newest = newest_complete(checkpoints)
    assert newest is not None
    found = load_checkpoint(newest)
    values = torch.stack([tensor for group in found.groups for tensor in found.tensors(group).values()])
    intact = len(values) == 6 and bool((values == values[0, 0, 0]).all())
    left = [path.name for path in checkpoints.iterdir() if path.name.startswith(".")]
    print(checkpoints.name, promised, found.iteration, int(intact), *left, flush=True)
    return found.iteration


def kill_at_any_moment(checkpoints: Path, kills: int) -> None:
    """Kills one process after another that saves without end, at a random moment of its second or third save."""
    draw, iteration = random.Random(0), 0
    for _ in range(kills):
        reading, writing = os.pipe()
        begin, saver = time.monotonic(), os.fork()
        while saver == 0:
            iteration += 1
            save_full_of(iteration, checkpoints, iteration)
            os.write(writing, iteration.to_bytes(8, "little"))
        os.close(writing)
        promised = os.read(reading, 8)
        assert promised, "the save after a kill failed"
        time.sleep(draw.uniform(0, 2) * (time.monotonic() - begin))
        os.kill(saver, signal.SIGKILL)
        os.waitpid(saver, 0)
        while more := os.read(reading, 8):
            promised = more
        os.close(reading)
        iteration = report(checkpoints, int.from_bytes(promised, "little"))


def kill_before_every_step(checkpoints: Path, forward: int, beside: bool = False) -> None:
    """Kills a save before its first file operation, another one before its second, and so on until one gets through.

    forward: 1 to save the next iteration each time, 0 to replace the same one. beside: in a thread, while training
    would go on.
    """
    iteration = 1
    save_full_of(0, checkpoints, iteration)
    for step in range(1, 200):
        saver = os.fork()
        if saver == 0:
            kill_this_process_before_operation(step)
            save_full_of(step, checkpoints, iteration + forward, beside)
            os._exit(0)
        status = os.waitpid(saver, 0)[1]
        iteration = report(checkpoints, iteration)
        if not os.WIFSIGNALED(status):
            assert status == 0, "the save after a kill failed"
            return
    raise AssertionError("every save after a kill takes more operations than the one before")


def kill_this_process_before_operation(number: int) -> None:
    """Python announces every file operation that it is about to make."""
    operations = itertools.count(1)

    def hook(event: str, _: tuple) -> None:
        if (event == "open" or event.startswith(("os.", "shutil.", "fcntl."))) and next(operations) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill(folder: Path) -> None:
    """Every way of being killed, each in a folder of its own, whose name begins the rows."""
    for name, act in {
        "moment": lambda path: kill_at_any_moment(path, kills=20),
        "step": lambda path: kill_before_every_step(path, forward=1),
        "replace": lambda path: kill_before_every_step(path, forward=0),
        "beside": lambda path: kill_before_every_step(path, forward=1, beside=True),
    }.items():
        act(folder / name)


if __name__ == "__main__":
    kill(Path(sys.argv[1]))

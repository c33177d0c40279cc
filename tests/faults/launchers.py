"""How runs are started that are hurt: one process, ranks of torchrun, workers on Ray; and what each says of a fault."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

BATCH = 4
PYTHON = sys.executable
FEWSTEP = (PYTHON, "-m", "fewstep")


@dataclass(frozen=True)
class Task:
    """What a run trains. recipe: a shipped one. rows: those of an iteration, each of which is one item of the data."""

    recipe: str
    settings: tuple[str, ...]
    rows: int


SFT = Task("wan_nano/sft", ("plugins=[tests.faults.watched]", "method.name=watched"), BATCH)
DMD2 = Task(
    "wan_nano/dmd2",
    ("plugins=[tests.faults.watched]", "method.name=watched_dmd2", "student.schedule={}", "critic.schedule={}"),
    2 * BATCH,
)


@dataclass(frozen=True)
class Launcher:
    """How a run is started. world: the processes that train. prefix: the command, up to the word ``fewstep`` or what
    stands for it. engine: the section of the recipe. workers: on Ray, the names of the processes that train."""

    name: str
    world: int
    prefix: tuple[str, ...] = FEWSTEP
    engine: str = "name: process"
    task: Task = SFT
    workers: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """In place of the whole section, whatever the run had before."""
        return (f"engine={{{self.engine}, precision: float64, timeout_s: 15}}",)

    def killed(self, rank: int) -> str:
        """What is said, as a pattern, of a process that was killed."""
        if self.workers:
            name = self.workers[rank]
            return rf"worker {name}( \(process \d+ on \S+\) died| died while it started): killed, or crashed"
        return f"rank {rank} no longer answers: killed, or stalled"

    def stalled(self, rank: int) -> str:
        """Of one that was stopped, or does not come to an end: found by its time or its silence, what is over first."""
        ranks = rf"rank {rank} (no longer answers|gives no sign of life)"
        if not self.workers:
            return ranks
        name = re.escape(self.workers[rank])
        return rf"{ranks}|worker {name} \(process \d+ on \S+\)(: no answer for| has been at phase)"

    def raised(self, rank: int) -> str:
        """Of one that raised an error."""
        words = "ArithmeticError: the loss went astray"
        if self.workers:
            return rf"worker {self.workers[rank]} \(process \d+ on \S+\) failed: {words}"
        return rf"stops: rank {rank} of {self.world} on \S+ failed: {words}" if self.world > 1 else words

    @property
    def slug(self) -> str:
        """For the names of files."""
        return re.sub(r"\W+", "-", self.name)

    def __str__(self) -> str:
        return self.name


def on_ray(layout: str, address: str = "") -> Launcher:
    """A Ray that is started for the run, or that is joined."""
    sizes = {"all": 2} if layout == "shared" else {"critic": 1, "student": 1}
    groups = ", ".join(f"{name}: {{workers: {size}}}" for name, size in sizes.items())
    engine = f"name: ray, layout: {layout}, groups: {{{groups}}}" + (f", address: '{address}'" if address else "")
    workers = tuple(f"{name}/{rank}" for name, size in sizes.items() for rank in range(size))
    return Launcher(
        f"Ray, {layout}" + ", joined" * bool(address), len(workers), engine=engine, task=DMD2, workers=workers
    )


ONE = Launcher("one process", 1)
ONE_DMD2 = Launcher("one process, DMD2", 1, task=DMD2)
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "fewstep")
TORCHRUN = Launcher("torchrun, 2 ranks", 2, (PYTHON, *TWO_RANKS))
SHARED = on_ray("shared")
SPLIT = on_ray("split")
COLOCATED = on_ray("colocated")

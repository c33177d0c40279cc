"""Shipped recipes at tiny size, uncompiled, on a synthetic folder of the form of Fashion-MNIST."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.save import load_checkpoint
from fewstep.cli.shipped import shipped_recipes
from fewstep.config import Recipe, load_recipe
from fewstep.observe.sinks import read_rows
from fewstep.prepare import prepare
from fewstep.train import train

MODEL = {"dim": 48, "layers": 2, "heads": 3, "ffn_dim": 80, "text_dim": 20, "freq_dim": 32}
SIZES = (
    "engine.compile=null",
    "data.batch=5",
    "sampling.steps=3",
    "checkpoint.every=3",
    "observe.every=2",
    "observe.tensorboard=false",
    "validation.every=3",
    "validation.samples=65",
    "validation.steps=[3]",
    "validation.extractor.updates=2",
)


def write_clothes(folder: Path) -> Path:
    """67 training and 66 test images with labels, as idx files."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(3)
    for prefix, num in (("train", 67), ("t10k", 66)):
        images = generator.integers(0, 256, (num, 28, 28), dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", (np.arange(num) % 10).astype(np.uint8))):
            header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / f"{prefix}-{kind}-ubyte").write_bytes(header + array.tobytes())
    return folder


@dataclass(frozen=True)
class World:
    """A folder with data, caches and runs."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> World:
        write_clothes(path / "data")
        return cls(path)

    def overrides(self, name: str, iterations: int) -> list[str]:
        """What makes a shipped recipe tiny; the runs that it starts from are those of this world."""
        recipe = load_recipe(shipped_recipes()[name])
        places = [f"data.path={self.path / 'data'}", f"validation.extractor.cache={self.path / 'cache'}"]
        if recipe.student.init == "random":
            places += [f"student.model.{key}={value}" for key, value in MODEL.items()]
        if recipe.method.name == "ode_init":
            places += ["method.nodes=6", "method.trajectories.count=8"]
        if getattr(recipe.method, "critic_warmup_updates", 0):
            places += ["method.critic_warmup_updates=2"]
        starts = [f"{role}.init={self.path / origin}" for role, origin in origins(name).items()]
        return [*SIZES, f"iterations={iterations}", *places, *starts]

    def recipe(self, name: str, *more: str, iterations: int = 3) -> Recipe:
        return load_recipe(shipped_recipes()[name], [*self.overrides(name, iterations), *more])

    def run(self, name: str) -> RunFolder:
        return RunFolder(self.path / name)

    def trained(self, name: str) -> RunFolder:
        """The run of a recipe, made when it is first asked for, after those that it starts from: tests that are spread
        over processes come in any order."""
        if not self.run(name).recipe.exists():
            for origin in origins(name).values():
                self.trained(origin)
            self.train(name)
        return self.run(name)

    def train(self, name: str, *more: str, iterations: int = 3, into: str = "", resume: bool = False) -> RunFolder:
        """Trains the recipe, as the command line does."""
        place = self.path / (into or name)
        run = RunFolder.existing(place) if resume else RunFolder.create(place)
        assert train(prepare(self.recipe(name, *more, iterations=iterations)), run, resume=resume)
        return run


def origins(name: str) -> dict[str, str]:
    """For every role of a shipped recipe that starts from a run, the shipped recipe that makes this run."""
    recipes = {load_recipe(path).name: other for other, path in shipped_recipes().items()}
    recipe = load_recipe(shipped_recipes()[name])
    sections = {role: getattr(recipe, role) for role in ("student", "teacher", "critic")}
    starts = {role: section.init for role, section in sections.items() if section is not None}
    return {role: recipes[init.removeprefix("runs/")] for role, init in starts.items() if init.startswith("runs/")}


def in_order() -> list[str]:
    """The shipped recipes of pixels, each after those that it starts from."""
    found: list[str] = []

    def add(name: str) -> None:
        for origin in origins(name).values():
            add(origin)
        if name not in found:
            found.append(name)

    for name, path in sorted(shipped_recipes().items()):
        if load_recipe(path).data.name != "latents":
            add(name)
    return found


def tensors(run: RunFolder, iteration: int) -> dict[str, dict[str, Tensor]]:
    """Every tensor of a checkpoint, by group."""
    checkpoint = load_checkpoint(run.checkpoints / f"iteration-{iteration:06d}")
    return {group: checkpoint.tensors(group) for group in checkpoint.groups}


def values(run: RunFolder) -> dict[tuple[str, int], dict[str, float]]:
    """The rows of metrics that hold, without what clocks and the memory of the process say."""
    apart = ("samples_per_s", "mfu", "phase/", "memory/")
    return {
        (row.kind, row.iteration): {
            name: value
            for name, value in row.values.items()
            if not name.startswith(apart) and not name.endswith(("_mib", "/waiting_s"))
        }
        for row in read_rows(run.metrics)
        if row.values
    }

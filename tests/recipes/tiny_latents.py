"""The full-size recipes at tiny size: a diffusers folder of a tiny Wan, latents and texts that are drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.tensor_file import write_tensors
from fewstep.cli.shipped import shipped_recipes
from fewstep.config import Recipe, load_recipe
from fewstep.models.wan.state_dict_adapter import config_to_diffusers, to_diffusers
from fewstep.prepare import prepare
from fewstep.train import train
from tests.data.latent_files import write_folder
from tests.models.tiny import TEXT, tiny_section, tiny_wan

FAMILY = "wan_1_3b_video"
BASE = "models/Wan2.1-T2V-1.3B-Diffusers"
SIZES = (
    "engine.compile=null",
    "engine.micro_batch=2",
    "data.batch=3",
    "checkpoint.every=2",
    "observe.tensorboard=false",
)


def write_wan(folder: Path) -> Path:
    """A published network as diffusers writes it, of 16 channels."""
    network = tiny_wan(tiny_section(TEXT, layers=2, channels=16), seed=4)
    theirs, _ = to_diffusers(network.state_dict())
    place = folder / "transformer"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(config_to_diffusers(network.section)))
    write_tensors(place / "diffusion_pytorch_model.safetensors", theirs)
    return folder


@dataclass(frozen=True)
class LatentWorld:
    """A folder with a published network, latents and runs."""

    path: Path
    rows: dict[str, Tensor]

    @classmethod
    def make(cls, path: Path) -> LatentWorld:
        rows = write_folder(path / "latents")
        write_wan(path / BASE)
        return cls(path, rows)

    def recipe(self, name: str, *more: str) -> Recipe:
        """A shipped recipe at tiny size; what it starts from is in this world."""
        shipped = shipped_recipes()[f"{FAMILY}/{name}"]
        recipe = load_recipe(shipped)
        sections = {role: getattr(recipe, role) for role in ("student", "teacher", "critic")}
        starts = {role: section.init for role, section in sections.items() if section is not None}
        places = [f"{role}.init={self.path / init}" for role, init in starts.items() if "/" in init]
        places += [f"data.path={self.path / 'latents'}", f"data.cache={self.path / 'cache'}"]
        if recipe.method.name == "ode_init":
            places += ["method.trajectories.count=5", "method.trajectories.shard=2"]
        return load_recipe(shipped, [*SIZES, "iterations=2", *places, *more])

    def run(self, name: str) -> RunFolder:
        """The folder of the run of that name."""
        return RunFolder(self.path / "runs" / name)

    def train(self, name: str, *more: str) -> RunFolder:
        """Trains the recipe, as the command line does."""
        recipe = self.recipe(name, *more)
        run = RunFolder.create(self.run(recipe.name).path)
        assert train(prepare(recipe), run)
        return run

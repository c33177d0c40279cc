"""The full-size recipes at tiny size: a diffusers folder of a tiny Wan, latents and texts that are drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.tensor_file import write_tensors
from fewstep.cli.shipped import shipped_recipes
from fewstep.config import Recipe, load_recipe
from fewstep.models.wan.state_dict_adapter import config_to_diffusers, to_diffusers
from fewstep.plan import Plan
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


RUNS = {
    "wan-1.3b-causal": ("teacher_forcing",),
    "wan-1.3b-diffusion-forcing": ("diffusion_forcing",),
    "wan-1.3b-ode-init": ("ode_init",),
    "wan-1.3b-consistency": ("consistency",),
    "wan-1.3b-student": ("self_forcing",),
    "wan-1.3b-student-sid": ("sid",),
    "wan-1.3b-framewise-causal": ("teacher_forcing", "student.causal.block_frames=1"),
    "wan-1.3b-framewise-consistency": ("consistency", "teacher.init=runs/wan-1.3b-framewise-causal"),
    "wan-1.3b-framewise-2step": ("self_forcing_2step",),
}
"""Every run of the chain: its recipe and what is changed there, as docs/causal_video.md says."""


@dataclass(frozen=True)
class LatentWorld:
    """A folder with a published network, latents and runs, which are trained when they are first needed."""

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
        places = [f"{role}.init={self.path / init}" for role, init in self._starts(name, more).items()]
        places += [f"data.path={self.path / 'latents'}", f"data.cache={self.path / 'cache'}"]
        if name == "ode_init":
            places += ["method.trajectories.count=5", "method.trajectories.shard=2"]
        kept = [text for text in more if ".init=runs/" not in text]
        return load_recipe(shipped, [*SIZES, "iterations=2", *places, *kept])

    def plan(self, name: str, *more: str) -> Plan:
        """The plan of a recipe, with the runs that it starts from."""
        for init in self._starts(name, more).values():
            if init.startswith("runs/"):
                self.trained(init.removeprefix("runs/"))
        return prepare(self.recipe(name, *more))

    def trained(self, run: str) -> RunFolder:
        """A run of the chain."""
        name, *more = RUNS[run]
        folder = RunFolder(self.path / "runs" / run)
        return folder if folder.holds_a_run() else self.train(name, f"name={run}", *more)

    def train(self, name: str, *more: str) -> RunFolder:
        """Trains the recipe, as the command line does."""
        plan = self.plan(name, *more)
        run = RunFolder.create(self.path / "runs" / plan.recipe.name)
        assert train(plan, run)
        return run

    def _starts(self, name: str, more: Sequence[str]) -> dict[str, str]:
        """What each role of the recipe starts from, a run or the published network."""
        recipe = load_recipe(shipped_recipes()[f"{FAMILY}/{name}"], [text for text in more if ".init=runs/" in text])
        sections = {role: getattr(recipe, role) for role in ("student", "teacher", "critic")}
        return {role: section.init for role, section in sections.items() if section is not None and "/" in section.init}

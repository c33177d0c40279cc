"""What a recipe names, without its weights and data: networks of all roles, and the shape of a sample.

What is there is asked; of what is not, the name tells: a run that a shipped recipe makes has that recipe's student, a
folder of weights the size that stands in its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fewstep.checkpoint.source import open_source
from fewstep.config import Recipe, method_of
from fewstep.costs.trace import Sized
from fewstep.data.fashion_mnist import FashionMnistSection
from fewstep.data.latents import LatentsSection
from fewstep.data.moving_fashion_mnist import MovingFashionMnistSection
from fewstep.data.sources import open_dataset
from fewstep.engines.roles import CriticSection, StudentSection
from fewstep.errors import UserError
from fewstep.models.blocks import CausalSection
from fewstep.models.families import ModelSection
from fewstep.models.wan.conditioner import EmbeddingSection
from fewstep.models.wan.sizes import SIZES
from fewstep.plan import Plan
from fewstep.rollout.few_step import FewStep, SamplingSection
from fewstep.rollout.sampler import OF_CAUSAL_NETWORKS, Sampler, sampler_of

Shape = tuple[int, int, int, int]
Find = Callable[[str], Recipe | None]
"""The shipped recipe that makes the run of a name, or None."""
PUBLISHED_SHAPE: Shape = (21, 16, 60, 104)
"""Latents of 81 frames of 480 x 832, on which the published sizes were trained."""
PUBLISHED_TEXT = 512
"""Tokens of a text."""


@dataclass(frozen=True)
class Sizes:
    """A recipe as the counts need it. guessed: what was told by names alone, a sentence each."""

    recipe: Recipe
    method: Any
    sampler: Sampler
    roles: dict[str, Sized]
    shape: Shape
    text: int
    guessed: tuple[str, ...] = ()


def sizes_of(
    recipe: Recipe, *, size: str | None = None, shape: Shape | None = None, find: Find = lambda _: None
) -> Sizes:
    """The sizes of a recipe. size: of networks whose weights are not there and whose names do not tell. shape: of a
    sample, (frames, channels, height, width). Raises UserError for what cannot be known."""
    guessed: list[str] = []
    models = _models(recipe, Guess(size, find, guessed))
    student = models["student"] = _causal_if_sampled_so(recipe, models["student"], guessed)
    shape = shape or _shape(recipe, student, guessed)
    sampler = sampler_of(recipe.sampling, shape, student.causal)
    method = method_of(recipe).of(recipe.method, sampler if student.causal else FewStep.of(recipe.sampling, shape))
    return Sizes(recipe, method, sampler, _sized(recipe, method, models), shape, PUBLISHED_TEXT, tuple(guessed))


def sizes_of_plan(plan: Plan) -> Sizes:
    """The same of a plan, which knows everything."""
    models = {name: role.model for name, role in plan.roles.items() if role.model is not None}
    text = getattr(plan.dataset, "text_shape", (PUBLISHED_TEXT,))[0]
    roles = _sized(plan.recipe, plan.method, models)
    return Sizes(plan.recipe, plan.method, plan.sampler, roles, plan.shape, text)


@dataclass(frozen=True)
class Guess:
    """Finds the network that ``init`` names."""

    size: str | None
    find: Find
    guessed: list[str]

    def model(self, role: str, init: str) -> ModelSection:
        if Path(init).expanduser().exists():
            return TypeAdapter(ModelSection).validate_python(open_source(Path(init)).model)
        run = self.find(Path(init).name)
        if run is not None:
            self.guessed.append(f"{role}: {init} is not there; taken is what the recipe of that name trains")
            return _models(run, Guess(self.size, self.find, []))["student"]
        named = next((known for known in SIZES if _stands_in(known, init)), None)
        size = self.size or named
        if size is None:
            raise UserError(
                f"{role}.init = {init}: it is not there, no shipped recipe makes it, and its name holds no size; write "
                f"--size with one of {', '.join(SIZES)}"
            )
        if size not in SIZES:
            raise UserError(f"--size {size}: the sizes are {', '.join(SIZES)}; write one of them")
        self.guessed.append(f"{role}: {init} is not there; planned is a network of size {size} that reads texts")
        return ModelSection(size=size, conditioner=EmbeddingSection())  # type: ignore[arg-type]


def _models(recipe: Recipe, guess: Guess) -> dict[str, ModelSection]:
    """The networks of all roles that have one; the discriminator's follows from its features."""
    models: dict[str, ModelSection] = {}
    roles = method_of(recipe).of(recipe.method, FewStep.of(recipe.sampling, (1, 1, 1, 1))).roles
    if "teacher" in roles:
        assert recipe.teacher is not None
        models["teacher"] = guess.model("teacher", recipe.teacher.init)
    sections: Mapping[str, StudentSection | CriticSection] = {
        "student": recipe.student,
        "critic": recipe.critic or CriticSection(),
    }
    for name, section in sections.items():
        if name not in roles:
            continue
        if section.init == "random":
            assert section.model is not None
            found = section.model
        else:
            found = models[section.init] if section.init in models else guess.model(name, section.init)
        causal = getattr(section, "causal", None)
        models[name] = found.model_copy(update={"causal": causal}) if causal is not None else found
    return models


def _causal_if_sampled_so(recipe: Recipe, student: ModelSection, guessed: list[str]) -> ModelSection:
    """The student, causal where it is sampled as only a causal network is and nothing says how it cuts clips."""
    defaults = {name: SamplingSection.model_fields[name].default for name in OF_CAUSAL_NETWORKS}
    if student.causal or all(getattr(recipe.sampling, name) == default for name, default in defaults.items()):
        return student
    guessed.append("student: it is sampled as a causal network; taken is frame by frame, student.causal.block_frames=1")
    return student.model_copy(update={"causal": CausalSection(block_frames=1)})


def _stands_in(size: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(size)}(?![\w.])", name, re.IGNORECASE) is not None


def _sized(recipe: Recipe, method: Any, models: Mapping[str, ModelSection]) -> dict[str, Sized]:
    offline = getattr(method, "offline", ())
    roles = {
        name: Sized(models[name], name in method.trained)
        for name in method.roles
        if name in models and name not in offline
    }
    if "discriminator" in method.roles:
        gan = recipe.method.gan
        roles["discriminator"] = Sized(None, True, gan.features, len(gan.layers or (0,)))
    return roles


def _shape(recipe: Recipe, student: ModelSection, guessed: list[str]) -> Shape:
    data = recipe.data
    if isinstance(data, FashionMnistSection):
        return 1, 1, data.size, data.size
    if isinstance(data, MovingFashionMnistSection):
        return data.frames, 1, data.size, data.size
    if isinstance(data, LatentsSection) and not Path(data.path).expanduser().exists():
        if student.architecture.channels != PUBLISHED_SHAPE[1]:
            raise UserError(f"data.path = {data.path}: it is not there; write --shape FRAMESxCHANNELSxHEIGHTxWIDTH")
        frames, channels, height, width = PUBLISHED_SHAPE
        guessed.append(f"data: {data.path} is not there; taken are {frames} latent frames of {height} x {width}")
        return frames, channels, height, width
    return open_dataset(data).shape

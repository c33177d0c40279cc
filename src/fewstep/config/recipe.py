"""The complete recipe: one file, one run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field, create_model, field_validator, model_validator

from fewstep.checkpoint.save import CheckpointSection
from fewstep.config.problems import Problems
from fewstep.config.rules import broken_rules
from fewstep.data.sources import DataSection
from fewstep.engines.api import EngineSection
from fewstep.engines.ray.placement import RaySection
from fewstep.engines.roles import CriticSection, DiscriminatorRoleSection, FrozenSection, StudentSection
from fewstep.errors import UserError
from fewstep.evaluate.validation import ValidationSection
from fewstep.methods import METHODS
from fewstep.models.codec import CodecSection, IdentitySection
from fewstep.observe.sinks import ObserveSection
from fewstep.optim.ema import EMASection
from fewstep.rollout.few_step import SamplingSection
from fewstep.section import Section


def _one_of(methods: Sequence[Any]) -> Any:
    """The union of the methods' sections, told apart by ``name``."""
    return Annotated[Union[tuple(method.Section for method in methods)], Field(discriminator="name")]  # noqa: UP007


if TYPE_CHECKING:
    MethodSection = Any
else:
    MethodSection = _one_of(METHODS)


class Recipe(Section):
    """One run, complete; nothing is inherited from another file."""

    name: str = Field(pattern=r"^\w[\w.-]*$")
    """Name of the run, of letters, digits, ``._-``; its folder is ``runs/<name>`` unless ``--run`` names one."""
    seed: int = Field(default=0, ge=0)
    """Every random draw of the run follows from it."""
    iterations: int = Field(ge=1)
    """Of the whole run, however often it is resumed; one student update each, but for a warm-up of the critic."""
    method: MethodSection
    """What is trained, and how: the method and its settings."""
    student: StudentSection
    """The network that is trained to be used."""
    teacher: FrozenSection | None = None
    """The frozen network that is distilled; for methods that have one."""
    critic: CriticSection | None = None
    """The network that learns the score of what the student makes; for methods that have one."""
    discriminator: DiscriminatorRoleSection | None = None
    """The head of the adversarial term; where the method has that term."""
    data: DataSection
    """What is trained on."""
    codec: CodecSection = IdentitySection()
    """From what the data hold to latents and back."""
    sampling: SamplingSection
    """How the trained network is sampled; travels with its weights."""
    ema: EMASection = EMASection()
    """The average of the student's weights that is validated, sampled and exported."""
    checkpoint: CheckpointSection
    """When checkpoints are written, and which ones stay."""
    validation: ValidationSection | None = None
    """What is measured while training goes on; left out, nothing is."""
    observe: ObserveSection = ObserveSection()
    """What is recorded of the run."""
    engine: Annotated[EngineSection | RaySection, Field(discriminator="name")] = EngineSection()
    """Where and how the phases run."""
    plugins: tuple[str, ...] = ()
    """Python modules with methods (``METHODS``) or feature extractors (``EXTRACTORS``) of your own; they are imported
    when this recipe is loaded."""

    @field_validator("engine", mode="before")
    @classmethod
    def _one_process_unless_named(cls, values: Any) -> Any:
        return {"name": "process"} | values if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _sections_go_together(self) -> Recipe:
        problems = broken_rules(self, method_of(self))
        if problems:
            raise Problems(problems)
        return self


def method_of(recipe: Recipe) -> Any:
    """The class of the recipe's method, from ``METHODS`` or from a plugin."""
    return next(method for method in known_methods(recipe.plugins) if type(recipe.method) is method.Section)


@cache
def known_methods(plugins: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """fewstep's methods, then those of the plugins, which are imported. Raises UserError for a plugin that cannot be
    imported, has neither ``METHODS`` nor ``EXTRACTORS``, or has a method whose name is taken."""
    methods = list(METHODS)
    for plugin in plugins:
        try:
            module = importlib.import_module(plugin)
        except ImportError as error:
            raise UserError(f"plugins: '{plugin}': {error}; write the name of a module on PYTHONPATH") from error
        if not any(hasattr(module, kind) for kind in ("METHODS", "EXTRACTORS")):
            raise UserError(
                f"plugins: '{plugin}' has neither METHODS nor EXTRACTORS; write METHODS = (YourMethod,) there"
            )
        for method in getattr(module, "METHODS", ()):
            if _name(method) in map(_name, methods):
                raise UserError(
                    f"plugins: '{plugin}': there is a method '{_name(method)}' already; choose another name"
                )
            methods.append(method)
    return tuple(methods)


def _name(method: Any) -> str:
    return method.Section.model_fields["name"].default


@cache
def recipe_type(plugins: tuple[str, ...] = ()) -> type[Recipe]:
    """:class:`Recipe`, its ``method`` widened by the plugins' methods."""
    if not plugins:
        return Recipe
    field = Field(description=Recipe.model_fields["method"].description)
    return create_model("Recipe", __base__=Recipe, method=(_one_of(known_methods(plugins)), field))

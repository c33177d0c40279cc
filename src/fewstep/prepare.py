"""From a recipe to a plan: everything is found and checked, nothing heavy is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter

from fewstep.checkpoint.run_folder import open_source
from fewstep.config import Recipe, method_of
from fewstep.data.latents import LatentFolder
from fewstep.data.sources import open_dataset
from fewstep.engines.device import resolve_device
from fewstep.engines.mesh import Ranks
from fewstep.engines.ray.placement import Group, RaySection, groups_of
from fewstep.engines.roles import CriticSection, StudentSection
from fewstep.errors import UserError, UserErrors
from fewstep.methods.api import Method
from fewstep.misfits import all_misfits
from fewstep.models.codec import build_codec
from fewstep.models.families import ModelSection
from fewstep.optim.optimizer import OptimizerSection
from fewstep.optim.schedule import ScheduleSection
from fewstep.plan import Plan, RolePlan
from fewstep.rollout.carry import refuse_cut
from fewstep.rollout.few_step import FewStep
from fewstep.rollout.sampler import sampler_of
from fewstep.shipped import how_to_get, recipe_of_run


def prepare(recipe: Recipe, ranks: Ranks | None = None) -> Plan:
    """Opens the data set and the sources of all roles (no weights), and checks that they fit together.

    ranks: which process this is, for a worker; left out, what a launcher says, and where the recipe has groups of
    workers the plan is that of the process which starts them.

    Raises UserError, or UserErrors with everything that is wrong at once.
    """
    starts = ranks is None and isinstance(recipe.engine, RaySection)
    ranks = ranks or Ranks.launched()
    if starts and ranks.world > 1:
        raise UserError(
            f"engine.name = ray: torchrun started {ranks.world} processes, and Ray starts its own; run fewstep alone"
        )
    device, precision = resolve_device(recipe.engine, ranks)
    if recipe.engine.compile and device.type == "cpu":
        raise UserError(f"engine.compile = {recipe.engine.compile}: it is for GPUs; write engine.compile=null on a CPU")
    dataset, codec = open_dataset(recipe.data), build_codec(recipe.codec)
    if isinstance(dataset, LatentFolder):
        dataset.refuse_swapped(codec.channels)
    known = method_of(recipe)
    roles = plan_roles(recipe, known.of(recipe.method, FewStep.of(recipe.sampling, dataset.shape)))
    student, sampling = roles["student"].model, recipe.sampling
    causal, wide = student.causal if student else None, torch.promote_types(precision, torch.float32)
    try:
        sampler = sampler_of(sampling, dataset.shape, causal, wide)
        if causal and sampling.stream_chunks > 1:
            refuse_cut(dataset.shape[0], sampling.overlap_frames, causal)
    except UserError as error:
        if causal is None:
            raise UserError(f"{error}, or start from a causal student of few steps (student.init)") from error
        frames = f"the latents in {dataset.path}" if isinstance(dataset, LatentFolder) else "data.frames"
        raise UserError(f"{error} ({frames}, student.causal, sampling)") from error
    method = known.of(recipe.method, sampler)
    groups: tuple[Group, ...] = ()
    if starts:
        assert isinstance(recipe.engine, RaySection)
        groups = groups_of(recipe.engine, method, recipe.iterations, device)
    plan = Plan(recipe, method, sampler, dataset, codec, roles, device, precision, ranks, groups)
    if errors := all_misfits(plan):
        raise UserErrors(errors)
    if ranks.first:
        for text in doubts(plan):
            warnings.warn(text, stacklevel=2)
    return plan


def doubts(plan: Plan) -> Iterator[str]:
    """What can run and leads nowhere."""
    student = plan.roles["student"]
    if "critic" not in plan.roles or student.model is None or student.model.causal is None or student.source is None:
        return
    if student.source.model.get("causal") is None:
        yield (
            f"student.init = {plan.recipe.student.init} sees whole clips, and '{plan.recipe.method.name}' does not get "
            "anywhere from such weights; make them causal (teacher_forcing), then of few steps (consistency or "
            "ode_init), and name that run as student.init"
        )


def plan_roles(recipe: Recipe, method: Method) -> dict[str, RolePlan]:
    """The roles of the method, in its order; the teacher first of all, since others may start from it.

    Raises UserErrors with all sources that are missing or do not suit.
    """
    refuse_missing(recipe, method)
    planned: dict[str, RolePlan] = {}
    if "teacher" in method.roles:
        assert recipe.teacher is not None
        planned["teacher"] = _from_source("teacher", recipe.teacher.init, recipe.teacher.weights, recipe.name)
    student = recipe.student
    planned["student"] = _trained("student", student, planned, student.optimizer, student.schedule, recipe.name)
    if "critic" in method.roles:
        critic = recipe.critic or CriticSection()
        optimizer, schedule = critic.optimizer or student.optimizer, critic.schedule or student.schedule
        planned["critic"] = _trained("critic", critic, planned, optimizer, schedule, recipe.name)
        if "discriminator" in method.roles:
            head = recipe.discriminator
            planned["discriminator"] = RolePlan(
                None,
                None,
                drawn_for="discriminator",
                optimizer=(head and head.optimizer) or optimizer,
                schedule=(head and head.schedule) or schedule,
            )
    return {name: planned[name] for name in method.roles if name != "ema"}  # the student, by other weights


def refuse_missing(recipe: Recipe, method: Method) -> None:
    """Raises UserErrors with every source that cannot be opened."""
    errors: list[str] = []
    for name in ("teacher", "student", "critic"):
        section: Any = getattr(recipe, name)
        if name in method.roles and section is not None and section.init not in ("random", "teacher", "student"):
            try:
                _from_source(name, section.init, "ema", recipe.name)
            except UserError as error:
                errors.append(str(error))
    if errors:
        raise UserErrors(list(dict.fromkeys(errors)))


def _trained(
    name: str,
    section: StudentSection | CriticSection,
    planned: dict[str, RolePlan],
    optimizer: OptimizerSection,
    schedule: ScheduleSection,
    run: str,
) -> RolePlan:
    if section.init == "random":
        start = RolePlan(section.model, None, drawn_for=name)
    elif section.init in planned:
        start = planned[section.init]
    else:
        start = _from_source(name, section.init, section.weights or "ema", run)
    if section.init != "random" and section.model is not None and section.model != start.model:
        raise UserError(f"{name}.model differs from the network of {name}.init = {section.init}; leave it out")
    causal = getattr(section, "causal", None)
    if causal is not None and start.model is not None:
        start = replace(start, model=start.model.model_copy(update={"causal": causal}))
    return replace(start, optimizer=optimizer, schedule=schedule)


def _from_source(name: str, path: str, weights: Literal["ema", "raw"], run: str) -> RolePlan:
    """What ``name`` starts from in a recipe whose own run is called ``run``, which is nothing to start from."""
    place = Path(path).expanduser()
    if not place.exists() and (recipe := recipe_of_run(place.name)) and place.name != run:
        raise UserError(f"{name}.init = {path}: it is not there; {how_to_get(recipe, f'{name}.init=')}")
    try:
        source = open_source(place, besides=run)
    except UserError as error:
        raise UserError(f"{name}.init = {path}: {error}") from error
    return RolePlan(TypeAdapter(ModelSection).validate_python(source.model), source, weights)

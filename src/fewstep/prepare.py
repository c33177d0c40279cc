"""From a recipe to a plan: everything is found and checked, nothing heavy is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from torch import nn

from fewstep.checkpoint.run_folder import Source, open_source
from fewstep.config import Recipe, method_of
from fewstep.data.api import Dataset
from fewstep.data.latents import LatentFolder
from fewstep.data.sources import open_dataset
from fewstep.engines.device import resolve_device
from fewstep.engines.mesh import Ranks
from fewstep.engines.ray.placement import Group, RaySection, groups_of
from fewstep.engines.roles import CriticSection, StudentSection
from fewstep.errors import UserError, UserErrors
from fewstep.methods.api import Method
from fewstep.models.api import Geometry
from fewstep.models.codec import Codec, CodecSection, build_codec
from fewstep.models.discriminator import Discriminator
from fewstep.models.families import ModelSection, build
from fewstep.observe.sinks import missing_packages
from fewstep.optim.optimizer import OptimizerSection
from fewstep.optim.schedule import ScheduleSection
from fewstep.rollout.carry import refuse_cut
from fewstep.rollout.few_step import FewStep
from fewstep.rollout.sampler import Sampler, sampler_of

Shape = tuple[int, int, int, int]
ONE = Ranks()


@dataclass(frozen=True)
class RolePlan:
    """Where a role's network and weights come from, and how it is trained (``optimizer`` None: it is not).

    source: None for weights drawn at random, by the stream of the role ``drawn_for`` (two roles of one stream start
    alike). model: None for the discriminator, whose size follows from its features.
    """

    model: ModelSection | None
    source: Source | None
    weights: Literal["ema", "raw"] = "ema"
    drawn_for: str = ""
    optimizer: OptimizerSection | None = None
    schedule: ScheduleSection | None = None


@dataclass(frozen=True)
class Plan:
    """A recipe that can run."""

    recipe: Recipe
    method: Method
    sampler: Sampler
    dataset: Dataset
    codec: Codec
    roles: dict[str, RolePlan]
    device: torch.device
    precision: torch.dtype
    ranks: Ranks = ONE
    groups: tuple[Group, ...] = ()
    """Of the workers that this process is to start; empty in a process that trains itself."""

    @property
    def shape(self) -> Shape:
        return self.sampler.shape

    @property
    def rows(self) -> tuple[int, int]:
        """(i, n): this process trains on rows i, i + n, ... of every batch."""
        return self.ranks.rows(self.recipe.engine.sequence)

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """The resolved model section of every role that has one, as plain values."""
        return {name: role.model.model_dump(mode="json") for name, role in self.roles.items() if role.model is not None}

    @property
    def sources(self) -> dict[str, int | None]:
        """The iteration at which the run stands that a role is loaded from; a run that goes on would change it."""
        return {name: role.source.iteration for name, role in self.roles.items() if role.source is not None}

    def conditioner(self, network: Any) -> Any:
        """What turns what the data say of their items, labels or texts, into the network's cond and uncond
        (``condition``, ``null``)."""
        dataset = self.dataset
        if not isinstance(dataset, LatentFolder):
            return network.conditioner
        return network.conditioner.of(None if dataset.negative is None else dataset.negative.to(self.device))

    def networks(self, device: torch.device | str, only: Collection[str] | None = None) -> dict[str, nn.Module]:
        """A network for every role, or for those of ``only``, its weights not yet set; no random stream is touched."""
        wanted = self.roles if only is None else only
        made: dict[str, Any] = {
            name: build(role.model, device)
            for name, role in self.roles.items()
            if role.model is not None and name in wanted
        }
        if "discriminator" in self.roles and "discriminator" in wanted:
            gan = self.recipe.method.gan
            with torch.device("meta"):
                head = Discriminator(made[gan.features].width, len(gan.layers or (0,)))
            made["discriminator"] = head.to_empty(device=device)
        return made

    def placed(self) -> dict[str, dict[str, Any]]:
        """How many workers hold which roles, as plain values; empty where there are no groups."""
        found = {group.name: {"workers": group.size, "roles": list(group.roles)} for group in self.groups}
        return {"groups": found} if found else {}

    def total_updates(self) -> dict[str, int]:
        """Updates that each trained role will make in the whole run."""
        totals, count = dict.fromkeys(self.method.trained, 0), self.recipe.iterations
        steady = self._updates_of(count - 1)
        for iteration in range(count):
            updates = self._updates_of(iteration)
            same = count - iteration if updates == steady else 1  # what follows the warm-up is like the last iteration
            for name in updates:
                totals[name] += same
            if same > 1:
                break
        return totals

    def _updates_of(self, iteration: int) -> list[str]:
        return [name for phase in self.method.phases(iteration) for name in phase.trains]


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
    known = method_of(recipe)
    roles = plan_roles(recipe, known.of(recipe.method, FewStep.of(recipe.sampling, dataset.shape)))
    student, sampling = roles["student"].model, recipe.sampling
    causal, wide = student.causal if student else None, torch.promote_types(precision, torch.float32)
    try:
        sampler = sampler_of(sampling, dataset.shape, causal, wide)
        if causal and sampling.stream_chunks > 1:
            refuse_cut(dataset.shape[0], sampling.overlap_frames, causal)
    except UserError as error:
        raise UserError(f"{error} (data.frames, student.causal, sampling)") from error
    method = known.of(recipe.method, sampler)
    groups: tuple[Group, ...] = ()
    if starts:
        assert isinstance(recipe.engine, RaySection)
        groups = groups_of(recipe.engine, method, recipe.iterations, device)
    plan = Plan(recipe, method, sampler, dataset, codec, roles, device, precision, ranks, groups)
    errors = [
        *misfits(plan),
        *misfits_of_blocks(plan),
        *odd_numbers(plan),
        *odd_ranks(plan),
        *odd_division(plan),
        *missing_packages(recipe.observe),
    ]
    if errors:
        raise UserErrors(errors)
    return plan


def plan_roles(recipe: Recipe, method: Method) -> dict[str, RolePlan]:
    """The roles of the method, in its order; the teacher first of all, since others may start from it."""
    planned: dict[str, RolePlan] = {}
    if "teacher" in method.roles:
        assert recipe.teacher is not None
        planned["teacher"] = _from_source("teacher", recipe.teacher.init, recipe.teacher.weights)
    student = recipe.student
    planned["student"] = _trained("student", student, planned, student.optimizer, student.schedule)
    if "critic" in method.roles:
        critic = recipe.critic or CriticSection()
        optimizer, schedule = critic.optimizer or student.optimizer, critic.schedule or student.schedule
        planned["critic"] = _trained("critic", critic, planned, optimizer, schedule)
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


def misfits(plan: Plan) -> list[str]:
    """What does not fit between the data, the codec and the networks."""
    errors, networks = [], plan.networks("meta")
    if plan.codec.channels != plan.shape[1]:
        errors.append(
            f"codec: it has mean and std of {plan.codec.channels} channels, the data have "
            f"{plan.shape[1]}; write codec.mean and codec.std with {plan.shape[1]} values each"
        )
    for name, role in plan.roles.items():
        if role.model is not None:
            errors += [f"{name}: {text}" for text in misfits_of_network(plan, role.model, networks[name])]
        teacher = plan.roles.get("teacher")
        shared = teacher is not None and name != "teacher" and role.source is teacher.source
        if role.source is not None and not shared:  # what is wrong with the teacher is told once
            errors += [f"{name}: {text}" for text in misfits_of_source(plan, role.source)]
    conditioners = {name: role.model.conditioner for name, role in plan.roles.items() if role.model is not None}
    for name, conditioner in conditioners.items():
        if conditioner != conditioners["student"]:
            errors.append(f"{name}: its conditioning is {conditioner!r}, the student's {conditioners['student']!r}")
    return errors


def misfits_of_network(plan: Plan, model: ModelSection, network: nn.Module) -> Iterator[str]:
    """What of a network is not made for the data."""
    _, channels, height, width = plan.shape
    if model.causal is not None:
        try:
            model.causal.partition(plan.shape[0])
        except UserError as error:
            yield f"causal: {error}; change block_frames, or the data's frames"
    geometry: Geometry = network.geometry  # type: ignore[assignment]
    if geometry.channels != channels:
        yield f"its network has {geometry.channels} latent channels, the data {channels} (model.channels)"
    try:
        geometry.tokens_per_frame(height, width)
    except ValueError as error:
        yield f"{error}; write another data.size, or another model.patch"
    classes = getattr(model.conditioner, "classes", None)
    if isinstance(plan.dataset, LatentFolder):
        yield from plan.dataset.misfits(classes, model.architecture.text_dim)
    elif classes != len(plan.dataset.classes):
        yield (
            f"its network is conditioned on {classes or 'no'} classes ({model.conditioner.name}), the data set has "
            f"{len(plan.dataset.classes)}; take another network or other data"
        )


def misfits_of_blocks(plan: Plan) -> Iterator[str]:
    """What of the cut into blocks does not suit the method."""
    cuts = {name: role.model.causal for name, role in plan.roles.items() if role.model is not None}
    if getattr(plan.method, "needs_causal", False) and cuts["student"] is None:
        yield (
            f"student.causal: method '{plan.recipe.method.name}' trains a causal student; write student.causal: "
            "{block_frames: 3}, or other whole blocks of the data's frames"
        )
    kinds = [cuts[name] is None for name in ("teacher", "critic") if name in cuts]
    if len(set(kinds)) > 1:
        yield (
            "critic: teacher and critic are compared, so both see whole clips or both are causal; write critic.init: "
            "teacher"
        )
    gan = getattr(plan.recipe.method, "gan", None)
    read = cuts.get(gan.features) if gan is not None else None
    if gan is not None and read is not None and read.positions == "reindexed" and read.sink:
        yield (
            f"method.gan.features = {gan.features}: that network renumbers what each block sees beside a sink, and has "
            "no features of whole clips; take one with absolute positions, or leave method.gan out"
        )
    misfits = getattr(plan.method, "misfits", None)
    if misfits is not None:
        yield from misfits(cuts["student"], cuts.get("teacher"))


def misfits_of_source(plan: Plan, source: Source) -> Iterator[str]:
    """What of a trained network was made for other data."""
    if source.latent_shape not in (None, plan.shape):
        yield (
            f"it was trained on samples of shape {list(source.latent_shape)}, the data have {list(plan.shape)}; take "
            "another network, or its own data (data.size, data.frames)"
        )
    if source.codec and build_codec(TypeAdapter(CodecSection).validate_python(source.codec)).id != plan.codec.id:
        yield (
            f"codec: {source.path} was trained on latents of {source.codec}, this recipe makes latents of "
            f"{plan.recipe.codec.model_dump()}; write the codec of that run"
        )


def odd_numbers(plan: Plan) -> list[str]:
    """More rows than items, guidance by what was never learnt, layers that are not there."""
    errors, recipe = [], plan.recipe
    if recipe.data.batch > len(plan.dataset):
        errors.append(
            f"data.batch = {recipe.data.batch}: the data set has {len(plan.dataset)} items; write that or fewer"
        )
    if isinstance(plan.dataset, LatentFolder):
        errors += plan.dataset.lacks(recipe.method, recipe.sampling)
    teacher = plan.roles.get("teacher")
    taught = (teacher.source.recipe or {}) if teacher and teacher.source else {}
    from_nothing = taught.get("student", {}).get("init") == "random"  # weights from elsewhere may know it
    if (
        getattr(recipe.method, "guidance_scale", 1.0) != 1.0
        and from_nothing
        and taught["method"].get("cond_dropout") == 0
    ):
        errors.append(
            f"method.guidance_scale = {recipe.method.guidance_scale}: the teacher was trained with cond_dropout 0 and "
            "never learnt the null condition that guidance compares with; write 1.0, or take another teacher"
        )
    gan = getattr(recipe.method, "gan", None)
    if gan is not None and gan.layers:
        depth: Any = plan.networks("meta")[gan.features].num_layers
        if list(gan.layers) != sorted(set(gan.layers)) or gan.layers[0] < 0 or gan.layers[-1] >= depth:
            errors.append(
                f"method.gan.layers = {list(gan.layers)}: write ascending block numbers from 0 to {depth - 1}"
            )
    return errors


def odd_ranks(plan: Plan) -> Iterator[str]:
    """What cannot be cut over the processes, or over the workers of each group."""
    engine, batch, parts = plan.recipe.engine, plan.recipe.data.batch, plan.method.row_parts
    worlds = {group.size: f"{group.size} workers of group '{group.name}'" for group in plan.groups}
    worlds = worlds or {plan.ranks.world: f"{plan.ranks.world} processes"}
    for world, named in worlds.items():
        if world % engine.sequence:
            yield f"engine.sequence = {engine.sequence}: it must divide the number of processes, {world}"
            continue
        rows = world // engine.sequence
        if batch % (rows * parts):
            of = named if engine.sequence == 1 else f"{rows} groups of {engine.sequence} processes"
            of += "" if parts == 1 else f" and the method's {parts} parts"
            yield f"data.batch = {batch}: it must be a multiple of {rows * parts}, for {of}"
        if world % engine.replicas:
            yield f"engine.replicas = {engine.replicas}: it must divide the number of processes, {world}"
        if world > 1 and engine.compile == "graphs":
            yield "engine.compile = graphs: it is for one process; write engine.compile=blocks, or null"
    if not isinstance(engine, RaySection):
        return
    if engine.sequence > 1:
        yield f"engine.sequence = {engine.sequence}: it is for engine.name=process; leave it out"
    if plan.recipe.checkpoint.asynchronous:
        yield "checkpoint.asynchronous = true: it is for engine.name=process; leave it out"
    if engine.compile == "graphs" and engine.layout == "colocated":
        yield "engine.compile = graphs: it needs weights that stay where they are; write engine.compile=blocks"


def odd_division(plan: Plan) -> Iterator[str]:
    """Which networks' tokens cannot be divided over the processes that share a row."""
    sequence, (_, _, height, width) = plan.recipe.engine.sequence, plan.shape
    for name, role in plan.roles.items():
        if role.model is None:
            continue
        shape = role.model.architecture
        tokens = (height // shape.patch[1]) * (width // shape.patch[2])
        for what, count in (("heads", shape.heads), ("tokens in a frame", tokens)):
            if count % sequence:
                yield f"engine.sequence = {sequence}: it must divide the {count} {what} of {name}"


def _trained(
    name: str,
    section: StudentSection | CriticSection,
    planned: dict[str, RolePlan],
    optimizer: OptimizerSection,
    schedule: ScheduleSection,
) -> RolePlan:
    if section.init == "random":
        start = RolePlan(section.model, None, drawn_for=name)
    elif section.init in planned:
        start = planned[section.init]
    else:
        start = _from_source(name, section.init, section.weights or "ema")
    if section.init != "random" and section.model is not None and section.model != start.model:
        raise UserError(f"{name}.model differs from the network of {name}.init = {section.init}; leave it out")
    causal = getattr(section, "causal", None)
    if causal is not None and start.model is not None:
        start = replace(start, model=start.model.model_copy(update={"causal": causal}))
    return replace(start, optimizer=optimizer, schedule=schedule)


def _from_source(name: str, path: str, weights: Literal["ema", "raw"]) -> RolePlan:
    try:
        source = open_source(Path(path))
    except UserError as error:
        raise UserError(f"{name}.init = {path}: {error}") from error
    return RolePlan(TypeAdapter(ModelSection).validate_python(source.model), source, weights)

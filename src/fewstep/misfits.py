"""What of a plan does not fit together: data, codec, networks, blocks, processes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import TypeAdapter
from torch import nn

from fewstep.checkpoint.run_folder import Source
from fewstep.data.latents import LatentFolder
from fewstep.data.sources import open_dataset
from fewstep.engines.ray.placement import RaySection
from fewstep.errors import UserError
from fewstep.evaluate.extractor import fewest_items
from fewstep.models.api import Geometry
from fewstep.models.codec import CodecSection, build_codec
from fewstep.models.families import ModelSection
from fewstep.observe.sinks import missing_packages
from fewstep.plan import Plan


def all_misfits(plan: Plan) -> list[str]:
    """Everything that is wrong, a line each."""
    return [
        *misfits(plan),
        *misfits_of_blocks(plan),
        *odd_numbers(plan),
        *too_few_to_judge(plan),
        *odd_ranks(plan),
        *odd_division(plan),
        *missing_packages(plan.recipe.observe),
    ]


def misfits(plan: Plan) -> list[str]:
    """What does not fit between the data, the codec and the networks."""
    errors, networks = [], plan.networks("meta")
    if plan.codec.channels != plan.shape[1]:
        channels = plan.shape[1]
        wanted = {**plan.recipe.codec.model_dump(mode="json"), "mean": [0] * channels, "std": [1] * channels}
        errors.append(
            f"codec: it has mean and std of {plan.codec.channels} channels, the data have {channels}; write "
            f"{as_override('codec', wanted)}, or the mean and std of your data"
        )
    for name, role in plan.roles.items():
        if role.model is not None:
            errors += [f"{name}: {text}" for text in misfits_of_network(plan, name, networks[name])]
        teacher = plan.roles.get("teacher")
        shared = teacher is not None and name != "teacher" and role.source is teacher.source
        if role.source is not None and not shared:  # what is wrong with the teacher is told once
            errors += [f"{name}: {text}" for text in misfits_of_source(plan, role.source)]
    conditioners = {name: role.model.conditioner for name, role in plan.roles.items() if role.model is not None}
    for name, conditioner in conditioners.items():
        if conditioner != conditioners["student"]:
            mine, student = (_flow(conditioners[one].model_dump(mode="json")) for one in (name, "student"))
            errors.append(f"{name}: its conditioning is {mine}, the student's {student}; take networks of one kind")
    return errors


def misfits_of_network(plan: Plan, name: str, network: nn.Module) -> Iterator[str]:
    """What of the network of role ``name`` is not made for the data."""
    role = plan.roles[name]
    model: ModelSection = role.model  # type: ignore[assignment]
    drawn = role.source is None  # then the recipe says what it is like
    _, channels, height, width = plan.shape
    if model.causal is not None:
        try:
            model.causal.partition(plan.shape[0])
        except UserError as error:
            yield f"causal: {error}; change block_frames, or the data's frames"
    geometry: Geometry = network.geometry  # type: ignore[assignment]
    if geometry.channels != channels:
        wanted = f"; write {name}.model.channels={channels}" if drawn else ""
        yield f"its network has {geometry.channels} latent channels, the data {channels} (model.channels){wanted}"
    try:
        geometry.tokens_per_frame(height, width)
    except ValueError as error:
        size = "latents of another size" if isinstance(plan.dataset, LatentFolder) else "another data.size"
        yield f"{error}; write {size}, or another model.patch"
    classes = getattr(model.conditioner, "classes", None)
    if isinstance(plan.dataset, LatentFolder):
        yield from plan.dataset.misfits(classes, model.architecture.text_dim)
    elif classes != len(plan.dataset.classes):
        num = len(plan.dataset.classes)
        wanted = f"write {name}.model.conditioner.classes={num}" if drawn and classes else "take another network"
        yield (
            f"its network is conditioned on {classes or 'no'} classes ({model.conditioner.name}), the data set has "
            f"{num}; {wanted}, or other data"
        )


def as_override(key: str, values: Mapping[str, Any]) -> str:
    """A section as an argument of a command, for a shell: ``codec='{name: identity, mean: [0], std: [1]}'``."""
    return f"{key}='{_flow(values)}'"


def _flow(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), default_flow_style=True, sort_keys=False, width=math.inf).strip()


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
        keys = "data.path" if isinstance(plan.dataset, LatentFolder) else "data.size, data.frames"
        yield (
            f"it was trained on samples of shape {list(source.latent_shape)}, the data have {list(plan.shape)}; take "
            f"another network, or its own data ({keys})"
        )
    if source.codec and build_codec(TypeAdapter(CodecSection).validate_python(source.codec)).id != plan.codec.id:
        yield (
            f"codec: {source.path} was trained on other latents than this recipe makes; write the codec of that run, "
            f"{as_override('codec', source.codec)}"
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


def too_few_to_judge(plan: Plan) -> Iterator[str]:
    """Fewer samples, or fewer items to compare them with, than the features of the judge; it is not made for this."""
    recipe = plan.recipe
    section = recipe.validation
    if section is None or section.extractor is None or not plan.ranks.first:
        return
    try:
        fewest = fewest_items(section.extractor, recipe.plugins)
    except UserError as error:
        yield f"validation.{error}"
        return
    if section.samples < fewest:
        yield (
            f"validation.samples = {section.samples}: the Frechet distance on {fewest - 1} features needs more samples "
            f"than that; write {fewest} or more (some thousands for a figure to trust)"
        )
    num = len(open_dataset(recipe.data, "test"))
    if num < fewest:
        path = getattr(recipe.data, "test_path", None)
        kept = f"data.test_path = {path}" if path else "data"
        more = "" if path or not hasattr(recipe.data, "test_path") else " in a folder that data.test_path names"
        yield (
            f"{kept}: {num} items are too few to judge samples by; give {fewest} or more{more}, or write "
            "validation=null"
        )


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

"""What ``fewstep eval`` and ``fewstep demo`` judge models by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from fewstep.cli.console import out, table
from fewstep.cli.model import LoadedModel
from fewstep.cli.shipped import find_recipe
from fewstep.config import load_recipe
from fewstep.data.api import Dataset, Labels
from fewstep.data.sources import DataSection, open_dataset
from fewstep.errors import UserError
from fewstep.evaluate.api import PixelValues
from fewstep.evaluate.evaluation import Evaluation, evaluate
from fewstep.evaluate.extractor import ExtractorSection, build_extractor, fewest_items
from fewstep.evaluate.judge import Judge
from fewstep.evaluate.sample import balanced_labels, generate
from fewstep.shapes import Latents


def open_judge(loaded: LoadedModel, recipe: str | None, num_samples: int | None = None) -> tuple[Judge, Dataset]:
    """The judge of the model's data, and the split that its training saw. num_samples: how many will be judged.

    Raises UserError where the model does not name its data, the data have other classes, or there are too few samples
    or items; nothing is trained before that.
    """
    plugins: tuple[str, ...] = ()
    if recipe is not None:
        described = load_recipe(find_recipe(recipe))
        data, plugins = described.data, described.plugins
        extractor = described.validation.extractor if described.validation else None
    elif loaded.source.recipe is not None:
        data = TypeAdapter(DataSection).validate_python(loaded.source.recipe["data"])
        validation = loaded.source.recipe["validation"] or {}
        extractor = ExtractorSection.model_validate(validation.get("extractor") or {})
    else:
        raise UserError(
            f"{loaded.source.path} does not say what it was trained on; name a recipe of that data by --recipe, such "
            f"as --recipe {'wan_nano_video' if loaded.shape[0] > 1 else 'wan_nano'}/sft"
        )
    section = extractor or ExtractorSection()
    train, test = open_dataset(data, "train"), open_dataset(data, "test")
    if train.classes != loaded.classes or train.shape != loaded.shape:
        raise UserError(
            f"{loaded.source.path} makes {len(loaded.classes)} classes of shape {loaded.shape}, the data have "
            f"{len(train.classes)} of shape {train.shape}; name a recipe of its own data by --recipe"
        )
    refuse_few(section, plugins, data, len(train), len(test), num_samples)
    network = build_extractor(section, train, loaded.device, plugins)
    return Judge(network, test, section.cache_folder, loaded.device), train


def refuse_few(
    section: ExtractorSection, plugins: Sequence[str], data: Any, num_train: int, num_test: int, num_samples: int | None
) -> None:
    """Raises UserError for too few samples or items. Where no split is kept from training, one half of the data is
    compared with the other, to say what real data reach."""
    fewest = fewest_items(section, plugins)
    if num_samples is not None and num_samples < fewest:
        raise UserError(
            f"--num-samples = {num_samples}: the Frechet distance on {fewest - 1} features needs more samples than "
            f"that; write {fewest} or more (some thousands for a figure to trust)"
        )
    halved = getattr(data, "test_path", "") is None
    for num, needed in ((num_test, 2 * fewest if halved else fewest), (num_train, fewest)):
        if num < needed:
            more = ", or a recipe with data.test_path, by --recipe" if halved else ""
            place = getattr(data, "path", None) or data.name
            raise UserError(f"{place}: {num} items are too few to judge samples by; {needed} or more are needed{more}")


def measure(
    loaded: LoadedModel,
    judge: Judge,
    steps: int | None,
    *,
    num_samples: int,
    seeds: Sequence[int],
    batch: int,
    stops: bool = False,
    recipe: str | None = None,
) -> Evaluation:
    """One row: the model at ``steps``, the trained number if None."""
    labels = balanced_labels(num_samples, len(loaded.classes)).tolist()
    return evaluate(
        loaded.name,
        loaded.role,
        loaded.sampler(loaded.sampling.with_steps(steps) if steps else loaded.sampling),
        loaded.conditioner,
        loaded.codec,
        judge,
        num_samples=num_samples,
        seeds=seeds,
        batch=batch,
        stops=stops,
        given=given_frames(loaded, labels, recipe) if loaded.sampling.given_frames else None,
        device=loaded.device,
    )


def given_frames(loaded: LoadedModel, labels: Sequence[int], recipe: str | None = None) -> Latents:
    """The first frames of test clips, one for each label, that a model which continues clips begins with.

    Raises UserError where neither the model nor ``recipe`` names the data, or a class has no test clip.
    """
    if recipe is not None:
        data = load_recipe(find_recipe(recipe)).data
    elif loaded.source.recipe is not None:
        data = TypeAdapter(DataSection).validate_python(loaded.source.recipe["data"])
    else:
        raise UserError(
            f"{loaded.source.path} continues clips and does not say of which data; name a recipe of that data by "
            "--recipe, such as --recipe wan_nano_video/sft"
        )
    test = open_dataset(data, "test")
    found: dict[int, list[Tensor]] = {label: [] for label in labels}
    for ids in torch.arange(len(test)).split(256):
        items = test.items(ids)
        for label, pixels in zip(items.label.tolist(), items.pixels, strict=True):
            if label in found and len(found[label]) < labels.count(label):
                found[label].append(pixels)
        if all(len(clips) == labels.count(label) for label, clips in found.items()):
            break
    for label, clips in found.items():
        if not clips:
            raise UserError(f"the test data have no clip of '{loaded.classes[label]}' to continue")
    turns = [(label, labels[:place].count(label)) for place, label in enumerate(labels)]
    clips = torch.stack([found[label][turn % len(found[label])] for label, turn in turns])
    return loaded.codec.encode(clips)[:, : loaded.sampling.given_frames]


def long_clips(
    loaded: LoadedModel, num: int, num_frames: int, recipe: str | None = None, seed: int = 0
) -> tuple[PixelValues, Labels]:
    """``num`` clips of a causal model, longer than it was trained to make, and their classes, which take turns."""
    labels = balanced_labels(num, len(loaded.classes))
    sampler = loaded.sampler(loaded.sampling, num_frames)
    given = given_frames(loaded, labels.tolist(), recipe) if loaded.sampling.given_frames else None
    settings: dict[str, Any] = {"batch": 50, "device": loaded.device, "given": given}
    made = generate(loaded.role, sampler, loaded.conditioner, labels, seed, **settings)
    return loaded.codec.decode(made.x0), labels


def show_stops(row: Evaluation) -> None:
    """The quality of the predictions at every step, where it was asked for."""
    if not row.stops:
        return
    rows = table(f"{row.name}: predictions of x0 at every step", "step", "sigma", "Frechet", "accuracy", numbers=True)
    for stop in row.stops:
        accuracy = "" if stop.accuracy is None else f"{stop.accuracy:.3g}"
        rows.add_row(str(stop.stop), f"{stop.sigma:.4g}", f"{stop.frechet:.3g}", accuracy)
    out.print(rows)

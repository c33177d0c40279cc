"""The pictures that commands write: samples of one model, and two models side by side."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import torch

from fewstep.cli.model import LoadedModel
from fewstep.data.api import Labels
from fewstep.errors import UserError
from fewstep.evaluate.api import PixelValues
from fewstep.evaluate.picture import save_grid, save_pictures
from fewstep.evaluate.sample import generate

COLUMNS = 16
"""Pictures in one row of a grid, at most."""
COMPARED_STEPS = (4, 2, 1)


def choose_labels(wanted: Sequence[str], classes: tuple[str, ...], num: int | None) -> Labels:
    """The label of every sample: the wanted classes in turn, all of them if none is named.

    Raises UserError for a class that the model does not know, with the nearest name.
    """
    ids = [_class(name, classes) for name in wanted] or list(range(len(classes)))
    return torch.tensor([ids[index % len(ids)] for index in range(num or 8 * len(ids))])


def _class(name: str, classes: tuple[str, ...]) -> int:
    known = {class_name.lower(): index for index, class_name in enumerate(classes)}
    if name.lower() in known:
        return known[name.lower()]
    if name.isdecimal() and int(name) < len(classes):
        return int(name)
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean '{classes[known[close[0]]]}'?" if close else f"the classes are {', '.join(classes)}"
    raise UserError(f"--label {name}: the model has no such class; {hint} (or a number from 0 to {len(classes) - 1})")


def changes(classes: Sequence[str], *, raw: bool, guidance: float | None, num: int | None) -> list[str]:
    """What the default name of a picture says of each setting that was asked for, so that no other picture is
    overwritten; empty where none was. What is unfit for file names becomes ``_``."""
    return [
        *(["".join(c if c.isalnum() or c in "-_." else "_" for c in "-".join(["label", *classes]))] if classes else []),
        *(["raw"] if raw else []),
        *([f"guidance{guidance:.15g}"] if guidance is not None else []),
        *([f"num{num}"] if num is not None else []),
    ]


def places(out: Path | None, stem: str) -> tuple[Path, Path]:
    """The file of the grid and the folder of single files; both are called ``stem`` unless ``out`` is a file."""
    if out is not None and out.suffix.lower() == ".png":
        return out, out.with_suffix("")
    folder = out or Path("samples")
    return folder / f"{stem}.png", folder / stem


def write_pictures(
    pixels: PixelValues, labels: Labels, classes: tuple[str, ...], grid: Path, folder: Path | None
) -> list[Path]:
    """Writes the grid, a class a row (several where it has many samples), and into ``folder`` every sample as a file.
    Returns the paths, the grid's first."""
    rows, names = [], []
    width = min(COLUMNS, int(labels.bincount().max()))
    for label in labels.unique().tolist():
        for part, ids in enumerate((labels == label).nonzero().flatten().split(width)):
            blank = pixels.new_ones(width - len(ids), *pixels.shape[1:])
            rows.append(torch.cat([pixels[ids], blank]))
            names.append("" if part else classes[label])
    save_grid(grid, rows, names)
    if folder is None:
        return [grid]
    return [grid, *save_pictures(folder, pixels, [classes[label] for label in labels.tolist()])]


def write_comparison(path: Path, teacher: LoadedModel, student: LoadedModel) -> None:
    """A picture of both on the same noise, a class a column: the teacher at its own number of steps, then each of the
    two at 4, 2 and 1 steps."""
    labels = torch.arange(min(len(student.classes), COLUMNS))
    rows = [(teacher, len(teacher.sampling.resolved()))]
    rows += [(model, steps) for steps in COMPARED_STEPS for model in (teacher, student)]
    pictures, names = [], []
    for model, steps in rows:
        sampler = model.sampler(model.sampling.with_steps(steps))
        made = generate(model.role, sampler, model.conditioner, labels, 0, device=model.device)
        pictures.append(model.codec.decode(made.x0))
        names.append(f"{model.name}, {steps}")
    save_grid(path, pictures, names)

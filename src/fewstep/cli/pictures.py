"""Which samples ``fewstep sample`` makes, and the pictures that it writes."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

import torch

from fewstep.data.api import Labels
from fewstep.errors import UserError
from fewstep.evaluate.api import PixelValues
from fewstep.evaluate.picture import save_grid, save_pictures

COLUMNS = 16
"""Pictures in one row of a grid, at most."""


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
    if name.isdigit() and int(name) < len(classes):
        return int(name)
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean '{classes[known[close[0]]]}'?" if close else f"the classes are {', '.join(classes)}"
    raise UserError(f"--label {name}: the model has no such class; {hint} (or a number from 0 to {len(classes) - 1})")


def places(out: Path | None, name: str, seed: int) -> tuple[Path, Path]:
    """The file of the grid and the folder of single files."""
    if out is not None and out.suffix.lower() == ".png":
        return out, out.with_suffix("")
    folder = out or Path("samples")
    return folder / f"{name}-seed{seed}.png", folder / f"{name}-seed{seed}"


def write_pictures(
    pixels: PixelValues, labels: Labels, classes: tuple[str, ...], grid: Path, folder: Path | None
) -> list[Path]:
    """Writes the grid, a class a row (several where it has many samples), and into ``folder`` every sample as a file.
    Returns the paths, the grid's first."""
    rows, names = [], []
    for label in labels.unique().tolist():
        for part, ids in enumerate((labels == label).nonzero().flatten().split(COLUMNS)):
            rows.append(pixels[ids])
            names.append("" if part else classes[label])
    save_grid(grid, rows, names)
    if folder is None:
        return [grid]
    return [grid, *save_pictures(folder, pixels, [classes[label] for label in labels.tolist()])]

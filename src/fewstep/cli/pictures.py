"""The pictures that commands write: samples of one model, and two models side by side."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from fewstep.cli.judging import given_frames
from fewstep.cli.model import LoadedModel
from fewstep.data.api import Labels
from fewstep.errors import UserError
from fewstep.evaluate.api import PixelValues
from fewstep.evaluate.clip import enlarged, mp4_writer, save_clip_grid, save_gif, save_mp4
from fewstep.evaluate.picture import class_rows, save_film, save_grid, save_pictures
from fewstep.evaluate.sample import generate
from fewstep.rollout.few_step import SamplingSection

COLUMNS = 16
"""Pictures in one row of a grid, at most."""
COMPARED_STEPS = (4, 2, 1)
STILLS, CLIPS = (".png",), (".gif", ".mp4")


def choose_labels(wanted: Sequence[str], classes: tuple[str, ...], num: int | None) -> Labels:
    """The label of every sample: the wanted classes in turn, all of them if none is named.

    Raises UserError for a class that the model does not know, with the nearest name.
    """
    ids = [class_number(name, classes, name) for name in wanted] or list(range(len(classes)))
    return torch.tensor([ids[index % len(ids)] for index in range(num or 8 * len(ids))])


def class_number(name: str, classes: tuple[str, ...], text: str) -> int:
    """The class called ``name``, or of that number. Raises UserError for another one, with the ``text`` that the user
    gave for it."""
    known = {class_name.lower(): index for index, class_name in enumerate(classes)}
    if name.lower() in known:
        return known[name.lower()]
    if name.isdecimal() and int(name) < len(classes):
        return int(name)
    close = [known[one] for one in difflib.get_close_matches(name.lower(), known, n=1)]
    begun = [index for one, index in known.items() if name and re.match(rf"{re.escape(name.lower())}\b", one)]
    meant, every = (
        joint.join(f"'{classes[index]}'" for index in found)
        for joint, found in ((" or ", begun or close), (", ", known.values()))
    )
    hint = f"did you mean {meant}?" if meant else f"the classes are {every}"
    raise UserError(
        f"--label {text or repr(text)}: the model has no such class; {hint} (or a number from 0 to {len(classes) - 1})"
    )


def changes(classes: Sequence[str], *, raw: bool, guidance: float | None, num: int | None) -> list[str]:
    """What the default name of a picture says of each setting that was asked for, so that no other picture is
    overwritten; empty where none was. What is unfit for file names becomes ``_``."""
    return [
        *([fit("-".join(["label", *classes]))] if classes else []),
        *(["raw"] if raw else []),
        *([f"guidance{guidance:.15g}"] if guidance is not None else []),
        *([f"num{num}"] if num is not None else []),
    ]


def places(out: Path | None, stem: str, clips: bool = False) -> tuple[list[Path], Path]:
    """The files of the grid and the folder of single files; all are called ``stem`` unless ``out`` is a file. Clips are
    written as GIF and, where PyAV is installed, as mp4.

    Raises UserError for a file of another kind than the samples.
    """
    endings = CLIPS if clips else STILLS
    if out is not None and out.suffix:
        if out.suffix.lower() not in endings:
            made = "clips" if clips else "still images"
            raise UserError(f"--out {out}: the model makes {made}; write a folder, or a file of {' or '.join(endings)}")
        return [out], out.with_suffix("")
    folder = out or Path("samples")
    if clips and find_spec("av") is None:
        endings = endings[:1]
    return [folder / f"{stem}{ending}" for ending in endings], folder / stem


def write_pictures(
    pixels: PixelValues, labels: Labels, classes: tuple[str, ...], grids: Sequence[Path], folder: Path | None
) -> list[Path]:
    """Writes the grid, a class a row (several where it has many samples), of clips also the film strips of one sample
    of each class, and into ``folder`` every sample as a file. Returns the paths in this order."""
    rows, names = [], []
    width = min(COLUMNS, int(labels.bincount().max()))
    for label in labels.unique().tolist():
        for part, ids in enumerate((labels == label).nonzero().flatten().split(width)):
            blank = pixels.new_ones(width - len(ids), *pixels.shape[1:])
            rows.append(torch.cat([pixels[ids], blank]))
            names.append("" if part else classes[label])
    for grid in grids:
        if grid.suffix.lower() == ".png":
            save_grid(grid, rows, names)
        else:
            save_clip_grid(grid, rows, names)
    if pixels.shape[1] > 1:
        first = class_rows(labels, COLUMNS, 1)[:, 0]
        film = grids[0].with_suffix(".png")
        save_film(film, pixels[first], [classes[label] for label in labels[first].tolist()])
        grids = [*grids, film]
    if folder is None:
        return [*grids]
    labelled = [classes[label] for label in labels.tolist()]
    if pixels.shape[1] == 1:
        return [*grids, *save_pictures(folder, pixels, labelled)]
    ending = grids[-1].suffix
    paths = [folder / f"{number:05d}-{fit(name)}{ending}" for number, name in enumerate(labelled)]
    for path, clip in zip(paths, pixels, strict=True):
        (save_gif if ending == ".gif" else save_mp4)(path, clip)
    return [*grids, *paths]


def stream_place(out: Path | None, stem: str) -> Path:
    """The file of a stream: mp4 where PyAV is installed, else GIF, unless ``out`` names another."""
    if out is not None and out.suffix:
        if out.suffix.lower() not in CLIPS:
            raise UserError(f"--out {out}: write a folder, or a file of {' or '.join(CLIPS)}")
        return out
    return (out or Path("samples")) / f"{stem}{CLIPS[find_spec('av') is not None]}"


@contextmanager
def clip_writer(path: Path, fps: float) -> Iterator[Callable[[Float[Tensor, "f c h w"]], None]]:
    """Yields a function that takes the blocks of one clip in [-1, 1] as they come; of an mp4 it holds none of them."""
    if path.suffix.lower() == ".mp4":
        with mp4_writer(path, fps) as write:

            def write_block(pixels: Float[Tensor, "f c h w"]) -> None:
                for picture in enlarged(pixels):
                    write(picture)

            yield write_block
        return
    blocks: list[Tensor] = []
    yield blocks.append
    save_gif(path, torch.cat(blocks), fps)


def fit(text: str) -> str:
    """The text as a part of a file name: what is unfit becomes ``_``."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text)


def write_comparison(path: Path, teacher: LoadedModel, student: LoadedModel, recipe: str | None = None) -> None:
    """A picture of both on the same noise, a class a column: the teacher at its own number of steps, then each of the
    two at 4, 2 and 1 steps, as far as its sampler can take so many. recipe: names data that an export continues."""
    rows = [(teacher, len(teacher.sampling.resolved()))]
    rows += [
        (model, steps)
        for steps in COMPARED_STEPS
        for model in (teacher, student)
        if steps % model.sampling.rolling_blocks == 0
    ]
    pictures = [_one_of_each_class(model, model.sampling.with_steps(steps), None, recipe) for model, steps in rows]
    save_grid(path, pictures, [f"{model.name}, {steps}" for model, steps in rows])


def write_clips(paths: Sequence[Path], models: Sequence[LoadedModel], num_frames: int) -> None:
    """A clip of all models on the same noise, a class a column: causal ones go on for ``num_frames`` frames, the others
    stand still after their own length."""
    lengths = [num_frames if model.role.causal else None for model in models]
    rows = [_one_of_each_class(model, model.sampling, length) for model, length in zip(models, lengths, strict=True)]
    for path in paths:
        save_clip_grid(path, rows, [f"{model.name}, {len(model.sampling.resolved())}" for model in models])


def _one_of_each_class(
    model: LoadedModel, sampling: SamplingSection, num_frames: int | None, recipe: str | None = None
) -> PixelValues:
    labels = torch.arange(min(len(model.classes), COLUMNS))
    given = given_frames(model, labels.tolist(), recipe) if sampling.given_frames else None
    sampler = model.sampler(sampling, num_frames)
    made = generate(model.role, sampler, model.conditioner, labels, 0, device=model.device, given=given)
    return model.codec.decode(made.x0)

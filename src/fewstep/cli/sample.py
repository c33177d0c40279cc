"""``fewstep sample``: pictures from a model, made as it was trained to make them."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from fewstep.cli.console import listed, say, time_of
from fewstep.cli.export import MODEL_HELP
from fewstep.errors import UserError


def sample(
    model: Annotated[Path, typer.Argument(help=MODEL_HELP, show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="A PNG file (of clips a GIF or mp4), or a folder, to write; `samples/` if left out.",
            show_default=False,
        ),
    ] = None,
    num: Annotated[
        int | None,
        typer.Option("--num", min=1, help="Number of samples; 8 of each class if left out.", show_default=False),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label", help="Class to sample, by name or number; may be given several times.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the noise.")] = 0,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Other than the trained number of steps.", show_default=False)
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option("--guidance", min=0, help="Other than the trained guidance scale.", show_default=False),
    ] = None,
    frames: Annotated[
        int | None,
        typer.Option(
            "--frames", min=1, help="Other than the trained number of frames; causal models only.", show_default=False
        ),
    ] = None,
    embeddings: Annotated[
        Path | None,
        typer.Option(
            "--embeddings",
            help="Models of texts: a safetensors file of their embeddings; those of the data if left out.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Recipe that names the data whose clips are continued, for an export."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The trained weights instead of their average (EMA).")] = False,
    single_files: Annotated[bool, typer.Option("--single-files", help="Also write every sample as a file.")] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples made at once; does not change them.")] = 100,
    device: Annotated[str, typer.Option("--device", help="`auto`, `cpu`, `cuda`, `cuda:1`.")] = "auto",
) -> None:
    """Sample a model and write a grid, a class a row; of a video model it plays, as GIF and mp4.

    No option is needed: noise levels, solver and guidance travel with the weights, and a setting that departs from them
    warns. One seed gives the same samples, whatever the batch, and the same noise for every model of the same shape.
    Models that are told by texts write latents, as their VAE takes them, to a safetensors file.
    """
    from fewstep.cli.judging import given_frames
    from fewstep.cli.latents import write_latents
    from fewstep.cli.model import load_model
    from fewstep.cli.pictures import changes, choose_labels, places, write_pictures
    from fewstep.evaluate.sample import departures, generate
    from fewstep.observe.loops import telling

    loaded = load_model(model, raw=raw, device=device, texts=True)
    if raw and loaded.source.holds == ("raw",):
        warnings.warn(f"--raw has no effect: {model} holds one set of weights", stacklevel=2)
    sampling = loaded.sampling.with_steps(steps) if steps else loaded.sampling
    if guidance is not None and not math.isfinite(guidance):
        raise UserError(f"--guidance {guidance}: write a number")
    if guidance is not None:
        sampling = sampling.model_copy(update={"guidance_scale": guidance})
    for departure in departures(loaded.sampling, sampling):
        warnings.warn(departure, stacklevel=2)
    if frames is not None and frames != loaded.shape[0] and loaded.role.causal is None:
        raise UserError(
            f"--frames {frames}: {model} makes clips of {loaded.shape[0]} frame(s) as a whole; leave the option out"
        )
    sampler = loaded.sampler(sampling, frames)
    changed: dict[str, Any] = {
        "raw": raw and loaded.source.holds != ("raw",),
        "guidance": sampling.guidance_scale if sampling.guidance_scale != loaded.sampling.guidance_scale else None,
        "num": num,
    }
    stem, longer = f"{loaded.name}-steps{len(sampler.sigmas)}-seed{seed}", [f"frames{frames}"] if frames else []
    if loaded.by_text:
        if label or single_files:
            raise UserError(f"--label, --single-files: {model} makes latents of texts; leave both out")
        texts: dict[str, Any] = {"num": num, "file": embeddings, "recipe": recipe, "seed": seed, "batch": batch}
        write_latents(loaded, sampler, sampling, out, "-".join([stem, *changes([], **changed), *longer]), **texts)
        return
    if embeddings is not None:
        raise UserError(f"--embeddings {embeddings}: {model} is told by classes; leave the option out, or use --label")
    chosen = choose_labels(label or [], loaded.classes, num)
    named = [loaded.classes[index] for index in dict.fromkeys(chosen.tolist())] if label else []
    given = given_frames(loaded, chosen.tolist(), recipe) if sampling.given_frames else None
    settings: dict[str, Any] = {"batch": batch, "device": loaded.device, "given": given}
    with telling():
        made = generate(loaded.role, sampler, loaded.conditioner, chosen, seed, **settings)
    pixels = loaded.codec.decode(made.x0)
    place = "-".join([stem, *changes(named, **changed), *longer])
    grids, folder = places(out, place, clips=pixels.shape[1] > 1)
    paths = write_pictures(pixels, chosen, loaded.classes, grids, folder if single_files else None)
    solver = f"{len(sampler.sigmas)} steps ({sampler.solver}), guidance {sampler.guidance_scale:g}"
    speed = 1000 * sum(made.batch_s) / len(chosen)
    say(
        f"{len(chosen)} samples of {model} (iteration {loaded.source.iteration}, {loaded.weights} weights): {solver}, "
        f"{made.network_calls:g} network calls and {time_of(speed)} a sample on {loaded.device.type}"
    )
    pictures = paths[: len(paths) - len(chosen)] if single_files else paths
    single = [f"{len(chosen)} single files in {folder}"] if single_files else []
    say(f"Wrote {listed([*pictures, *single])}")

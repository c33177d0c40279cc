"""``fewstep stream``: frames of a causal model as they are made, for as long as it is wanted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from fewstep.cli.console import say, time_of
from fewstep.cli.export import MODEL_HELP
from fewstep.errors import UserError, UserErrors


def stream(
    model: Annotated[Path, typer.Argument(help=MODEL_HELP, show_default=False)],
    frames: Annotated[int, typer.Option("--frames", min=1, help="Frames of the clip; its last block is whole.")] = 96,
    label: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            help="Class to show, by name or number, the first one if left out; with `@48` behind it from frame 48 on.",
            show_default=False,
        ),
    ] = None,
    recache: Annotated[
        bool, typer.Option("--recache", help="When the class changes, see the last frames anew as of the new class.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="An mp4 or GIF to write; in `samples/` if left out.", show_default=False),
    ] = None,
    fps: Annotated[float, typer.Option("--fps", help="Frames per second of the file.")] = 8.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the noise.")] = 0,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Other than the trained number of steps.", show_default=False)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Recipe that names the data whose clips are continued, for an export."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The trained weights instead of their average (EMA).")] = False,
    device: Annotated[str, typer.Option("--device", help="`auto`, `cpu`, `cuda`, `cuda:1`.")] = "auto",
) -> None:
    """Stream a causal video model: block after block, each seeing the ones before it, into one file.

    Memory stays the same for any length where the model was trained with a window (a GIF alone holds its frames until
    the end). `--label "Bag, circle" --label
    "Coat, bounce@48"` changes the class at frame 48. Ctrl-C ends the stream; what was made is kept.
    """
    import torch

    from fewstep.cli.judging import given_frames
    from fewstep.cli.model import load_model
    from fewstep.cli.pictures import clip_writer, fit, stream_place
    from fewstep.evaluate.clip import check_fps
    from fewstep.evaluate.sample import departures
    from fewstep.rng import Draw
    from fewstep.rollout.stream import Stream
    from fewstep.train import StopRequest

    loaded = load_model(model, raw=raw, device=device)
    if loaded.role.causal is None:
        small = f"; make it causal: fewstep train wan_nano_video/teacher_forcing student.init={model}"
        raise UserError(
            f"{model} makes whole clips and cannot be streamed{small if loaded.shape[0] > 1 else ''}; or sample it: "
            f"fewstep sample {model}"
        )
    role: Any = loaded.role
    changed = [f"frames{frames}", *([fit("-".join(["label", *label]))] if label else [])]
    changed += [*([f"steps{steps}"] if steps else []), *(["raw"] if raw else []), *(["recache"] if recache else [])]
    causal, place = role.causal, loaded.device
    if recache and causal.window is not None and causal.positions == "absolute":
        raise UserError(
            "--recache numbers the frames in sight anew, and the model was trained at absolute positions; train it "
            "with student.causal.positions: reindexed (without a sink both are the same), or leave --recache out"
        )
    path = stream_place(out, "-".join([f"{loaded.name}-stream-seed{seed}", *changed]))
    check_fps(path, fps)
    shown = scheduled(label or [], loaded.classes, causal, frames)
    conds = {index: loaded.conditioner.condition(torch.tensor([index], device=place)) for index in shown.values()}

    def cond_of(block: int) -> Any:
        return conds[shown[max(start for start in shown if start <= block)]]

    sampling = loaded.sampling.with_steps(steps) if steps else loaded.sampling
    for departure in departures(loaded.sampling, sampling):
        warnings.warn(departure, stacklevel=2)
    uncond = loaded.conditioner.null(1, place) if sampling.guidance_scale != 1.0 else None
    num_blocks = causal.block_from(max(frames, sampling.given_frames + 1))
    sampler: Any = loaded.sampler(sampling, causal.start(num_blocks))
    given = given_frames(loaded, [shown[0]], recipe) if sampling.given_frames else None
    made = Stream(
        sampler,
        role,
        cond_of,
        Draw(seed, "sample", 0, torch.zeros(1, dtype=torch.int64, device=place)),
        uncond=uncond,
        num_blocks=num_blocks,
        given=None if given is None else given.to(place),
        history="recache" if recache else "keep",
        timed=True,
    )
    with StopRequest("Stopping after this block; once more stops at once.") as stop, clip_writer(path, fps) as write:
        if given is not None:
            write(loaded.codec.decode(given)[0])
        for x0 in made:
            write(loaded.codec.decode(x0)[0])
            if stop.asked:
                break
    first, num_given = 1000 * (made.first_frame_s or 0.0), 0 if given is None else given.shape[1]
    begun = f", the first {num_given if num_given > 1 else ''}".rstrip() + " of them given" if num_given else ""
    say(
        f"{num_given + made.num_frames} frames of {model} ({loaded.weights} weights)"
        f"{begun}: {len(sampling.resolved())} steps a block of "
        f"{causal.block_frames}; first frame after {time_of(first)}, then {made.frames_per_s:.3g} frames per second on "
        f"{place.type}"
    )
    say(f"Wrote {path}")


def scheduled(labels: list[str], classes: tuple[str, ...], causal: Any, frames: int) -> dict[int, int]:
    """The class from each block on; the first class until the first change.

    Raises UserError for an unknown class, for a frame inside a block or past the end, and for two classes at one frame.
    """
    from fewstep.cli.pictures import class_number

    found: dict[int, int] = {}
    errors = []
    for text in labels:
        name, at, frame = text.rpartition("@")
        if not at or not frame.isdecimal():
            name, frame = text, "0"
        block = causal.block_from(int(frame))
        if causal.start(block) != int(frame):
            before, after = causal.start(block - 1), causal.start(block)
            errors.append(f"--label {text}: frame {frame} is inside a block; write {before} or {after}")
        elif int(frame) >= frames:
            errors.append(f"--label {text}: the stream ends at {frames}; write an earlier frame, or more --frames")
        elif block in found:
            errors.append(f"--label {text}: another class is shown from frame {frame} on; write @ and a later frame")
        try:
            found[block] = class_number(name, classes, text)
        except UserError as error:
            errors += error.args
    if errors:
        raise UserErrors(errors)
    return {0: 0, **found}

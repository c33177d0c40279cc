"""``fewstep eval``: how good samples are, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewstep.cli.console import say, show
from fewstep.cli.export import MODEL_HELP
from fewstep.errors import UserError

if TYPE_CHECKING:
    from fewstep.models.blocks import CausalSection


def evaluate(
    model: Annotated[Path, typer.Argument(help=MODEL_HELP, show_default=False)],
    num_samples: Annotated[int, typer.Option("--num-samples", min=1, help="Samples for each seed.")] = 1000,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            "--steps", min=1, help="Number of steps; may be given several times. The trained one if left out."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="How many seeds, counted from 0; gives a spread.")] = 1,
    per_stop: Annotated[
        bool, typer.Option("--per-stop", help="Also judge the prediction at every step of the ladder.")
    ] = False,
    long: Annotated[
        int | None,
        typer.Option(
            "--long",
            min=1,
            help="Also judge clips of that many frames, window by window; causal models only.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option("--compare", help="Another model, such as the teacher, on the same noise; its trained sampler."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="Recipe that names data and extractor, for an export, which names none."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON to write; `evaluation.json` of the run, or here, if left out.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The trained weights instead of their average (EMA).")] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples made at once.")] = 100,
    device: Annotated[str, typer.Option("--device", help="`auto`, `cpu`, `cuda`, `cuda:1`.")] = "auto",
) -> None:
    """Measure a model: Frechet distance, class accuracy, diversity, time and network calls for an image.

    Samples are compared with data that no training saw, by a frozen network whose hash is recorded; the first row says
    what real data reach.
    """
    from fewstep.cli.judging import long_clips, measure, open_judge, show_stops
    from fewstep.cli.model import load_model
    from fewstep.cli.pictures import write_comparison
    from fewstep.evaluate.drift import drift, drift_table
    from fewstep.evaluate.evaluation import evaluate_real, evaluation_table, save_evaluations
    from fewstep.observe.loops import telling
    from fewstep.observe.report import write_report

    loaded = load_model(model, raw=raw, device=device)
    others = [load_model(path, raw=raw, device=device) for path in compare or []]
    if long is not None and loaded.role.causal is None:
        raise UserError(f"--long {long}: {model} makes clips of {loaded.shape[0]} frame(s) as a whole; leave it out")
    if long is not None and loaded.role.causal is not None:
        refuse_length(long, loaded.role.causal, loaded.shape[0])
    with telling():
        judge, train = open_judge(loaded, recipe, num_samples)
        for other in others:
            if (other.classes, other.shape) != (loaded.classes, loaded.shape):
                raise UserError(
                    f"--compare {other.source.path}: its classes or its samples' shape are not those of {model}"
                )
        settings: dict[str, Any] = {
            "num_samples": num_samples,
            "seeds": tuple(range(seeds)),
            "batch": batch,
            "recipe": recipe,
        }
        rows = [evaluate_real(judge, train, num_samples)]
        rows += [measure(other, judge, None, **settings) for other in others]
        rows += [measure(loaded, judge, count, stops=per_stop, **settings) for count in steps or [None]]
        if long is not None:
            judged = [*others, *[loaded] * (len(rows) - 1 - len(others))]
            for place_of, one in enumerate(judged, 1):
                if one.role.causal is not None and (one is not loaded or place_of == len(judged)):
                    pixels, labels = long_clips(one, num_samples, long, recipe)
                    rows[place_of] = rows[place_of].model_copy(update={"drift": tuple(drift(pixels, labels, judge))})
    show(evaluation_table(rows))
    for row in rows:
        show_stops(row)
        if row.drift:
            show(drift_table(row.drift, f"{row.name}: clips of {long} frames, window by window"))
    is_run = loaded.source.kind == "run"
    place = out or (model if is_run else Path()) / "evaluation.json"
    save_evaluations(place, rows)
    say(f"Wrote {place}")
    if is_run and out is None:
        if others:
            write_comparison(model / "samples" / "compare.png", others[0], loaded, recipe)
        say(f"Wrote {write_report(model)}")


def refuse_length(long: int, causal: CausalSection, window: int) -> None:
    """Raises UserError, with the nearest lengths that will do, unless ``long`` frames are whole blocks and hold a
    window."""
    block = causal.block_from(long)
    if causal.start(block) == long >= window:
        return
    first = causal.block_from(window)
    nearest = max(block - 1, first)
    raise UserError(
        f"--long {long}: write {causal.start(nearest)} or {causal.start(nearest + 1)}, or another length that is whole "
        f"blocks of {causal.block_frames} frames and not below the {window} of the data"
    )

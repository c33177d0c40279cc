"""A model's quality and cost at one number of steps, over several seeds: measured, kept as JSON, shown as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fewstep.errors import UserError
from fewstep.evaluate.api import LabelledClips
from fewstep.evaluate.cache import written_whole
from fewstep.evaluate.drift import Drift
from fewstep.evaluate.judge import HEADINGS, Judge, Quality, filled, mean, spread
from fewstep.evaluate.sample import LabelConditioner, Sampler, Samples, balanced_labels, generate
from fewstep.models.api import FlowModel
from fewstep.models.codec import Codec
from fewstep.shapes import Latents


class Stop(Quality):
    """The quality of the predictions of x0 at one step of the ladder, mean over the seeds."""

    stop: int
    """Index of the step."""
    sigma: float
    """Noise level of the step."""


class Evaluation(Quality):
    """The mean over the seeds, and what it rests on."""

    name: str
    """Of the model, as the table shows it."""
    num_steps: int
    """Steps of the sampler; 0 for real data."""
    network_calls: float
    """Evaluations of the network for one sample."""
    ms_per_image: float | None
    """Milliseconds of sampling for one image or clip, at ``batch``: the median over batches, after one to warm up."""
    num_samples: int
    """For each seed."""
    num_frames: int = 1
    """Of one sample; 1 for images."""
    seeds: tuple[int, ...] = ()
    per_seed: tuple[Quality, ...] = ()
    """In the order of the seeds."""
    stops: tuple[Stop, ...] = ()
    """From the first step to the last; empty where it was not asked for."""
    drift: tuple[Drift, ...] = ()
    """Of clips longer than those of the data, window by window; empty where none were made."""
    sigmas: tuple[float, ...] = ()
    solver: str = ""
    guidance_scale: float = 1.0
    batch: int = 0
    """Samples made at once."""
    device: str = ""
    """Where the time was taken."""
    extractor: str = ""
    """Id of the extractor; distances compare only under one id."""
    extractor_accuracy: float | None = None
    """On the reference."""
    reference: str = ""
    """Hash of the real data."""

    @property
    def frames_per_s(self) -> float | None:
        """Frames that are made in a second; None for real data."""
        return 1000 * self.num_frames / self.ms_per_image if self.ms_per_image else None

    @property
    def spread(self) -> Quality:
        """The standard deviation between the seeds; NaN for one seed."""
        return spread(self.per_seed)


def evaluate(
    name: str,
    model: FlowModel,
    sampler: Sampler,
    conditioner: LabelConditioner,
    codec: Codec,
    judge: Judge,
    *,
    num_samples: int,
    seeds: Sequence[int] = (0,),
    batch: int = 100,
    stops: bool = False,
    given: Latents | None = None,
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Samples of all classes alike, ``num_samples`` for each seed. Models evaluated with one seed start from the same
    noise. ``given``: clean frames that each begins with, for samplers that continue clips.

    ``stops`` also judges the predictions of every step of the ladder, which takes n (n - 1) / 2 further calls a sample
    for n steps. Raises UserError for too few samples.
    """
    judge.check(num_samples, "samples")
    labels = balanced_labels(num_samples, len(judge.classes))

    def sampled(seed: int, stop: int | None = None, num: int = num_samples) -> Samples:
        start = None if given is None else given[:num]
        return generate(
            model, sampler, conditioner, labels[:num], seed, batch=batch, stop=stop, given=start, device=device
        )

    def judged(samples: Samples) -> Quality:
        return judge(codec.decode(samples.x0), labels)

    def at(stop: int) -> Quality:
        return mean([judged(sampled(seed, stop)) for seed in seeds]) if stop < last else overall

    last = len(sampler.sigmas) - 1
    sampled(seeds[0], num=min(batch, num_samples))  # the first batch is slower than those that count
    runs = [sampled(seed) for seed in seeds]
    per_seed = tuple(judged(run) for run in runs)
    overall = mean(per_seed)
    return Evaluation(
        **overall.model_dump(),
        name=name,
        num_steps=len(sampler.sigmas),
        network_calls=runs[0].network_calls,
        ms_per_image=_ms_per_image(runs, batch, num_samples),
        num_samples=num_samples,
        num_frames=runs[0].x0.shape[1],
        seeds=tuple(seeds),
        per_seed=per_seed,
        stops=tuple(
            Stop(**at(stop).model_dump(), stop=stop, sigma=sigma)
            for stop, sigma in enumerate(sampler.sigmas if stops else ())
        ),
        sigmas=sampler.sigmas,
        solver=sampler.solver,
        guidance_scale=sampler.guidance_scale,
        batch=batch,
        device=device_name(device),
        **_judged_by(judge),
    )


def evaluate_real(judge: Judge, dataset: LabelledClips, num_samples: int) -> Evaluation:
    """The row of real data: as many items of ``dataset`` as there are samples, against the reference."""
    num_samples = min(num_samples, len(dataset))
    quality = judge.real(dataset, num_samples)
    return Evaluation(
        **quality.model_dump(),
        name="real data",
        num_steps=0,
        network_calls=0.0,
        ms_per_image=None,
        num_samples=num_samples,
        num_frames=judge.num_frames,
        **_judged_by(judge),
    )


def save_evaluations(path: Path, evaluations: Sequence[Evaluation]) -> None:
    """A JSON list; what is not a number is the text ``"NaN"``."""
    with written_whole(path) as part:
        part.write_bytes(_LIST.dump_json(list(evaluations), indent=1))


def load_evaluations(path: Path) -> list[Evaluation]:
    """Raises UserError if the file is missing or no such list."""
    try:
        return _LIST.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"'{path}' holds no evaluations: {error}") from error


def evaluation_table(evaluations: Sequence[Evaluation]) -> Table:
    """One row for each, in the order given; the spread over the seeds where there are several. Of images it tells the
    milliseconds that one takes, of clips the frames that are made in a second."""
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, caption=_caption(evaluations), caption_justify="left"
    )
    table.add_column("Model", no_wrap=True)
    metrics = filled(evaluations)
    clips = any(entry.num_frames > 1 for entry in evaluations)
    for heading in ("Steps", "Calls", *(HEADINGS[name] for name in metrics), "fps" if clips else "ms"):
        table.add_column(heading, justify="right")
    for entry in evaluations:
        quality = [_with_spread(entry, metric) for metric in metrics]
        speed = entry.frames_per_s if clips else entry.ms_per_image
        steps, calls = (str(entry.num_steps), f"{entry.network_calls:g}") if entry.num_steps else ("", "")
        table.add_row(entry.name, steps, calls, *quality, _round(speed))
    return table


def _round(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def device_name(device: torch.device | str) -> str:
    """The GPU's name, else the kind of device."""
    kind = torch.device(device).type
    return torch.cuda.get_device_name(device) if kind == "cuda" else kind


_LIST = TypeAdapter(list[Evaluation])


def _judged_by(judge: Judge) -> dict[str, Any]:
    return {
        "extractor": judge.extractor.id,
        "extractor_accuracy": judge.accuracy,
        "reference": judge.reference_id,
    }


def _ms_per_image(runs: Sequence[Samples], batch: int, num_samples: int) -> float:
    """The median over whole batches; over all where none is whole."""
    whole = max(1, num_samples // batch)
    return 1000 * median(seconds for run in runs for seconds in run.batch_s[:whole]) / min(batch, num_samples)


def _with_spread(entry: Evaluation, metric: str) -> str:
    value = getattr(entry, metric)
    if value is None:
        return ""
    several = len(entry.per_seed) > 1
    return f"{value:.3g} ± {getattr(entry.spread, metric):.1g}" if several else f"{value:.3g}"


def _caption(evaluations: Sequence[Evaluation]) -> str:
    samples = _range([entry.num_samples for entry in evaluations])
    seeds = _range([max(1, len(entry.seeds)) for entry in evaluations])
    judges = ", ".join(sorted({entry.extractor for entry in evaluations}))
    clips = any(entry.num_frames > 1 for entry in evaluations)
    costs = "calls of the network are for one sample" if clips else "calls of the network and ms are for one sample"
    return (
        f"{samples} samples, {seeds} seed{'s' * (seeds != '1')}; {costs}.\n"
        f"Frechet distance to real data, seen by {judges}."
    )


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts, default=0), max(counts, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"

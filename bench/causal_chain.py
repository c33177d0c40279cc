"""The chain from a bidirectional video teacher to causal few-step students, in the variants that papers compare.

    python -m bench.causal_chain                                       everything, on all GPUs
    python -m bench.causal_chain --time-limit 500                      a part of it; the same command goes on
    python -m bench.causal_chain --time-limit 500 --pack runs/chain    the same, going on on another machine: there
    python -m bench.causal_chain --unpack runs/chain --pack runs/chain
    python -m bench.causal_chain --table-only
    python -m bench.causal_chain --common data.path=/data/fashion-mnist --overrides 'dmd-*' iterations=400 \
        --only teacher tf cd dmd-cd --seeds 0

Teacher forcing against diffusion forcing; DMD after initialisation by consistency distillation, by ODE trajectories of
the causal and of the bidirectional teacher, and by none; fewer steps, frame by frame, a sink, rolling forcing; and all
of them in clips of four times the training length. Prints tables of the means over the seeds and of each; what was not
run is printed as not run. Writes the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.pack import pack, unpack
from bench.runs import Judging, Run, in_order
from bench.workers import add_options, devices_of, work

RECIPES = "wan_small_video"
NOT_RUN = "not run"
FRAMES, TIMES_LONGER = 12, 4
ALWAYS = ("validation=null",)
"""What is judged afterwards is not validated on the way."""


@dataclass(frozen=True)
class Kind:
    """A run of every seed, or of the first alone. starts: the run that each role begins from."""

    name: str
    told: str
    recipe: str
    starts: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    steps: tuple[int, ...] = (4,)
    all_seeds: bool = True


def dmd(name: str, student: str, told: str, *overrides: str, steps: int = 4, all_seeds: bool = False) -> Kind:
    """A student by self-forcing DMD, scored by the bidirectional teacher."""
    starts = {"teacher": "teacher", "student": student}
    return Kind(name, told, "self_forcing", starts, overrides, (steps,), all_seeds)


def longer(chunks: int, overlap: int) -> tuple[str, ...]:
    """Rollouts that go on; the critic, which begins as the teacher, catches up with the student for two streams."""
    return (
        f"sampling.stream_chunks={chunks}",
        f"sampling.overlap_frames={overlap}",
        f"method.critic_warmup_updates={CATCH_UP}",
    )


def fewer(steps: int) -> tuple[str, ...]:
    return (f"sampling.steps={steps}", "sampling.first_block_steps=4")


CATCH_UP = 24
"""Updates of the critic before the first one of a student that is tuned further."""
FRAME_WISE = ("student.causal.block_frames=1",)
SINK = ("student.causal.window=12", "student.causal.sink=3")
ROLLING = ("student.causal.window=9", "sampling.rolling_blocks=2")
"""Room for two blocks that are denoised together, and a finished one before them."""
CORE = (
    Kind("teacher", "bidirectional teacher", "sft", steps=(50, 20, 4)),
    Kind("tf", "teacher forcing (TF)", "teacher_forcing", {"student": "teacher"}, steps=(20, 4)),
    Kind("cd", "consistency distillation (CD) of TF", "consistency", {"teacher": "tf"}),
    dmd("dmd-cd", "cd", "DMD after CD", all_seeds=True),
    Kind("df", "diffusion forcing (DF)", "diffusion_forcing", {"student": "teacher"}, steps=(20, 4)),
    Kind("ode-ar", "ODE of TF", "ode_init", {"teacher": "tf"}),
    Kind("ode-bi", "ODE of the bidirectional teacher", "ode_init_bidirectional", {"teacher": "teacher"}),
    dmd("dmd-ode-ar", "ode-ar", "DMD after ODE of TF", all_seeds=True),
    dmd("dmd-ode-bi", "ode-bi", "DMD after ODE of the bidirectional teacher", all_seeds=True),
    dmd("dmd-none", "teacher", "DMD after none: the bidirectional teacher's weights, run causally", all_seeds=True),
)
"""What is run of one seed before the next one, each after those that it starts from."""
MORE = (
    dmd("dmd-sink", "cd", "DMD after CD, window and sink", *SINK),
    dmd("dmd-rolling", "cd", "DMD after CD by rolling forcing, two blocks together", *ROLLING),
    dmd("dmd-2step", "cd", "DMD after CD, 4 steps for the first block", *fewer(2), steps=2),
    dmd("dmd-1step", "cd", "DMD after CD, 4 steps for the first block", *fewer(1), steps=1),
    dmd("dmd-long", "dmd-cd", "DMD after CD, then as long again in streams of 6 chunks", *longer(6, overlap=0)),
    dmd("dmd-long-overlap", "dmd-cd", "the same, chunks that overlap by 3 frames", *longer(6, overlap=3)),
    dmd("dmd-more", "dmd-cd", "the same without streams", f"method.critic_warmup_updates={CATCH_UP}"),
    Kind("tf-frame", "TF, frame by frame", "teacher_forcing", {"student": "teacher"}, FRAME_WISE, (20, 4), False),
    Kind("cd-frame", "CD of it", "consistency", {"teacher": "tf-frame"}, FRAME_WISE, (4,), False),
    dmd("dmd-frame", "cd-frame", "DMD after CD, frame by frame", *FRAME_WISE),
    dmd("dmd-tf", "tf", "DMD after TF, without few-step initialisation", all_seeds=True),
)
"""What comes after all seeds."""
KINDS = (*CORE, *MORE)


def main() -> None:
    options = parse(sys.argv[1:])
    options.out.mkdir(parents=True, exist_ok=True)
    if options.unpack:
        unpack(options.unpack, options.out)
    runs, complete = planned(options), True
    chosen = [run for run in runs if any(fnmatch(run.name, pattern) for pattern in options.only)]
    if not options.table_only:
        judging = Judging(options.samples, options.batch, options.long_samples)
        complete = work(in_order(chosen, judging), devices_of(options), options.time_limit)
    report = summary(runs, options.seeds)
    (options.out / "causal_chain.json").write_text(json.dumps(report, indent=1))
    print(markdown(report), flush=True)
    if options.pack:
        print("packed:", *pack(chosen, options.out, options.pack, options.max_mib))
    raise SystemExit(0 if complete else 3)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="runs, such as tf or 'dmd-*'")
    parser.add_argument("--common", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every run")
    parser.add_argument(
        "--overrides", nargs="+", action="append", default=[], metavar=("NAME", "KEY=VALUE"), help="of some runs"
    )
    parser.add_argument("--samples", type=int, default=2000, help="clips for every figure")
    parser.add_argument("--long-samples", type=int, default=500, help="long clips for every window of the drift")
    parser.add_argument("--batch", type=int, default=1000, help="clips made at once; does not change them")
    add_options(parser)
    parser.add_argument("--time-limit", type=float, help="seconds until all processes are asked to stop")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write FILE.1of3 ...: what going on elsewhere needs")
    parser.add_argument("--max-mib", type=float, default=16.0, help="size of each of these files")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="begin with what FILE.1of3 ... hold")
    parser.add_argument("--table-only", action="store_true", help="of what is judged; runs nothing")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-causal-chain"))
    return parser.parse_args(arguments)


def planned(options: argparse.Namespace) -> list[Run]:
    """All runs: seed by seed what is core, then the rest."""
    core = [(kind, seed) for seed in options.seeds for kind in CORE]
    more = [(kind, seed) for kind in MORE for seed in (options.seeds if kind.all_seeds else options.seeds[:1])]
    return [run_of(kind, seed, options) for kind, seed in (*core, *more)]


def run_of(kind: Kind, seed: int, options: argparse.Namespace) -> Run:
    frames = next((int(text[12:]) for text in options.common if text.startswith("data.frames=")), FRAMES)
    folder = options.out / f"seed{seed}"
    given = [text for name, *texts in options.overrides if fnmatch(kind.name, name) for text in texts]
    return Run(
        kind.name,
        f"{RECIPES}/{kind.recipe}",
        (*ALWAYS, *options.common, *kind.overrides, *given),
        seed,
        folder / kind.name,
        tuple((role, folder / name) for role, name in kind.starts.items()),
        kind.steps,
        0 if kind.name == "teacher" else TIMES_LONGER * frames,
    )


def summary(runs: Sequence[Run], seeds: Sequence[int]) -> dict[str, Any]:
    """For every kind of run, and every number of steps, what each seed reached; None for what was not run."""
    judged = {(run.name, run.seed): json.loads(run.evaluation.read_text()) for run in runs if run.evaluation.exists()}
    real = [evaluation[0] for evaluation in list(judged.values())[:1]]
    rows = [{"name": "real data", "told": "", "steps": None, "each": real, "long": False}]
    for kind in KINDS:
        own = [run for run in runs if run.name == kind.name]
        for steps in kind.steps:
            each = [at(judged.get((run.name, run.seed), []), steps) for run in own]
            long = kind.name != "teacher" and steps == kind.steps[0]
            rows.append({"name": kind.name, "told": kind.told, "steps": steps, "each": each, "long": long})
    places = [run.folder / "environment.json" for run in runs]
    environment = next((json.loads(place.read_text()) for place in places if place.exists()), {})
    return {"rows": rows, "seeds": list(seeds), "environment": environment}


def at(evaluation: Sequence[dict[str, Any]], steps: int) -> dict[str, Any] | None:
    return next((row for row in evaluation if row["num_steps"] == steps), None)


def markdown(report: dict[str, Any]) -> str:
    counts = {one["num_samples"] for row in report["rows"][1:] for one in row["each"] if one}
    samples = f"{' or '.join(f'{count:,}' for count in sorted(counts)) or 'no'} clips a figure"
    where = ", ".join(f"{key} {value}" for key, value in report["environment"].items())
    return "\n".join(
        [
            f"{samples}, seeds {report['seeds']}; {where}",
            "",
            "| run | model | steps | Frechet distance | seeds | item | motion | error (px) | network calls |",
            "|---|---|---|---|---|---|---|---|---|",
            *map(quality_line, report["rows"]),
            "",
            *drift_lines(report["rows"][1:]),
        ]
    )


def quality_line(row: dict[str, Any]) -> str:
    each = [f"{one['frechet']:.3g}" if one else NOT_RUN for one in row["each"]]
    metrics = ("item_accuracy", "motion_accuracy", "motion_error", "network_calls")
    cells = [row["name"], row["told"], row["steps"] or "", averaged(row, "frechet"), " / ".join(each)]
    return line([*cells, *(averaged(row, metric) for metric in metrics)])


def drift_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The quality of the first and of the last window of long clips, for the trained number of steps."""
    head = ["run", "steps", "Frechet, window by window", "item, first and last", "error (px), first and last"]
    lines = [line(head), "|---" * len(head) + "|"]
    for row in rows:
        if not row["long"]:
            continue
        found = [one["drift"] for one in row["each"] if one and one["drift"]]
        cells = [row["name"], row["steps"], *[NOT_RUN] * 3]
        if found:
            windows = [{key: mean_of(same, key) for key in same[0]} for same in zip(*found, strict=True)]
            ends = [windows[0], windows[-1]]
            cells[2] = " / ".join(f"{window['frechet']:.3g}" for window in windows)
            cells[3] = " / ".join(f"{window['item_accuracy']:.3g}" for window in ends)
            cells[4] = " / ".join(f"{window['motion_error']:.3g}" for window in ends)
        lines.append(line(cells))
    return lines


def averaged(row: dict[str, Any], metric: str) -> str:
    values = [one for one in row["each"] if one and one[metric] is not None]
    return f"{mean_of(values, metric):.3g}" if values else NOT_RUN


def mean_of(found: Sequence[dict[str, Any]], metric: str) -> float:
    return fmean(float(one[metric]) for one in found)


def line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()

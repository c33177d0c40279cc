"""Quality of distillation: teachers and their students over several seeds, judged on the same noise.

    python -m bench.distillation --teacher wan_nano/sft --student wan_nano/dmd2 --seeds 0 1 2 --samples 5000
    python -m bench.distillation --teacher wan_small/sft --student wan_small/dmd2_4step --student wan_small/dmd2_1step \
        --student wan_small/dmd2_4step method.gan=null discriminator=null --samples 10000 --batch 2000

Every seed trains its own teacher, and its students from that. A student is a recipe and, after it, overrides of it.
Prints the Frechet distance of every model (mean of the seeds, and each), each student's ratio to its teacher at the
reference number of steps and at as many steps as its own, and the last validation against the best one; writes the same
as JSON. Finished runs in --out are kept, so that an interrupted bench goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import mean

from bench.runs import Judging, Run, in_order
from bench.workers import add_options, devices_of, work
from fewstep.observe.sinks import read_rows

WHERE = ("data.path=", "engine.", "checkpoint.", "observe.")
"""Overrides that say where and how fast a run goes, not what it makes: a student is not named by them."""


def main() -> None:
    options = parse(sys.argv[1:])
    options.out.mkdir(parents=True, exist_ok=True)
    teachers, students = planned(options)
    begun = time.perf_counter()
    tasks = in_order([*teachers, *students], Judging(options.samples, options.batch))
    if not work(tasks, devices_of(options)):
        raise SystemExit("not everything is done; the same command goes on")
    rows = summary(teachers, students, options.reference_steps)
    report = {"rows": rows, "took_s": time.perf_counter() - begun, "samples": options.samples, "seeds": options.seeds}
    report["environment"] = json.loads((teachers[0].folder / "environment.json").read_text())
    (options.out / "distillation.json").write_text(json.dumps(report, indent=1))
    print(markdown(report))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", nargs="+", required=True, metavar=("RECIPE", "OVERRIDE"))
    parser.add_argument("--student", nargs="+", action="append", default=[], metavar=("RECIPE", "OVERRIDE"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=5000, help="samples for every figure")
    parser.add_argument("--batch", type=int, default=500, help="samples made at once; does not change them")
    parser.add_argument("--teacher-steps", nargs="+", type=int, default=[50, 20, 4, 2, 1])
    parser.add_argument("--reference-steps", type=int, default=50, help="of the teacher, to hold students to")
    add_options(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/bench-distillation"))
    return parser.parse_args(arguments)


def planned(options: argparse.Namespace) -> tuple[list[Run], list[Run]]:
    """The teachers and the students of all seeds."""
    teachers, students = [], []
    for seed in options.seeds:
        folder = options.out / f"seed{seed}"
        recipe, *overrides = options.teacher
        steps = tuple(options.teacher_steps)
        teachers.append(Run("teacher", recipe, tuple(overrides), seed, folder / "teacher", steps=steps))
        for number, (recipe, *overrides) in enumerate(options.student):
            name = " ".join([recipe, *(text for text in overrides if not text.startswith(WHERE))])
            starts = (("teacher", folder / "teacher"),)
            students.append(Run(name, recipe, tuple(overrides), seed, folder / f"student{number}", starts))
    return teachers, students


def summary(teachers: list[Run], students: list[Run], reference_steps: int) -> list[dict]:
    """One row for the real data, for the teacher at each number of steps, and for every student."""
    judged = {run.folder: json.loads(run.evaluation.read_text()) for run in (*teachers, *students)}
    of_teacher = {
        teacher.seed: {row["num_steps"]: row["frechet"] for row in judged[teacher.folder]} for teacher in teachers
    }
    rows = [row_of("real data", None, [judged[run.folder][0] for run in teachers])]
    for steps in teachers[0].steps:
        found = [next(row for row in judged[run.folder] if row["num_steps"] == steps) for run in teachers]
        rows.append(row_of("teacher", steps, found))
    for name in dict.fromkeys(student.name for student in students):
        runs = [student for student in students if student.name == name]
        found = [judged[run.folder][-1] for run in runs]
        steps = found[0]["num_steps"]
        row = row_of(name, steps, found)
        pairs = [(one["frechet"], of_teacher[run.seed]) for one, run in zip(found, runs, strict=True)]
        row["to_reference"] = mean(distance / teacher[reference_steps] for distance, teacher in pairs)
        if steps in teachers[0].steps:
            row["to_same_steps"] = mean(distance / teacher[steps] for distance, teacher in pairs)
        row["last_to_best"] = max(filter(None, (last_to_best(run.folder, steps) for run in runs)), default=None)
        rows.append(row)
    return rows


def row_of(name: str, steps: int | None, found: list[dict]) -> dict:
    distances = [one["frechet"] for one in found]
    accuracies = [one["accuracy"] for one in found]
    return {"name": name, "steps": steps, "frechet": mean(distances), "each": distances, "accuracy": mean(accuracies)}


def last_to_best(folder: Path, steps: int) -> float | None:
    """The last validation's distance over the smallest one of the run."""
    name = f"validation/frechet.steps{steps}"
    curve = [row.values[name] for row in read_rows(folder / "metrics.jsonl") if name in row.values]
    return curve[-1] / min(curve) if curve else None


def markdown(report: dict) -> str:
    where = ", ".join(f"{key} {value}" for key, value in report["environment"].items())
    lines = [
        f"{report['samples']:,} samples, seeds {report['seeds']}; {where}; {report['took_s']:.0f} s in all",
        "",
        "| model | steps | Frechet distance | seeds | accuracy | / teacher | / same steps | last / best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        each = " ".join(f"{value:.3g}" for value in row["each"])
        ratios = [row.get(key) for key in ("to_reference", "to_same_steps", "last_to_best")]
        cells = [row["name"], row["steps"] or "", f"{row['frechet']:.3g}", each, f"{row['accuracy']:.3f}"]
        lines.append("| " + " | ".join(map(str, cells + ["" if r is None else f"{r:.2f}" for r in ratios])) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

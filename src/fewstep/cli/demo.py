"""``fewstep demo``: a teacher and its few-step student, trained, measured and shown on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewstep.cli.console import STOPPED, say
from fewstep.cli.console import out as console
from fewstep.cli.shipped import find_recipe

TEACHER_STEPS = (20, 4, 2, 1)
NUM_SAMPLES = 1000


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of the two runs and the pictures.")] = Path("runs/demo"),
) -> None:
    """Train a teacher on real images, distil it into a 4-step student, and compare the two: minutes on two CPU cores.

    Ends with a table, a picture of both on the same noise, and a report. An interrupted demo goes on where it stopped.
    """
    teacher, student = out / "teacher", out / "student"
    say("1/3  The teacher: flow matching on Fashion-MNIST (recipe wan_nano/sft).", style="bold")
    train("wan_nano/sft", teacher, [])
    say("2/3  The student: DMD2 with its GAN term, 4 steps (recipe wan_nano/dmd2).", style="bold")
    train("wan_nano/dmd2", student, [f"teacher.init={teacher}"])
    say(f"3/3  Both against data that no training saw: {NUM_SAMPLES:,} samples each, the same noise.", style="bold")
    compare(teacher, student, out)
    say(
        f"\nThe pictures: {out / 'comparison.png'}\nThe report:   {student / 'report.html'}\n\nTry next:\n"
        f"  fewstep sample {student} --label Sneaker      samples of one class\n"
        f"  fewstep sample {student} --steps 1            fewer steps than it was trained for\n"
        f"  fewstep export {student} exported             a folder for diffusers\n"
        "  fewstep recipes copy wan_nano/dmd2 mine.yaml  a recipe of your own"
    )


def train(name: str, place: Path, overrides: list[str]) -> None:
    """Runs a shipped recipe in ``place``, or goes on with the run that is there."""
    from fewstep.checkpoint.run_folder import RunFolder
    from fewstep.config import load_recipe
    from fewstep.prepare import prepare
    from fewstep.train import train as run_plan

    recipe = load_recipe(find_recipe(name), overrides)
    begun = RunFolder(place).holds_a_run()
    folder = RunFolder(place) if begun else RunFolder.create(place)
    if not run_plan(prepare(recipe), folder, resume=begun):
        say(f"Go on with: fewstep demo --out {place.parent}")
        raise typer.Exit(STOPPED)


def compare(teacher_run: Path, student_run: Path, folder: Path) -> None:
    """Prints the table, and writes it, the picture and the report."""
    import torch

    from fewstep.cli.judging import measure, open_judge
    from fewstep.cli.model import load_model
    from fewstep.evaluate.evaluation import evaluate_real, evaluation_table, save_evaluations
    from fewstep.evaluate.picture import save_grid
    from fewstep.evaluate.sample import generate
    from fewstep.observe.report import write_report

    teacher, student = load_model(teacher_run), load_model(student_run)
    judge, real = open_judge(student, None)
    models = [(teacher, steps) for steps in TEACHER_STEPS] + [(student, len(student.sampling.resolved()))]
    rows, pictures, names = [evaluate_real(judge, real, NUM_SAMPLES)], [], []
    for model, steps in models:
        rows.append(measure(model, judge, steps, num_samples=NUM_SAMPLES, seeds=(0,), batch=100))
        sampler, labels = model.sampler(model.sampling.with_steps(steps)), torch.arange(len(model.classes))
        made = generate(model.role, sampler, model.conditioner, labels, 0, device=model.device)
        pictures.append(model.codec.decode(made.x0))
        names.append(f"{model.name}, {steps} steps")
    console.print(evaluation_table(rows))
    save_evaluations(student_run / "evaluation.json", rows)
    save_grid(folder / "comparison.png", pictures, names)
    write_report(student_run)

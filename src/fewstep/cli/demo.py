"""``fewstep demo``: a teacher is distilled into a few-step student, measured and shown on this machine."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fewstep.cli.console import STOPPED, say, show
from fewstep.cli.shipped import find_recipe, recipes_folder

TEACHER = "wan_nano/teacher"
"""The teacher that comes with fewstep: an export of what recipe ``wan_nano/sft`` makes."""
TEACHER_STEPS = (20, 4, 2, 1)
NUM_SAMPLES = 1000


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs and the pictures.")] = Path("runs/demo"),
    train_teacher: Annotated[
        bool,
        typer.Option("--train-teacher", help="Train the teacher too, minutes more; else take the shipped one."),
    ] = False,
) -> None:
    """Distil a teacher of real images into a 4-step student, and compare the two: two minutes on two CPU cores.

    Ends with a table, a picture of both on the same noise, and a report. An interrupted demo goes on where it stopped.
    """
    teacher, student = recipes_folder() / TEACHER, out / "student"
    again = command("demo", out, train_teacher)
    if train_teacher:
        teacher = out / "teacher"
        say("1/3  The teacher: flow matching on Fashion-MNIST (recipe wan_nano/sft).", style="bold")
        train("wan_nano/sft", teacher, [], again)
    else:
        say("1/3  The teacher comes with fewstep: flow matching on Fashion-MNIST (recipe wan_nano/sft).", style="bold")
        say(f"     {teacher}; --train-teacher makes it here.")
    say("2/3  The student: DMD2, 4 steps (recipe wan_nano/dmd2).", style="bold")
    train("wan_nano/dmd2", student, [f"teacher.init={teacher}"], again)
    say(f"3/3  Both against data that no training saw: {NUM_SAMPLES:,} samples each, the same noise.", style="bold")
    picture = compare(teacher, student)
    say(
        f"\nThe picture: {picture}\nThe report:  {student / 'report.html'}\n\nTry next:\n"
        f"  fewstep sample {student} --label Sneaker      samples of one class\n"
        f"  fewstep sample {student} --steps 1            fewer steps than it was trained for\n"
        f"  fewstep export {student} exported             a folder for diffusers\n"
        "  fewstep recipes copy wan_nano/dmd2 mine.yaml  a recipe of your own"
    )


def command(name: str, out: Path, train_teacher: bool) -> str:
    """What starts this demo, and goes on with it."""
    return shlex.join(["fewstep", name, "--out", str(out)] + ["--train-teacher"] * train_teacher)


def train(name: str, place: Path, overrides: list[str], again: str) -> None:
    """Runs a shipped recipe in ``place``, or goes on with the run that is there; ``again``: the command of the demo."""
    from fewstep.checkpoint.run_folder import RunFolder
    from fewstep.checkpoint.save import load_checkpoint, newest_complete
    from fewstep.config import load_recipe
    from fewstep.prepare import prepare
    from fewstep.train import train as run_plan

    recipe = load_recipe(find_recipe(name), overrides)
    begun = RunFolder(place).holds_a_run()
    folder = RunFolder(place) if begun else RunFolder.create(place)
    newest = newest_complete(folder.checkpoints) if begun else None
    if newest is not None:
        done = load_checkpoint(newest).iteration
        where = "is finished" if done >= recipe.iterations else f"goes on from iteration {done} of {recipe.iterations}"
        say(f"     {place} is there already: it {where}.")
    if not run_plan(prepare(recipe), folder, resume=begun, go_on=again):
        raise typer.Exit(STOPPED)


def compare(teacher_place: Path, student_run: Path, num_samples: int = NUM_SAMPLES) -> Path:
    """Prints the table; writes it, the picture and the report into the student's run. Returns the picture's path."""
    from fewstep.checkpoint.run_folder import RunFolder
    from fewstep.cli.judging import measure, open_judge
    from fewstep.cli.model import load_model
    from fewstep.cli.pictures import write_comparison
    from fewstep.evaluate.evaluation import evaluate_real, evaluation_table, save_evaluations
    from fewstep.observe.loops import telling
    from fewstep.observe.report import write_report

    teacher, student, run = load_model(teacher_place), load_model(student_run), RunFolder(student_run)
    models = [(teacher, steps) for steps in TEACHER_STEPS] + [(student, None)]
    settings: dict[str, Any] = {"num_samples": num_samples, "seeds": (0,), "batch": 100}
    with telling():
        judge, real = open_judge(student, None, num_samples)
        rows = [evaluate_real(judge, real, num_samples)]
        rows += [measure(model, judge, steps, **settings) for model, steps in models]
    show(evaluation_table(rows))
    save_evaluations(run.evaluation, rows)
    write_comparison(run.samples / "compare.png", teacher, student)
    write_report(student_run)
    return run.samples / "compare.png"

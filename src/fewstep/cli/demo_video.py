"""``fewstep demo-video``: from a bidirectional video teacher to a causal student that streams, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fewstep.cli.console import listed, say, show
from fewstep.cli.shipped import recipes_folder

TEACHER = "wan_nano_video/teacher"
"""The teacher that comes with fewstep: an export of what recipe ``wan_nano_video/sft`` makes on a GPU."""
STAGES = (
    ("causal", "teacher_forcing", "The teacher made causal: teacher forcing", {"student.init": "teacher"}),
    ("consistency", "consistency", "Few steps: causal consistency distillation", {"teacher.init": "causal"}),
    (
        "student",
        "self_forcing",
        "On its own history: self-forcing DMD, scored by the first teacher",
        {"teacher.init": "teacher", "student.init": "consistency"},
    ),
)
"""Folder, recipe of ``wan_nano_video``, what it does, and what its roles start from: the teacher, or a stage."""
JUDGED = (("teacher", 20), ("causal", 20), ("causal", 4), ("consistency", None), ("student", None))
NUM_SAMPLES, NUM_LONG, TIMES_LONGER = 300, 100, 6


def demo_video(
    out: Annotated[Path, typer.Option("--out", help="Folder of the runs and the clips.")] = Path("runs/demo-video"),
    train_teacher: Annotated[
        bool,
        typer.Option("--train-teacher", help="Train the teacher too, hours on a CPU; else take the shipped one."),
    ] = False,
) -> None:
    """Make a video teacher causal, distil it to 4 steps and stream it: minutes on two CPU cores.

    Ends with two tables (quality and cost; quality against the frame index, far past the training length), clips that
    play, and a report of each stage. An interrupted demo goes on where it stopped.
    """
    from fewstep.cli.demo import command, train

    again = command("demo-video", out, train_teacher)
    teacher, told = recipes_folder() / TEACHER, "flow matching on moving Fashion-MNIST (recipe wan_nano_video/sft)."
    if train_teacher:
        teacher = out / "teacher"
        say(f"1/5  A teacher that sees whole clips: {told}", style="bold")
        train("wan_nano_video/sft", teacher, [], again)
    else:
        say(f"1/5  A teacher that sees whole clips comes with fewstep: {told}", style="bold")
        say(f"     {teacher}; --train-teacher makes it here.")
    places = {"teacher": teacher, **{name: out / name for name, *_ in STAGES}}
    for number, (name, recipe, told, starts) in enumerate(STAGES, 2):
        say(f"{number}/5  {told} (recipe wan_nano_video/{recipe}).", style="bold")
        begins = [f"{role}={places[run]}" for role, run in starts.items()]
        train(f"wan_nano_video/{recipe}", places[name], begins, again)
    say("5/5  All against clips that no training saw.", style="bold")
    clips = compare(places)
    say(f"\nThe clips:   {listed(clips)}")
    say(f"The reports: {out / 'student' / 'report.html'}, and one in each folder beside it")
    say(
        "\nTry next:\n"
        f'  fewstep stream {out / "student"} --frames 200 --label "Bag, circle" --label "Coat, bounce@99"\n'
        f"  fewstep sample {out / 'student'} --frames 27\n"
        "  fewstep recipes copy wan_nano_video/self_forcing mine.yaml   a recipe of your own, to be run by\n"
        f"  fewstep train mine.yaml name=mine teacher.init={teacher} student.init={places['consistency']}"
    )


def compare(stages: dict[str, Path]) -> list[Path]:
    """Prints the tables, writes them into the student's run, and the clips; returns the paths of the clips."""
    from fewstep.checkpoint.run_folder import RunFolder
    from fewstep.cli.judging import long_clips, measure, open_judge
    from fewstep.cli.model import load_model
    from fewstep.cli.pictures import places, write_clips
    from fewstep.evaluate.drift import drift, drift_table
    from fewstep.evaluate.evaluation import evaluate_real, evaluation_table, save_evaluations
    from fewstep.observe.loops import telling
    from fewstep.observe.report import write_report

    models = {name: load_model(place) for name, place in stages.items()}
    student, run = models["student"], RunFolder(stages["student"])
    settings: dict[str, Any] = {"num_samples": NUM_SAMPLES, "seeds": (0,), "batch": 50}
    with telling():
        judge, real = open_judge(student, None, NUM_SAMPLES)
        rows = [evaluate_real(judge, real, NUM_SAMPLES)]
        rows += [measure(models[name], judge, steps, **settings) for name, steps in JUDGED]
        pixels, labels = long_clips(student, NUM_LONG, TIMES_LONGER * student.shape[0])
    rows[-1] = rows[-1].model_copy(update={"drift": tuple(drift(pixels, labels, judge))})
    show(evaluation_table(rows))
    show(drift_table(rows[-1].drift, "the student, far past the length that it was trained on"))
    save_evaluations(run.evaluation, rows)
    paths, _ = places(run.samples, "compare", clips=True)
    write_clips(paths, [models["teacher"], models["causal"], student], TIMES_LONGER * student.shape[0])
    write_report(run.path)
    return paths

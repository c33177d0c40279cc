"""Runs of a bench: trained and judged by processes of their own, side by side, each as soon as what it starts from is
there. What is finished is kept, so that an interrupted bench goes on.

    python bench/runs.py FOLDER --samples 5000 --steps 20 4         judges one run, into its evaluation.json
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 60.0
"""What a process has to stop in, before it is ended."""
_TAIL = 3000


@dataclass(frozen=True)
class Run:
    """One run of ``fewstep train``.

    starts: the role whose ``init`` is another run's folder, and that folder. steps: numbers of steps to judge it at;
    none is the trained sampler. long: frames of the clips in which its drift is judged; 0 is not at all.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...]
    seed: int
    folder: Path
    starts: tuple[tuple[str, Path], ...] = ()
    steps: tuple[int, ...] = ()
    long: int = 0

    @property
    def trained(self) -> Path:
        """There once the last iteration is done."""
        return self.folder / "trained"

    @property
    def evaluation(self) -> Path:
        """There once the run is judged."""
        return self.folder / "evaluation.json"


@dataclass(frozen=True)
class Judging:
    """How runs are judged. batch: samples made at once; does not change them."""

    samples: int
    batch: int
    long_samples: int = 0


@dataclass(frozen=True)
class Task:
    """Training or judging of a run. needs: files that must be there first. done: a file that is there afterwards."""

    run: Run
    command: tuple[str, ...]
    needs: tuple[Path, ...]
    done: Path
    log: Path

    @property
    def told(self) -> str:
        return f"seed {self.run.seed}: {self.run.name} is {'trained' if self.done == self.run.trained else 'judged'}"


def training(run: Run) -> Task:
    """The run from its start, or from where it was stopped."""
    starts = [f"{role}.init={folder}" for role, folder in run.starts]
    again = ["--resume"] if (run.folder / "recipe.yaml").exists() else []
    words = [f"seed={run.seed}", *starts, *run.overrides, "--run", str(run.folder), *again]
    command = (sys.executable, "-c", "from fewstep.cli import main; main()", "train", run.recipe, *words)
    needs = tuple(folder / "trained" for _, folder in run.starts)
    return Task(run, command, needs, run.trained, run.folder.with_suffix(".train.log"))


def judgement(run: Run, judging: Judging) -> Task:
    steps = ("--steps", *map(str, run.steps)) if run.steps else ()
    long = ("--long", str(run.long), "--long-samples", str(judging.long_samples)) if run.long else ()
    sizes = ("--samples", str(judging.samples), "--batch", str(judging.batch))
    command = (sys.executable, str(Path(__file__).resolve()), str(run.folder), *sizes, *steps, *long)
    return Task(run, command, (run.trained,), run.evaluation, run.folder.with_suffix(".eval.log"))


def in_order(runs: Sequence[Run], judging: Judging, delay: int = 0) -> list[Task]:
    """What is left to do, the most urgent first: runs as given, each judged when ``delay`` runs after it are begun."""
    tasks = [(2 * place, training(run)) for place, run in enumerate(runs)]
    tasks += [(2 * (place + delay) + 1, judgement(run, judging)) for place, run in enumerate(runs)]
    return [task for _, task in sorted(tasks, key=lambda pair: pair[0]) if not task.done.exists()]


def work(tasks: Sequence[Task], jobs: int, limit_s: float | None = None) -> bool:
    """Runs the tasks, ``jobs`` at a time, the first that is ready before others. True if all are done.

    After ``limit_s`` seconds, or Ctrl-C, the processes are asked to stop, which leaves checkpoints; the same call later
    goes on. A task that fails is told of, with the end of its log; what needs it is left.
    """
    waiting, running = list(tasks), dict[Task, subprocess.Popen[bytes]]()
    end = time.monotonic() + limit_s if limit_s else float("inf")
    missing = len(waiting)
    try:
        while time.monotonic() < end:
            for task in [task for task, process in running.items() if process.poll() is not None]:
                missing -= finished(task, running.pop(task).returncode)
            ready = [task for task in waiting if all(path.exists() for path in task.needs)]
            for task in ready[: jobs - len(running)]:
                waiting.remove(task)
                running[task] = begun(task)
            if not running:
                break
            time.sleep(0.2)
    except KeyboardInterrupt:
        print("Stopping; the same command goes on.", flush=True)
    stop(running)
    return missing == 0


def begun(task: Task) -> subprocess.Popen[bytes]:
    """In a session of its own: signals of the terminal reach it through :func:`stop` alone, once."""
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("ab") as log:
        return subprocess.Popen(
            task.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def finished(task: Task, code: int) -> bool:
    """Whether the task is done; says so, or why not."""
    if code:
        print(f"seed {task.run.seed}: {task.run.name} FAILED ({code}), {task.log}:", flush=True)
        print(task.log.read_text(errors="replace")[-_TAIL:], flush=True)
        return False
    task.done.touch()
    print(f"{time.strftime('%H:%M:%S')} {task.told}", flush=True)
    return True


def stop(running: dict[Task, subprocess.Popen[bytes]]) -> None:
    """Ctrl-C for every process, once, and an end for what has not stopped after ``GRACE_S``."""
    for process in running.values():
        process.send_signal(signal.SIGINT)
    end = time.monotonic() + GRACE_S
    for task, process in running.items():
        try:
            process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == 0:
            finished(task, 0)


def judge(folder: Path, steps: Sequence[int], judging: Judging, long: int = 0) -> None:
    """Writes ``evaluation.json`` of the run: real data, the model at each number of steps (none: the trained one), and
    at the trained one its drift in clips of ``long`` frames."""
    from fewstep.cli.judging import measure, open_judge
    from fewstep.cli.model import load_model
    from fewstep.evaluate.drift import drift
    from fewstep.evaluate.evaluation import evaluate_real, save_evaluations
    from fewstep.evaluate.sample import balanced_labels, generate
    from fewstep.observe.report import write_report

    loaded = load_model(folder)
    eyes, real = open_judge(loaded, None)
    rows = [evaluate_real(eyes, real, judging.samples)]
    for count in steps or [None]:
        row = measure(loaded, eyes, count, num_samples=judging.samples, seeds=(0,), batch=judging.batch)
        if long and row.num_steps == len(loaded.sampling.resolved()):
            labels = balanced_labels(judging.long_samples, len(loaded.classes))
            sampler = loaded.sampler(loaded.sampling, long)
            made = generate(
                loaded.role, sampler, loaded.conditioner, labels, 0, batch=judging.batch, device=loaded.device
            )
            row = row.model_copy(update={"drift": tuple(drift(loaded.codec.decode(made.x0), labels, eyes))})
        rows.append(row)
    save_evaluations(folder / "evaluation.json", rows)
    write_report(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", nargs="+", type=int, default=[])
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--long-samples", type=int, default=1000)
    options = parser.parse_args()
    judging = Judging(options.samples, options.batch, options.long_samples)
    judge(options.folder, options.steps, judging, options.long)


if __name__ == "__main__":
    main()

"""Iterations of self-forcing DMD on one GPU, on several, and in groups of workers on Ray.

    python -m bench.groups                              every case for which there are GPUs
    python -m bench.groups --only fsdp split --repeats 3
    python -m bench.groups --tiny --repeats 1           tiny networks on CPUs, by gloo: a smoke run

The recipe is ``wan_1_3b_video/self_forcing``: student and critic of 1.3B, a teacher of 1.3B or 14B, 21 latent frames of
60x104, blocks of 3 frames, 4 steps, five critic updates and one of the student, one clip for each GPU. Networks and
data are random. Every case is a process (or one for each rank) of its own, which runs ``--warm-up`` iterations and then
``--repeats``; all cases see the same rows, noise and random stops at the same iterations. Prints the median seconds of
an iteration, seconds by phase, and the most memory that a process of any group held; what has run is kept in ``--out``,
so that the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.random_folders import write_latents, write_network

RECIPE = "wan_1_3b_video/self_forcing"
SHAPE, TEXT = (21, 16, 60, 104), 512
ROWS = 36
TINY_SHAPE, TINY_TEXT = (6, 16, 4, 6), 5
TINY = {"dim": 48, "layers": 2, "heads": 2, "ffn_dim": 80, "text_dim": 20, "freq_dim": 32}
TWO_GROUPS = {"critic": 1, "student": 1}


@dataclass(frozen=True)
class Case:
    """clips: in a batch. ranks: that torchrun starts. groups: workers of each group that Ray starts."""

    told: str
    clips: int = 2
    teacher: str = "1.3B"
    ranks: int = 1
    groups: tuple[tuple[str, int], ...] = ()
    engine: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        sizes = [size for _, size in self.groups] or [self.ranks]
        return max(sizes) if "engine.layout=colocated" in self.engine else sum(sizes)


def on_ray(told: str, layout: str, *engine: str, **groups: int) -> Case:
    return Case(told, groups=tuple(groups.items()), engine=(f"engine.layout={layout}", *engine))


CASES = {
    "one": Case("one process", clips=1),
    "one-14B": Case("one process", clips=1, teacher="14B"),
    "fsdp": Case("torchrun, FSDP 2", ranks=2),
    "fsdp-14B": Case("torchrun, FSDP 2", teacher="14B", ranks=2),
    "replicas": Case("torchrun, 2 replicas", ranks=2, engine=("engine.replicas=2",)),
    "sequence": Case("torchrun, sequence 2", clips=1, ranks=2, engine=("engine.sequence=2",)),
    "shared": on_ray("Ray shared, 2", "shared", all=2),
    "split": on_ray("Ray split 1 + 1", "split", **TWO_GROUPS),
    "overlap": on_ray("Ray split 1 + 1, overlap", "split", **TWO_GROUPS),
    "rollout": on_ray("Ray shared 1, 1 for rollouts", "shared", all=1, rollout=1),
    "rollout-overlap": on_ray("Ray shared 1, 1 for rollouts, overlap", "shared", all=1, rollout=1),
    "colocated": on_ray("Ray colocated 2 / 2", "colocated", critic=2, student=2),
}
FOLLOWED = {"split": "overlap", "rollout": "rollout-overlap"}
"""Cases that are measured by the processes of another one, after it."""


def main() -> None:
    options = parse()
    if options.case:
        run_case(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    available = torch.cuda.device_count() or max(case.gpus for case in CASES.values())
    alone = [name for name in CASES if name not in FOLLOWED.values()]
    names = options.only or [name for name in alone if CASES[name].gpus <= available]
    missing = [name for name in names if not result_of(options, name).exists()]
    write_folders(options, {size for name in missing for size in ("1.3B", CASES[name].teacher)})
    for name in missing:
        start(options, name)
    print(table(options))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[name for name in CASES if name not in FOLLOWED.values()])
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--warm-up", type=int, default=1, help="iterations before the timed ones; they compile")
    parser.add_argument("--repeats", type=int, default=2, help="timed iterations")
    parser.add_argument("--tiny", action="store_true", help="tiny networks and clips, for a smoke run on CPUs")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a case may take")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/fewstep-bench"), help="for networks and data")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-groups"))
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="changes of the recipe, in all cases")
    return parser.parse_args(words)


def result_of(options: argparse.Namespace, name: str) -> Path:
    return options.out / f"{name}.json"


def start(options: argparse.Namespace, name: str) -> None:
    """Runs a case in processes of its own; says how it ended, and goes on where it failed."""
    case, begun = CASES[name], time.monotonic()
    python = [sys.executable, "-m", "bench.groups"]
    if case.ranks > 1:
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks), "-m", "bench.groups"]
        python = [sys.executable, "-m", *launcher]
    words = ["--case", name, "--warm-up", str(options.warm_up), "--repeats", str(options.repeats)]
    words += ["--folder", str(options.folder), "--out", str(options.out), *(["--tiny"] if options.tiny else [])]
    words += ["--set", *options.set] if options.set else []
    log = options.out / f"{name}.log"
    with log.open("w") as told, suppress(subprocess.TimeoutExpired):
        process = subprocess.Popen([*python, *words], stdout=told, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(options.limit)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    outcome = "done" if result_of(options, name).exists() else f"FAILED, see {log}"
    print(f"{name}: {outcome}, {time.monotonic() - begun:.0f} s", flush=True)


def run_case(options: argparse.Namespace) -> None:
    """The life of a process of a case; the first one writes what was measured."""
    from fewstep.checkpoint.background import Saver
    from fewstep.checkpoint.run_folder import RunFolder
    from fewstep.cli.shipped import find_recipe
    from fewstep.config import load_recipe
    from fewstep.engines.mesh import Ranks
    from fewstep.prepare import prepare
    from fewstep.train import trainer_of

    case, ranks, begun = CASES[options.case], Ranks.launched(), time.perf_counter()
    words = overrides(options, case)
    recipe = load_recipe(find_recipe(RECIPE), words)
    plan, run = prepare(recipe, ranks if case.ranks > 1 else None), options.out / options.case
    run.mkdir(parents=True, exist_ok=True)
    with trainer_of(plan, RunFolder(run), Saver(), "") as (trainer, _):
        found = {options.case: measure(trainer, options, begun)}
        if options.case in FOLLOWED:  # the same workers go on, with what they have compiled
            driver: Any = trainer
            driver.section = driver.section.model_copy(update={"overlap": True})
            found[FOLLOWED[options.case]] = measure(trainer, options, time.perf_counter())
    for name, values in found.items() if ranks.first else ():
        known = {
            "case": name,
            "told": CASES[name].told,
            "gpus": case.gpus,
            "clips": case.clips,
            "teacher": case.teacher,
        }
        result_of(options, name).write_text(json.dumps(known | values | environment(plan.device), indent=1))


def measure(trainer: Any, options: argparse.Namespace, begun: float) -> dict[str, Any]:
    """Seconds of the timed iterations, and what the gauges say of them. start_s: from ``begun`` to the first."""
    seconds = []
    for iteration in range(options.warm_up + options.repeats):
        before = time.perf_counter()
        metrics = trainer.run(iteration)
        values = {name: float(value) for name, value in metrics.items()}  # waits for the device
        seconds.append(time.perf_counter() - before)
        if iteration + 1 == options.warm_up:
            start_s = time.perf_counter() - begun
            trainer.gauges()
    timed = seconds[options.warm_up :]
    return {"seconds": timed, "start_s": start_s, "gauges": trainer.gauges(), "metrics": values}


def write_folders(options: argparse.Namespace, sizes: set[str]) -> None:
    """Networks of these sizes, and data; what is there is kept."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for size in sorted(sizes):
        write_network(folder_of(options, size), section_of(size, options.tiny), device)
    if sizes:
        shape, tokens = (TINY_SHAPE, TINY_TEXT) if options.tiny else (SHAPE, TEXT)
        width = section_of("1.3B", options.tiny).architecture.text_dim
        write_latents(folder_of(options, "latents"), ROWS, shape, tokens, width)


def folder_of(options: argparse.Namespace, name: str) -> Path:
    return options.folder / ("tiny" if options.tiny else "full") / name


def overrides(options: argparse.Namespace, case: Case) -> list[str]:
    """What is changed in the recipe."""
    teacher, other = folder_of(options, case.teacher), folder_of(options, "1.3B")
    words = [f"teacher.init={teacher}", f"critic.init={other}", f"student.init={other}"]
    words += ["student.causal={block_frames: 3}", f"data.path={folder_of(options, 'latents')}"]
    words += [f"data.batch={case.clips}", "iterations=1000", "checkpoint={every: 1000, keep_last: 1}"]
    return [*words, "observe.tensorboard=false", *engine(case, torch.cuda.is_available()), *options.set]


def engine(case: Case, on_gpus: bool) -> list[str]:
    """The engine section of a case."""
    words = [] if on_gpus else ["engine.compile=null"]
    if not case.groups:
        return [*words, *case.engine]
    kind = "gpus" if on_gpus else "workers"
    groups = ", ".join(f"{name}: {{{kind}: {size}}}" for name, size in case.groups)
    return [*words, "engine.name=ray", f"engine.groups={{{groups}}}", *case.engine]


def section_of(size: str, tiny: bool) -> Any:
    from fewstep.models.wan.conditioner import EmbeddingSection
    from fewstep.models.wan.sizes import WanSection

    changed: Any = {} if not tiny else TINY if size == "1.3B" else TINY | {"layers": 3}
    return WanSection(size="1.3B" if tiny else size, conditioner=EmbeddingSection(), **changed)  # type: ignore[arg-type]


def environment(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU"
    return {"environment": {"device": name, "torch": torch.__version__, "python": platform.python_version()}}


def table(options: argparse.Namespace) -> str:
    """What has run, in the order of the cases."""
    found = [json.loads(result_of(options, name).read_text()) for name in CASES if result_of(options, name).exists()]
    if not found:
        return "Nothing has run."
    kinds = list(dict.fromkeys(key for row in found for key in row["gauges"] if key.startswith("phase/time_s.")))
    kinds += list(dict.fromkeys(key for row in found for key in row["metrics"] if key.endswith("/waiting_s")))
    names = [kind.removeprefix("phase/time_s.").replace("/waiting_s", " waits") for kind in kinds]
    head = ["layout", "GPUs", "teacher", "clips", "s / iteration", "s / clip", "peak GiB", "start s", *names]
    lines = [", ".join(f"{key} {value}" for key, value in found[0]["environment"].items()), ""]
    lines += [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in found:
        seconds = median(row["seconds"])
        cells = [row["told"], row["gpus"], row["teacher"], row["clips"], f"{seconds:.3g}"]
        cells += [f"{seconds / row['clips']:.3g}", f"{row['gauges']['memory/peak_mib'] / 1024:.3g}"]
        cells += [f"{row['start_s']:.0f}"]
        known = row["gauges"] | row["metrics"]
        cells += [f"{known[kind]:.3g}" if kind in known else "" for kind in kinds]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

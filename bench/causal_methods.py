"""Updates of the causal methods, as the engine runs them: consistency distillation, self-forcing DMD, ODE data.

    python bench/causal_methods.py                      the 1.3B geometry on a GPU, 81 frames of 480x832
    python bench/causal_methods.py --size nano --frames 6 --height 8 --width 8 --repeats 1     a smoke run on a CPU

Weights and data are random, the batch is 1, the text 512 tokens, blocks have 3 frames, the ladder 4 steps. Every phase
is timed apart, with the device waited for. Self-forcing runs one critic update an iteration, at every stop of the
rollout, and is said for five. ODE data are timed over ``--ode-nodes`` steps of the teacher and said for 48. Prints
seconds and peak memory, and writes the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from fewstep.engines.process import ProcessEngine
from fewstep.engines.roles import AveragedRole, Role, freeze
from fewstep.methods.consistency import Consistency, ConsistencySection
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.models.blocks import CausalSection
from fewstep.models.families import build
from fewstep.models.wan.conditioner import EmbeddingCond, EmbeddingSection
from fewstep.models.wan.parallelize import compile_blocks
from fewstep.models.wan.sizes import WanSection
from fewstep.optim.ema import EMA, EMASection
from fewstep.optim.optimizer import OptimizerSection, RoleOptimizer
from fewstep.optim.schedule import ScheduleSection
from fewstep.records import Batch
from fewstep.rng import Draw
from fewstep.rollout.few_step import SamplingSection
from fewstep.rollout.self_forcing import SelfForcing
from fewstep.rollout.teacher_ode import TeacherODE

TEXT_TOKENS, BLOCK_FRAMES, STEPS, PUBLISHED_NODES, PUBLISHED_UPDATES = 512, 3, 4, 48, 5


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(options, device)
    rows: list[dict[str, Any]] = []
    for name in options.only or WORK:
        with bench.memory() as peak:
            rows += [{"work": name, **row, "peak_gib": peak()} for row in WORK[name](bench)]
        print("\n".join(json.dumps(row) for row in rows if row["work"] == name), flush=True)
    where = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"rows": rows, "environment": where, "options": str(options)}, indent=1))
    print(markdown(rows, where))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.3B", choices=["nano", "small", "1.3B", "14B"])
    parser.add_argument("--frames", type=int, default=21, help="latent frames")
    parser.add_argument("--height", type=int, default=60, help="latent rows")
    parser.add_argument("--width", type=int, default=104, help="latent columns")
    parser.add_argument("--repeats", type=int, default=2, help="timed calls of every kind, after one of warm-up")
    parser.add_argument("--ode-nodes", type=int, default=12, help="steps of the teacher that are timed")
    parser.add_argument("--compile", action="store_true", help="compile the blocks of the bidirectional networks")
    parser.add_argument(
        "--compile-causal", action="store_true", help="and of the causal ones: a graph for every length"
    )
    parser.add_argument("--only", nargs="+", choices=list(WORK))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-causal-methods.json"))
    return parser.parse_args()


class TimedEngine(ProcessEngine):
    """The engine of one process, with a clock at every phase."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.times: dict[str, list[float]] = defaultdict(list)

    def _record(self, phase: Any, *arguments: Any) -> Any:
        with self._timed(phase.name):
            return super()._record(phase, *arguments)

    def _train(self, phase: Any, *arguments: Any) -> Any:
        with self._timed(phase.name):
            return super()._train(phase, *arguments)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        wait()
        begun = time.perf_counter()
        yield
        wait()
        self.times[phase].append(time.perf_counter() - begun)


class Bench:
    """Roles of one geometry with random weights, and random data for them."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device = options, device
        self.precision = torch.bfloat16 if device.type == "cuda" else torch.float32
        section = self.section(False).architecture
        self.shape = (options.frames, section.channels, options.height, options.width)
        generator = torch.Generator(device).manual_seed(0)
        text = torch.randn(2, 1, TEXT_TOKENS, section.text_dim, generator=generator, device=device)
        x0 = torch.randn(1, *self.shape, generator=generator, device=device)
        key = torch.zeros(1, dtype=torch.int64, device=device)
        self.data = Batch(key, x0, EmbeddingCond(text[0]), EmbeddingCond(text[1]))

    def batch(self, iteration: int, k: int) -> Batch:
        """The same data at every iteration: what a source of batches is to an engine."""
        return self.data

    def section(self, causal: bool) -> WanSection:
        form = CausalSection(block_frames=BLOCK_FRAMES) if causal else None
        return WanSection(size=self.options.size, conditioner=EmbeddingSection(), causal=form)

    def rollout(self) -> Any:
        sampling = SamplingSection(steps=STEPS, shift=5.0, solver="renoise")
        causal = self.section(True).causal
        assert causal is not None
        return SelfForcing.of(sampling, self.shape, causal)

    def role(self, name: str, *, causal: bool, trained: bool) -> Role:
        network = build(self.section(causal), self.device)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(std=0.02)
        network.recompute = trained
        if not trained:
            freeze(network, self.device, self.precision)
        if self.options.compile_causal if causal else self.options.compile:
            compile_blocks(network)
        return Role(name, network, self.precision)

    def engine(self, method: Any, **roles: Role) -> TimedEngine:
        optimizer = OptimizerSection(lr=2e-6, betas=(0.0, 0.999))
        optimizers = {
            name: RoleOptimizer(roles[name].parameters(), optimizer, ScheduleSection(), 10**6)
            for name in method.trained
        }
        ema = EMA(roles["student"].parameters(), EMASection())
        if "ema" in method.roles:
            roles["ema"] = AveragedRole(roles["student"], ema)
        return TimedEngine(method, roles, optimizers, ema, self, seed=0)  # type: ignore[arg-type]

    @contextmanager
    def memory(self) -> Iterator[Any]:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None


def consistency(bench: Bench) -> list[dict[str, Any]]:
    """One update: the teacher's guided step, the average's target, the student's forward and backward."""
    engine = bench.engine(
        Consistency(ConsistencySection()),
        student=bench.role("student", causal=True, trained=True),
        teacher=bench.role("teacher", causal=True, trained=False),
    )
    for iteration in range(1 + bench.options.repeats):
        engine.run(iteration)
    rows = [{"phase": name, "seconds": median(times[1:])} for name, times in engine.times.items()]
    return [*rows, {"phase": "update", "seconds": sum(row["seconds"] for row in rows)}]


def ode_data(bench: Bench) -> list[dict[str, Any]]:
    """Guided trajectories of an autoregressive teacher: the history once, then the steps."""
    teacher, nodes = bench.role("teacher", causal=True, trained=False), bench.options.ode_nodes

    def seconds(count: int, call: int) -> float:
        ode = TeacherODE(count, 5.0, (1.0,), guidance_scale=6.0)
        wait()
        begun = time.perf_counter()
        ode(teacher, bench.data, Draw(0, "trajectory", call, bench.data.key))
        wait()
        return time.perf_counter() - begun

    seconds(1, 0)
    one, many = (median(seconds(count, call) for call in range(bench.options.repeats)) for count in (1, nodes))
    step = (many - one) / (nodes - 1)
    return [
        {"phase": "history, and one guided step", "seconds": one},
        {"phase": "guided step", "seconds": step},
        {"phase": f"clip of {PUBLISHED_NODES} steps", "seconds": one + (PUBLISHED_NODES - 1) * step},
    ]


def self_forcing(bench: Bench) -> list[dict[str, Any]]:
    """A critic update and a student update on one rollout; the mean over the steps at which the rollout can stop."""
    engine = bench.engine(
        DMD2(DMD2Section(critic_updates=1, guidance_scale=4.0), bench.rollout()),
        student=bench.role("student", causal=True, trained=True),
        teacher=bench.role("teacher", causal=False, trained=False),
        critic=bench.role("critic", causal=False, trained=True),
    )
    iterations = [stopping_at(stop, bench.data) for stop in range(STEPS)]
    for iteration in iterations:
        engine.run(iteration)
    engine.times.clear()
    for _ in range(bench.options.repeats):
        for iteration in iterations:
            engine.run(iteration)
    seconds = {
        name.partition(".")[0]: mean(median(times[stop::STEPS]) for stop in range(STEPS))
        for name, times in engine.times.items()
    }
    critic = seconds["rollout"] + seconds["critic"]
    scored = seconds["scores"] + seconds["student"]
    seconds |= {
        "critic update with its rollout": critic,
        "student update with its rollout": seconds["rollout"] + scored,
        f"iteration, {PUBLISHED_UPDATES} critic updates and 1 of the student": PUBLISHED_UPDATES * critic + scored,
    }
    return [{"phase": name, "seconds": value} for name, value in seconds.items()]


def stopping_at(stop: int, data: Batch) -> int:
    """An iteration whose rollout stops at that step."""
    draws = ((iteration, Draw(0, "rollout.0", iteration, data.key)) for iteration in range(10_000))
    return next(iteration for iteration, draw in draws if draw.shared_index("stop", STEPS) == stop)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


WORK = {"consistency": consistency, "ode-data": ode_data, "self-forcing": self_forcing}


def markdown(rows: list[dict[str, Any]], where: dict[str, str]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in where.items()), ""]
    lines += ["| work | phase | median | peak memory |", "|---|---|---|---|"]
    for row in rows:
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        lines.append(f"| {row['work']} | {row['phase']} | {row['seconds']:.3g} s | {peak} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

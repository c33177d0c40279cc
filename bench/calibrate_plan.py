"""Fits the coefficients of ``fewstep plan`` to measured runs, and says how far it is from others.

    python -m bench.calibrate_plan              the errors of the coefficients that come with fewstep
    python -m bench.calibrate_plan --fit        fits them anew and writes them

The measured figures stand in bench/measured/, each with its source. The rule that parts them, which no error may
change: of every kind of work, and of times and of memory apart, rows are taken by name; the first is for the fit, the
second is held out, the third is for the fit, and so on. Layouts on several GPUs, measured later, are held out all.
Fitted are seven coefficients to times and one to memory, by
least squares of the logarithms; fewer than half of the rows that they are fitted to.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench import causal_wan
from fewstep.cli.shipped import find_recipe, run_recipe
from fewstep.config import load_recipe
from fewstep.costs.counted import counted
from fewstep.costs.estimate import GIB, Planner
from fewstep.costs.kept import Inside
from fewstep.costs.layouts import Layout
from fewstep.costs.ledger import Held, Ledger
from fewstep.costs.sizes import sizes_of
from fewstep.costs.speed import Coefficients, Machine, coefficients, seconds
from fewstep.costs.states import counts_of, state_of
from fewstep.costs.trace import CountedRole, PhaseCost, Setting, Sized, Stopping, trace
from fewstep.costs.work import Work
from fewstep.devices import kind_of
from fewstep.methods.consistency import Consistency, ConsistencySection
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.models.blocks import CausalSection
from fewstep.models.wan.conditioner import EmbeddingCond, EmbeddingSection
from fewstep.models.wan.sizes import SIZES, WanSection
from fewstep.records import Batch
from fewstep.rollout.few_step import SamplingSection
from fewstep.rollout.self_forcing import SelfForcing
from fewstep.rollout.teacher_ode import TeacherODE

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "bench" / "measured" / "h200.json"
COEFFICIENTS = ROOT / "src" / "fewstep" / "costs" / "coefficients.json"
BOUNDS = {
    "matmul": (0.3, 1.0),
    "half_tokens": (50.0, 3000.0),
    "attention": (0.2, 1.0),
    "masked_attention": (0.1, 1.0),
    "backward_attention": (0.4, 1.2),
    "memory": (0.2, 1.0),
    "launch_s": (2e-6, 5e-5),
}
"""Of the coefficients that are fitted to times, where the fit looks."""
JOINED = (0.4, 1.2)
"""Of the one that is fitted to memory."""
QUANTITIES = ("time", "memory")
SHAPE, TEXT = (21, 16, 60, 104), 512
FRAME_TOKENS = 1560
H200 = kind_of("h200")


@dataclass(frozen=True)
class Row:
    """One measured figure. quantity: ``time`` in seconds, or ``memory`` in GiB of tensors."""

    name: str
    kind: str
    quantity: str
    measured: float
    held_out: bool
    spec: Mapping[str, Any]


def main() -> None:
    options = parse()
    rows, fitted = read(), coefficients()
    if options.fit:
        fitted = fit(rows)
        COEFFICIENTS.write_text(json.dumps({k: float(f"{v:.4g}") for k, v in asdict(fitted).items()}, indent=1) + "\n")
        fitted = Coefficients(**json.loads(COEFFICIENTS.read_text()))
    print(report(rows, fitted))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the coefficients anew and write them")
    return parser.parse_args()


def read(path: Path = MEASURED) -> list[Row]:
    """All measured figures, parted by the rule."""
    groups: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for row in json.loads(path.read_text())["rows"]:
        for quantity, key in (("time", "time_s"), ("memory", "memory_gib")):
            if key in row:
                groups[quantity, row["kind"]].append(row)
    return [
        Row(
            row["name"],
            kind,
            quantity,
            row["time_s" if quantity == "time" else "memory_gib"],
            kind == "layout" or bool(place % 2),
            row,
        )
        for (quantity, kind), found in groups.items()
        for place, row in enumerate(sorted(found, key=lambda row: row["name"]))
    ]


def predict(row: Row, fitted: Coefficients) -> float:
    """The figure, by the model."""
    found = PREDICT[row.kind](row.spec, fitted)
    return found[0] if row.quantity == "time" else found[1]


def fit(rows: list[Row]) -> Coefficients:
    """The coefficients that are nearest to the rows for the fit; memory first, on which times do not depend."""
    from scipy.optimize import least_squares, minimize_scalar

    fitted, mine = coefficients(), {q: [r for r in rows if r.quantity == q and not r.held_out] for q in QUANTITIES}

    def errors(quantity: str, **tried: float) -> list[float]:
        return [math.log(predict(row, replace(fitted, **tried)) / row.measured) for row in mine[quantity]]

    joined: Any = minimize_scalar(
        lambda value: sum(error**2 for error in errors("memory", joined=value)),
        bounds=JOINED,
        method="bounded",
        options={"xatol": 0.02},
    )
    fitted = replace(fitted, joined=float(joined.x))
    names = list(BOUNDS)
    assert len(names) < len(mine["time"]) / 2
    low, high = zip(*(map(math.log, BOUNDS[name]) for name in names), strict=True)
    found = least_squares(
        lambda values: errors("time", **{name: math.exp(value) for name, value in zip(names, values, strict=True)}),
        [math.log(getattr(fitted, name)) for name in names],
        bounds=(low, high),
        diff_step=1e-2,
    )
    return replace(fitted, **{name: math.exp(value) for name, value in zip(names, found.x, strict=True)})


# What the rows measured, as the model sees it: seconds, and GiB of tensors


def kernel(spec: Mapping[str, Any], fitted: Coefficients) -> tuple[float, float]:
    machine = Machine(H200, fitted)
    if "matmul" in spec:
        tokens, wide, deep = spec["matmul"]
        return machine.matmul_s(Work("", "outside", 1, tokens, linear=2.0 * tokens * wide * deep)), 0.0
    asked = spec["attention"]
    if "blocks" in asked:
        blocks = asked["blocks"]
        tokens, pairs = 2 * 21 * FRAME_TOKENS, float((21 // blocks * FRAME_TOKENS) ** 2 * blocks * (blocks + 1))
    else:
        tokens, pairs = asked["tokens"], float(asked["tokens"] * asked["keys"])
    work = Work("", "block", 1, tokens, tokens, pairs, "blocks" in asked, shape=SIZES["1.3B"])
    passes = [work, replace(work, backward=True)] if asked.get("backward") else [work]
    return sum(map(machine.attention_s, passes)), 0.0


class CountedBench(causal_wan.Bench):
    """The bench of single calls, on networks that count."""

    def __init__(self) -> None:
        self.options = argparse.Namespace(size="1.3B", frames=SHAPE[0], height=SHAPE[2], width=SHAPE[3])
        self.device, self.ledger = torch.device("meta"), Ledger()
        self.architecture, self.frame_tokens = self.section().architecture, FRAME_TOKENS
        self.x_t = torch.empty((1, *SHAPE), device="meta")
        self.cond = EmbeddingCond(torch.empty((1, TEXT, self.architecture.text_dim), device="meta"))
        self.trained = False

    def role(self, trained: bool = False, **causal: Any) -> CountedRole:
        self.trained = trained
        inside = Inside(self.architecture, torch.bfloat16, trained, trained, True)
        self.network = counted(self.section(**causal), "student", inside, self.ledger)
        self.network.learn(trained)
        return CountedRole("student", self.network, torch.bfloat16)


@cache
def called(work: str) -> tuple[Counter[Work], float, list[Held]]:
    """What one call of the bench asks for, the bytes that are there before, and the moments of most memory."""
    bench = CountedBench()
    with bench.ledger:
        call, _ = causal_wan.WORK[work](bench)
        bench.ledger.begin()
        call()
    kept = state_of("teacher", bench.network.num_weights, bench.trained, torch.bfloat16)
    before = kept.weights + kept.gradients + 4 * bench.network.block_weights * bench.trained
    return bench.ledger.works, before, [peak._replace(cut=0) for peak in bench.ledger.peaks]


def call(spec: Mapping[str, Any], fitted: Coefficients) -> tuple[float, float]:
    works, before, peaks = called(spec["work"])
    return max(seconds(works, Machine(H200, fitted))), (before + most(peaks, fitted)) / GIB


def most(peaks: Iterable[Held], fitted: Coefficients) -> float:
    """Bytes at the peak, of one row on one GPU."""
    return max(held.activations + fitted.joined * held.joined + held.cut + held.whole for held in peaks)


def sized(causal: bool, trained: bool) -> Sized:
    form = CausalSection(block_frames=3) if causal else None
    return Sized(WanSection(size="1.3B", conditioner=EmbeddingSection(), causal=form), trained)


@cache
def updates(work: str) -> tuple[list[PhaseCost], float]:
    """The phases of the bench of methods, causal networks as they are, bidirectional ones compiled; and the bytes of
    all roles between them."""
    if work == "consistency":
        method: Any = Consistency(ConsistencySection())
        sizes = {"student": sized(True, True), "teacher": sized(True, False)}
    else:
        rollout: Any = SelfForcing.of(SamplingSection(steps=4, shift=5.0), SHAPE, CausalSection(block_frames=3))
        method = DMD2(DMD2Section(critic_updates=1, guidance_scale=4.0), rollout)
        sizes = {"student": sized(True, True), "teacher": sized(False, False), "critic": sized(False, True)}
    compiled = frozenset(name for name, size in sizes.items() if size.section.causal is None)  # type: ignore[union-attr]
    counts = counts_of(sizes)
    kept = sum(state_of(name, counts[name].all, size.trained, torch.bfloat16).kept for name, size in sizes.items())
    return trace(method, sizes, SHAPE, Setting(recompute=True, compiled=compiled)), kept


@cache
def trajectories() -> tuple[Counter[Work], float, list[Held]]:
    """Of a clip of 48 steps of a guided causal teacher."""
    ledger = Ledger()
    section = sized(True, False).section
    assert section is not None
    network = counted(section, "teacher", Inside(section.architecture, torch.bfloat16, False, False), ledger)
    with ledger:
        key = torch.empty(1, dtype=torch.int64, device="meta")
        cond = EmbeddingCond(torch.empty((1, TEXT, section.architecture.text_dim), device="meta"))
        batch = Batch(key, torch.empty((1, *SHAPE), device="meta"), cond, cond)
        TeacherODE(48, 5.0, (1.0,), 6.0)(
            CountedRole("teacher", network, torch.bfloat16), batch, Stopping(0, "", 0, key)
        )
    return ledger.works, 2.0 * network.num_weights, ledger.peaks


def update(spec: Mapping[str, Any], fitted: Coefficients) -> tuple[float, float]:
    machine = Machine(H200, fitted)
    if spec["work"] == "ode-data":
        works, before, peaks = trajectories()
        return max(seconds(works, machine)), (before + most(peaks, fitted)) / GIB
    phases, kept = updates("consistency" if spec["work"] == "consistency" else "self-forcing")
    wanted = {"consistency": ("pair", "target", "student"), "rollout": ("rollout",), "critic": ("rollout", "critic")}
    names = wanted.get(spec["work"], ("rollout", "scores", "student"))
    spent = sum(max(seconds(phase.works, machine)) for phase in phases if phase.name in names)
    return spent, (kept + most((held for phase in phases for held in phase.peaks), fitted)) / GIB


@cache
def planner(recipe: str, overrides: tuple[str, ...]) -> Planner:
    loaded = load_recipe(find_recipe(recipe), list(overrides))
    return Planner(sizes_of(loaded, find=run_recipe), H200)


def iteration(spec: Mapping[str, Any], fitted: Coefficients) -> tuple[float, float]:
    plan = planner(spec["recipe"], tuple(spec["overrides"]))
    plan.fitted, plan.slower_host = fitted, spec.get("slower_host", 1.0)
    engine = plan.sizes.recipe.engine
    found = plan.estimate(Layout(spec.get("gpus", 1), recompute=engine.recompute, micro_batch=engine.micro_batch))
    spent = sum(phase.busy_s for phase in found.phases) if spec.get("busy") else found.seconds
    return spent, found.tensors_gib


def layout(spec: Mapping[str, Any], fitted: Coefficients) -> tuple[float, float]:
    """An iteration on several GPUs, by ``bench/groups.py``."""
    plan = planner(spec["recipe"], tuple(spec["overrides"]))
    plan.fitted = fitted
    found = plan.estimate(Layout(**spec["layout"], recompute=True, micro_batch=1))
    return found.seconds, found.tensors_gib


PREDICT: dict[str, Callable[[Mapping[str, Any], Coefficients], tuple[float, float]]] = {
    "kernel": kernel,
    "call": call,
    "update": update,
    "iteration": iteration,
    "layout": layout,
}


def errors(rows: list[Row], fitted: Coefficients) -> list[tuple[Row, float, float]]:
    """Every row with the model's figure and its error, a share of what was measured."""
    found = [(row, predict(row, fitted)) for row in rows]
    return [(row, value, value / row.measured - 1) for row, value in found]


def summary(found: list[tuple[Row, float, float]], quantity: str, held_out: bool) -> str:
    """Mean and largest error of some rows: ``mean 5 %, largest 12 % (name), 7 rows``."""
    mine = [(abs(error), row.name) for row, _, error in found if row.quantity == quantity and row.held_out is held_out]
    worst, name = max(mine)
    return f"mean {fmean(error for error, _ in mine):.1%}, largest {worst:.1%} ({name}), {len(mine)} rows"


def report(rows: list[Row], fitted: Coefficients) -> str:
    found = errors(rows, fitted)
    lines = ["coefficients: " + ", ".join(f"{name} {value:.4g}" for name, value in asdict(fitted).items()), ""]
    for held_out in (False, True):
        for quantity in ("time", "memory"):
            title = "held out" if held_out else "for the fit"
            lines.append(f"{quantity}, {title}: {summary(found, quantity, held_out)}")
    lines += ["", "| work | kind | | measured | by the plan | error |", "|---|---|---|---|---|---|"]
    for row, value, error in sorted(
        found, key=lambda one: (one[0].quantity, one[0].held_out, one[0].kind, one[0].name)
    ):
        unit = "s" if row.quantity == "time" else "GiB"
        part = "held out" if row.held_out else "fit"
        lines.append(
            f"| {row.name} | {row.kind} | {part} | {row.measured:.3g} {unit} | {value:.3g} {unit} | {error:+.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

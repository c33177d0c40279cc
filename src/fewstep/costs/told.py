"""Estimates in words and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from fewstep.costs.estimate import CONTEXT_GIB, GIB, SPLIT_UP, Estimate, PhaseEstimate, Planner


def layout_rows(planner: Planner, found: Sequence[Estimate]) -> Iterator[tuple[str, ...]]:
    """A line of the table of layouts."""
    for one in found:
        verdict = "fits" if one.fits else "too large"
        speed = (f"{one.seconds:.3g}", f"{one.samples_per_s:.3g}", f"{one.mfu:.0%}")
        yield one.layout.name, f"{one.memory_gib:.1f}", verdict, *speed


def best_rows(best: Estimate) -> Iterator[tuple[str, ...]]:
    """Memory of a layout: of every role, then what is no role's, then all of it."""
    for name, state in best.roles.items():
        parts = (state.weights, state.gradients, state.optimizer, state.ema)
        yield name, *(f"{part / GIB:.2f}" if part else "" for part in parts), f"{state.kept / GIB:.2f}"
    for name, value in best.parts.items():
        if value:
            of = "of which " * (name == "histories")
            yield of + name, "", "", "", "", f"{value / GIB:.2f}"
    yield "CUDA, and what the allocator cannot use", "", "", "", "", f"{best.memory_gib - best.tensors_gib:.2f}"
    yield "together, at the peak", "", "", "", "", f"{best.memory_gib:.2f}"


def phase_rows(best: Estimate) -> Iterator[tuple[str, ...]]:
    """One line a phase."""
    for phase in best.phases:
        yield (
            phase.name,
            str(phase.times),
            f"{phase.pieces} x {phase.rows}",
            f"{phase.tokens:,.0f}",
            f"{phase.flops / 1e12:,.4g}",
            f"{phase.seconds:.3g}",
            bound(phase),
        )


def bound(phase: PhaseEstimate) -> str:
    """What the phase waits for."""
    times = {"GPU": phase.busy_s, "host": phase.host_s, "network": phase.network_s}
    return max(times, key=lambda name: times[name])


def as_plain(planner: Planner, found: Sequence[Estimate]) -> dict[str, Any]:
    """Everything, for a program: sizes in bytes and seconds, figures to six digits."""
    recipe = planner.sizes.recipe
    return {
        "recipe": recipe.name,
        "kind": planner.kind.name,
        "gpus": found[0].layout.gpus,
        "host_gpus": planner.host_gpus,
        "batch": recipe.data.batch,
        "guessed": list(planner.sizes.guessed),
        "flops_per_iteration": _rounded(planner.model_flops),
        "roles": {name: asdict(state) for name, state in planner.states.items()},
        "overheads": {"context_gib": CONTEXT_GIB, "allocator": SPLIT_UP},
        "coefficients": asdict(planner.fitted),
        "layouts": [_plain(one) for one in found],
    }


def _plain(one: Estimate) -> dict[str, Any]:
    return {"name": one.layout.name, **_rounded(asdict(one))}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value

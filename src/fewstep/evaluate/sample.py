"""Samples of a network: one function for validation, ``fewstep sample`` and ``fewstep eval``, on training's sampler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from fewstep.evaluate.counted import Counted
from fewstep.flow.solvers import Solver
from fewstep.models.api import FlowModel
from fewstep.records import Rollout
from fewstep.rng import Draw
from fewstep.rollout.few_step import SamplingSection
from fewstep.shapes import Latents
from fewstep.watched import watched


@runtime_checkable
class LabelConditioner(Protocol):
    """Makes a family's conditioning of class labels, or of texts that stand in their place, and of "none"."""

    def condition(self, label: Any) -> Any: ...

    def null(self, num: int, device: torch.device | str = "cpu") -> Any: ...


@runtime_checkable
class Sampler(Protocol):
    """Makes images, clips at once, or clips block by block: what ``rollout`` calls a sampler."""

    @property
    def sigmas(self) -> tuple[float, ...]: ...

    @property
    def solver(self) -> Solver: ...

    @property
    def guidance_scale(self) -> float: ...

    @property
    def sample(self) -> Callable[..., Rollout]:
        """``(model, cond, uncond, draw, stop)``, and ``given`` for samplers that continue clips."""
        ...


@dataclass(frozen=True)
class Samples:
    """x0: on the CPU. network_calls: evaluations of the network for one sample (two a step when
    guided); of a causal network, of one block. batch_s:
    seconds that the sampling of each batch took."""

    x0: Latents
    network_calls: float
    batch_s: tuple[float, ...]


def generate(
    model: FlowModel,
    sampler: Sampler,
    conditioner: LabelConditioner,
    labels: Int64[Tensor, "n"] | Float[Tensor, "n l d"],
    seed: int,
    *,
    batch: int = 100,
    first_key: int = 0,
    stop: int | None = None,
    given: Latents | None = None,
    device: torch.device | str = "cpu",
) -> Samples:
    """One sample for each label, or for each text, ``batch`` at a time.

    The noise of sample i is a function of (seed, first_key + i): not of the batch size, nor of what else is sampled.
    Two models sampled with one seed start from the same noise. ``stop`` is an index into the sampler's sigmas: the
    samples are the predictions of x0 at that step. ``given`` are the clean frames that each clip begins with, for
    samplers that continue clips; they come back unchanged.

    No global generator is used; a module is in evaluation mode meanwhile and gets its own mode back, whatever happens.
    """
    counted, made, batch_s = Counted(model), [], []
    key = torch.arange(first_key, first_key + len(labels), device=device)
    with torch.no_grad(), evaluation_mode(model):
        for rows in watched(f"sampling {len(labels):,}, {batch} at a time", torch.arange(len(labels)).split(batch)):
            draw = Draw(seed, "sample", 0, key[rows])
            cond = conditioner.condition(labels[rows].to(device))
            uncond = None if sampler.guidance_scale == 1.0 else conditioner.null(len(rows), device)
            start = {} if given is None else {"given": given[rows].to(device)}
            start_s = _now(device)
            x0 = sampler.sample(counted, cond, uncond, draw, stop, **start).x0
            batch_s.append(_now(device) - start_s)
            made.append(x0.cpu())
    return Samples(torch.cat(made), counted.num_rows / len(labels), tuple(batch_s))


def balanced_labels(num: int, num_classes: int) -> Int64[Tensor, "n"]:
    """Every class equally often: sample i is of class i modulo the number of classes."""
    return torch.arange(num) % num_classes


def departures(trained: SamplingSection, used: SamplingSection) -> list[str]:
    """One sentence for each setting in which ``used`` departs from the sampler that the network was trained for, with
    the trained value. Empty where they are the same sampler, however they are written."""
    found = []
    if used.resolved() != trained.resolved():
        found.append(
            f"sampled in {len(used.resolved())} steps (sigmas {_list(used)}); the network was trained for "
            f"{len(trained.resolved())} ({_list(trained)})"
        )
    for name in ("solver", "guidance_scale", "first_block_steps", "history_sigma", "given_frames", "rolling_blocks"):
        mine, theirs = getattr(used, name), getattr(trained, name)
        if mine != theirs:
            found.append(f"sampled with {name} {mine}; the network was trained for {theirs}")
    return found


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Inside, all modules of the model (a module, or a role with its ``network``) are in evaluation mode; after it,
    each is as it was."""
    network = model if isinstance(model, nn.Module) else getattr(model, "network", None)
    modules = list(network.modules()) if isinstance(network, nn.Module) else []
    training = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, before in zip(modules, training, strict=True):
            module.training = before


def _now(device: torch.device | str) -> float:
    """Seconds, once everything that was asked of the device is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _list(section: SamplingSection) -> str:
    return ", ".join(f"{sigma:.5g}" for sigma in section.resolved())

"""Samples of a network: one function for validation, ``fewstep sample`` and ``fewstep eval``, on training's sampler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from fewstep.models.api import FlowModel, Geometry
from fewstep.rng import Draw
from fewstep.rollout.few_step import FewStep, SamplingSection
from fewstep.shapes import Latents, Sigma, Tokens


@runtime_checkable
class LabelConditioner(Protocol):
    """Makes a family's conditioning of class labels, and of "none"."""

    def condition(self, label: Int64[Tensor, "b"]) -> Any: ...

    def null(self, num: int, device: torch.device | str = "cpu") -> Any: ...


@dataclass(frozen=True)
class Samples:
    """x0: on the CPU. network_calls: evaluations of the network for one sample (two a step when guided). batch_s:
    seconds that the sampling of each batch took."""

    x0: Latents
    network_calls: float
    batch_s: tuple[float, ...]


def generate(
    model: FlowModel,
    sampler: FewStep,
    conditioner: LabelConditioner,
    labels: Int64[Tensor, "n"],
    seed: int,
    *,
    batch: int = 100,
    first_key: int = 0,
    stop: int | None = None,
    device: torch.device | str = "cpu",
) -> Samples:
    """One sample for each label, ``batch`` at a time.

    The noise of sample i is a function of (seed, first_key + i): not of the batch size, nor of what else is sampled.
    Two models sampled with one seed start from the same noise. ``stop`` is an index into the sampler's sigmas: the
    samples are the predictions of x0 at that step.

    No global generator is used; a module is in evaluation mode meanwhile and gets its own mode back, whatever happens.
    """
    counted, made, batch_s = _Counted(model), [], []
    key = torch.arange(first_key, first_key + len(labels), device=device)
    with torch.no_grad(), evaluation_mode(model):
        for rows in torch.arange(len(labels)).split(batch):
            draw = Draw(seed, "sample", 0, key[rows])
            cond = conditioner.condition(labels[rows].to(device))
            uncond = None if sampler.guidance_scale == 1.0 else conditioner.null(len(rows), device)
            start_s = _now(device)
            x0 = sampler.sample(counted, cond, uncond, draw, stop).x0
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
    for name in ("solver", "guidance_scale"):
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


class _Counted:
    """A model that counts the rows it is called with."""

    def __init__(self, model: FlowModel):
        self.model, self.num_rows = model, 0

    @property
    def geometry(self) -> Geometry:
        return self.model.geometry

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def width(self) -> int:
        return self.model.width

    def velocity(self, x_t: Latents, sigma: Sigma, cond: Any) -> Latents:
        self.num_rows += len(x_t)
        return self.model.velocity(x_t, sigma, cond)

    def features(self, x_t: Latents, sigma: Sigma, cond: Any, layers: tuple[int, ...]) -> tuple[Tokens, ...]:
        return self.model.features(x_t, sigma, cond, layers)


def _now(device: torch.device | str) -> float:
    """Seconds, once everything that was asked of the device is done."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _list(section: SamplingSection) -> str:
    return ", ".join(f"{sigma:.5g}" for sigma in section.resolved())

"""Tiny causal networks, and self-forcing written out step by step: what samplers are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fewstep.models.blocks import CausalSection
from fewstep.models.wan.causal import CausalWan
from fewstep.models.wan.conditioner import LabelCond
from fewstep.records import Batch
from fewstep.rng import Draw
from fewstep.rollout.self_forcing import SelfForcing
from tests.models.tiny import LABELS, randomise, tiny_section

CHW = (4, 4, 4)
SIGMAS = (1.0, 0.9, 0.6)
COND, UNCOND = LabelCond(torch.tensor([3, 0])), LabelCond(torch.full((2,), 5))

FORMS: list[dict[str, Any]] = [
    {"block_frames": 1},
    {"block_frames": 3},
    {"block_frames": 2, "first_frame_alone": True},
    {"block_frames": 1, "window": 3},
    {"block_frames": 1, "window": 3, "sink": 1},
    {"block_frames": 2, "window": 4, "sink": 1, "first_frame_alone": True},
    {"block_frames": 2, "window": 4, "sink": 2, "positions": "reindexed"},
    {"block_frames": 1, "window": 3, "positions": "reindexed"},
]


class CountingWan(CausalWan):
    """Keeps the name, the rows and the frames of every call."""

    def __init__(self, section: Any):
        super().__init__(section)
        self.calls: list[tuple[str, int, int]] = []

    def tell(self, cond: Any) -> Any:
        self.calls.append(("tell", 0, 0))
        return super().tell(cond)

    def prefill(self, x0: Tensor, *others: Any) -> Any:
        self.calls.append(("prefill", len(x0), x0.shape[1]))
        return super().prefill(x0, *others)

    def append(self, history: Any, x0: Tensor, *others: Any) -> Any:
        self.calls.append(("append", len(x0), x0.shape[1]))
        return super().append(history, x0, *others)

    def velocity_given(self, x_t: Tensor, *others: Any, **how: Any) -> Tensor:
        self.calls.append(("velocity", len(x_t), x_t.shape[1]))
        return super().velocity_given(x_t, *others, **how)

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


def network(form: dict[str, Any], dtype: torch.dtype = torch.float64, layers: int = 2) -> CountingWan:
    made = CountingWan(tiny_section(LABELS, layers=layers, causal=CausalSection(**form)))
    return randomise(made, 1).to(dtype)  # type: ignore[return-value]


def frames_of(form: dict[str, Any], blocks: int = 4) -> int:
    return CausalSection(**form).start(blocks)


def sampler(form: dict[str, Any], blocks: int = 4, **settings: Any) -> SelfForcing:
    given = {"sigmas": SIGMAS, "solver": "renoise", "dtype": torch.float64} | settings
    return SelfForcing(shape=(frames_of(form, blocks), *CHW), **given)


def draw(iteration: int = 0, rows: int = 2) -> Draw:
    return Draw(seed=3, phase="rollout.0", iteration=iteration, key=torch.arange(rows))


@dataclass(frozen=True)
class StreamDraw(Draw):
    """The noise of a stream of many chunks in one draw: of each block what the iteration draws that makes it.

    Its own iteration is the one in which the stream begins."""

    first: tuple[int, ...] = ()
    """The number of every chunk's first block."""

    @classmethod
    def of(cls, draw: Draw, made: SelfForcing, causal: CausalSection) -> StreamDraw:
        new = made.shape[0] - made.overlap_frames
        first = (0, *(causal.block_from(made.shape[0] + n * new) for n in range(made.stream_chunks - 1)))
        return cls(draw.seed, draw.phase, draw.iteration, draw.key, first)

    def normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        chunk = sum(int(name.split(".")[1]) >= first for first in self.first) - 1
        return Draw(self.seed, self.phase, self.iteration + chunk, self.key).normal(name, shape, dtype)


def batch(x0: Tensor | None = None) -> Batch:
    return Batch(torch.arange(2), x0, COND, UNCOND)


def data(frames: int) -> Tensor:
    return torch.randn(2, frames, *CHW, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def written_out(
    model: CausalWan,
    num_frames: int,
    stops: list[int],
    *,
    sigmas: tuple[float, ...] = SIGMAS,
    first: tuple[float, ...] | None = None,
    solver: str = "renoise",
    history_sigma: float = 0.0,
    given: Tensor | None = None,
    at: Draw | None = None,
) -> Tensor:
    """Self-forcing by its definition, one block after the other on a rolling cache: x0 of every block at its stop, with
    a gradient of its last call alone."""
    at, causal, made, history, start = at or draw(), model.causal, [], None, 0
    for block, size in enumerate(causal.partition(num_frames)):
        span, start = slice(start, start + size), start + size
        if given is not None and start <= given.shape[1]:
            with torch.no_grad():
                history = CausalWan.append(model, history, given[:, span], COND)
            made.append(given[:, span])
            continue
        levels = (first if block == 0 and first else sigmas)[: stops[block] + 1]
        x = at.normal(f"block.{block}.noise", (size, *CHW), dtype=torch.float64)
        with torch.no_grad():
            for step, (here, below) in enumerate(pairwise(levels)):
                velocity = CausalWan.velocity_given(model, x, full(here, size), COND, history, block)
                if solver == "ode":
                    x = x + (below - here) * velocity
                else:
                    fresh = at.normal(f"block.{block}.renoise.{step}", (size, *CHW), dtype=torch.float64)
                    x = (1 - below) * (x - here * velocity) + below * fresh
        last = full(levels[-1], size)
        x0 = x - levels[-1] * CausalWan.velocity_given(model, x, last, COND, history, block)
        made.append(x0)
        with torch.no_grad():
            noise = at.normal(f"block.{block}.history", (size, *CHW), dtype=torch.float64)
            seen = (1 - history_sigma) * x0 + history_sigma * noise
            history = CausalWan.append(model, history, seen, COND, full(history_sigma, size))
    return torch.cat(made, 1)


def full(sigma: float, frames: int, rows: int = 2) -> Tensor:
    return torch.full((rows, frames), sigma, dtype=torch.float64)


def gradients(model: CausalWan, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))

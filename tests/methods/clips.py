"""Small clips, and real causal networks in float64 that see them block by block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fewstep.models.blocks import CausalSection
from fewstep.models.wan.causal import CausalWan
from fewstep.models.wan.conditioner import LabelCond
from fewstep.models.wan.model import Wan
from fewstep.records import Batch
from fewstep.rng import Draw
from tests.engines.worlds import network

ROWS, DOUBLE = 3, torch.float64
LABEL, NULL = torch.tensor([3, 0, 4]), 5


def latents(seed: int, num_frames: int = 5, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, num_frames, 4, 4, 2, generator=generator, dtype=DOUBLE)


def clips(num_frames: int = 5) -> Batch:
    null = LabelCond(torch.full((ROWS,), NULL))
    return Batch(torch.arange(ROWS), latents(1, num_frames), LabelCond(LABEL), null)


def draw(phase: str = "student", rows: int = ROWS) -> Draw:
    return Draw(seed=3, phase=phase, iteration=7, key=torch.arange(rows))


def causal(seed: int, **form: Any) -> CausalWan:
    made = network(seed, causal=CausalSection(**({"block_frames": 2} | form))).double()
    assert isinstance(made, CausalWan)
    return made


def noised(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    level = sigma.double()[..., None, None, None]
    return (1 - level) * x0 + level * noise


def x0_of(velocity: Tensor, x_t: Tensor, sigma: Tensor) -> Tensor:
    return x_t - sigma.double()[..., None, None, None] * velocity


def block_by_block(
    model: CausalWan, x_t: Tensor, sigma: Tensor, cond: Any, clean: Tensor, clean_sigma: Tensor
) -> Tensor:
    """Teacher forcing the slow way: every block against a history of the clean blocks before it."""
    found, history, start = [], None, 0
    for block, size in enumerate(model.causal.partition(x_t.shape[1])):
        span = slice(start, start + size)
        found.append(model.velocity_given(x_t[:, span], sigma[:, span], cond, history, block))
        history = model.append(history, clean[:, span], cond, clean_sigma[:, span])
        start += size
    return torch.cat(found, 1)


class Watched:
    """A network that keeps what it was asked."""

    def __init__(self, network: Wan):
        self.network, self.asked = network, []
        self.geometry, self.num_layers, self.width = network.geometry, network.num_layers, network.width
        self.causal = getattr(network, "causal", None)

    def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any, **forced: Any) -> Tensor:
        self.asked.append((x_t, sigma, cond, forced))
        return self.network.velocity(x_t, sigma, cond, **forced)

    def features(self, x_t: Tensor, sigma: Tensor, cond: Any, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
        self.asked.append((x_t, sigma, cond, {"layers": layers}))
        return self.network.features(x_t, sigma, cond, layers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]

"""Real Wan networks at tiny size: 3 heads, 3 layers, 4 channels, no tensor left at zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fewstep.models.families import build
from fewstep.models.wan.conditioner import ClassLabelSection, EmbeddingCond, EmbeddingSection
from fewstep.models.wan.model import Wan
from fewstep.models.wan.sizes import WanSection

SHAPE: dict[str, Any] = {
    "channels": 4,
    "patch": (1, 2, 2),
    "dim": 48,
    "layers": 3,
    "heads": 3,
    "ffn_dim": 80,
    "text_dim": 20,
    "freq_dim": 32,
}
TEXT, LABELS = EmbeddingSection(), ClassLabelSection(classes=5, tokens=2)


def tiny_section(conditioner: EmbeddingSection | ClassLabelSection = TEXT, **overrides: Any) -> WanSection:
    return WanSection(size="nano", conditioner=conditioner, **(SHAPE | overrides))


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter drawn anew, none left at zero or one, at a scale that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + 0.2 * noise)
        elif parameter.ndim == 1 or "modulation" in name or "table" in name:
            parameter.copy_(0.4 * noise)
        else:
            parameter.copy_(noise * parameter[0].numel() ** -0.5)
    return module


def tiny_wan(section: WanSection | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> Wan:
    network = build(section or tiny_section())
    randomise(network, seed)
    return network.to(dtype)


def inputs(
    b: int = 2, f: int = 3, h: int = 8, w: int = 6, *, text: int = 7, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor, EmbeddingCond]:
    """x_t, a noise level of its own for every frame, and text of odd length."""
    generator = torch.Generator().manual_seed(seed)
    x_t = torch.randn(b, f, SHAPE["channels"], h, w, generator=generator, dtype=torch.float64)
    sigma = torch.rand(b, f, generator=generator, dtype=torch.float64)
    tokens = torch.randn(b, text, SHAPE["text_dim"], generator=generator, dtype=torch.float64)
    return x_t.to(dtype), sigma.to(dtype), EmbeddingCond(tokens.to(dtype))


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error over the largest value."""
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).abs().max() / expected.abs().max()).item()

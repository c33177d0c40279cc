"""The head that tells real from generated samples by a network's features (DMD2, arXiv:2405.14867, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor, nn

from fewstep.models.precision import WideLayerNorm, WideLinear
from fewstep.shapes import PerSample, Tokens


class Discriminator(nn.Module):
    """A small head on the features of one or several layers, computed in float32 or wider.

    Each layer's tokens are normalised, transformed, averaged over the tokens and weighed to one logit; the logits of
    several layers are averaged. Positive means real. With ``output`` at zero every logit is 0.
    """

    def __init__(self, width: int, num_features: int = 1):
        """width: of a feature token. num_features: how many layers are read."""
        super().__init__()
        self.heads = nn.ModuleList(_Head(width) for _ in range(num_features))

    def forward(self, features: tuple[Tokens, ...]) -> PerSample:
        """The logit of every sample. Raises ValueError for another number of layers than the head was built for."""
        if len(features) != len(self.heads):
            raise ValueError(f"the discriminator reads {len(self.heads)} layers; {len(features)} were given")
        logits = [head(tokens) for head, tokens in zip(self.heads, features, strict=True)]
        return torch.stack(logits).mean(0)

    @torch.no_grad()
    def initialise(self, generator: Generator) -> None:
        """Draws all weights from a CPU generator, in float32 and in a fixed order."""
        for (_, value), parameter in zip(self.drawn(generator), self.parameters(), strict=True):
            parameter.copy_(value)

    def drawn(self, generator: Generator) -> Iterator[tuple[str, Tensor]]:
        """The weights that ``initialise`` sets, whole and one after the other, by name."""
        for name, parameter in self.named_parameters():
            value = torch.empty(parameter.shape, dtype=torch.float32)
            if name.endswith("bias"):
                value.zero_()
            elif "norm" in name:
                value.fill_(1.0)
            else:
                nn.init.xavier_uniform_(value, generator=generator)
            yield name, value


class _Head(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = WideLayerNorm(width)
        self.hidden = WideLinear(width, width)
        self.activation = nn.SiLU()
        self.output_norm = WideLayerNorm(width)
        self.output = WideLinear(width, 1)

    def forward(self, tokens: Tokens) -> PerSample:
        pooled = self.activation(self.hidden(self.norm(tokens))).mean(1)
        return self.output(self.output_norm(pooled)).squeeze(-1)

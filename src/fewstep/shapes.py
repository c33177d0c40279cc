"""Tensor shapes that stand in signatures. Axes: b samples, f latent frames, c channels, h w latent height and width,
n tokens, d width of a token.

The aliases are checked in the tests (an import hook with beartype) and cost nothing in production.
"""

from jaxtyping import Float, Int64
from torch import Tensor

Latents = Float[Tensor, "b f c h w"]
"""Clean latents, noise, noised latents, velocities. An image has f = 1."""

Sigma = Float[Tensor, "b f"]
"""Noise level of every frame, 0 clean to 1 pure noise; float32 outside the float64 tests."""

PerSample = Float[Tensor, "b"]
"""One value a sample, a loss for instance."""

Tokens = Float[Tensor, "b n d"]
"""Features inside a network: n tokens of width d."""

Keys = Int64[Tensor, "b"]
"""The rows' positions in the global batch of one iteration; with the iteration they name a row for ever."""

"""The contract of what stands around a network: the VAE between pixels and latents, and the encoders of its texts.

A family opens them from a folder in the layout of diffusers (``models/<family>/encoders.py``), each when it is first
asked for. Training never sees them: ``fewstep encode`` runs them once, and what they give is stored as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from fewstep.models.api import Geometry
from fewstep.shapes import Latents


@runtime_checkable
class Encoders(Protocol):
    """VAE and text encoders of one checkpoint folder."""

    @property
    def geometry(self) -> Geometry:
        """What the latents look like; ``compression`` is that of the VAE."""
        ...

    @property
    def vae_id(self) -> str:
        """Names the VAE with everything that changes its latents: the digest of its weights and configuration."""
        ...

    @property
    def text_id(self) -> str:
        """Names tokenizers and text encoders likewise."""
        ...

    @property
    def text_columns(self) -> dict[str, tuple[int, ...]]:
        """What a text becomes: the shape of every named tensor, without the rows' axis; known before weights load."""
        ...

    @property
    def mean_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Of every latent channel: what the recipe's codec ``latents`` takes off, and divides by."""
        ...

    def fits(self, frames: int, height: int, width: int) -> None:
        """Raises UserError where the VAE or the network's patch cannot take this many frames, rows and columns; says
        both numbers and the nearest that fit."""
        ...

    def latents(self, pixels: UInt8[Tensor, "b f c h w"]) -> Latents:
        """The mean of the VAE's posterior, not normalised, in float32."""
        ...

    def pixels(self, latents: Latents) -> Float[Tensor, "b f c h w"]:
        """The inverse: pixels in [-1, 1] of latents as ``latents`` gives them."""
        ...

    def texts(self, prompts: Sequence[str]) -> dict[str, Tensor]:
        """The named tensors of ``text_columns``, rows first; the empty prompt is a prompt like others."""
        ...

    def to(self, device: torch.device | str) -> Encoders:
        """The same on another device."""
        ...

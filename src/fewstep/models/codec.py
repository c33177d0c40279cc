"""From pixels to latents and back. The identity codec keeps pixels as they are, normalised channel by channel."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, UInt8
from pydantic import model_validator
from torch import Tensor

from fewstep.section import Section
from fewstep.shapes import Latents


class IdentitySection(Section):
    """Latents are the pixels themselves, in [-1, 1], less ``mean`` and divided by ``std``, channel by channel."""

    name: Literal["identity"] = "identity"
    mean: tuple[float, ...] = (0.0,)
    """Of every channel, on the scale [-1, 1]; one value for every channel of the data."""
    std: tuple[float, ...] = (1.0,)
    """Of every channel, on the scale [-1, 1]; one value for every channel of the data."""

    @model_validator(mode="after")
    def _check(self) -> IdentitySection:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f"mean has {len(self.mean)} and std {len(self.std)} values: write one of each for every channel"
            )
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std} must be positive in every channel")
        return self


class IdentityCodec:
    """Normalised pixels as latents; no compression."""

    def __init__(self, section: IdentitySection):
        self.section = section

    @property
    def id(self) -> str:
        """Names the codec with everything that changes its latents; stored beside cached latents and with weights."""
        mean, std = (",".join(repr(value) for value in values) for values in (self.section.mean, self.section.std))
        return f"identity(mean={mean};std={std})"

    @property
    def channels(self) -> int:
        """Channels of the pixels and of the latents."""
        return len(self.section.mean)

    def encode(self, pixels: UInt8[Tensor, "b f c h w"]) -> Latents:
        """x0 in float32 of pixels 0 to 255. Raises ValueError if the number of channels is not the codec's."""
        mean, std = self._statistics(pixels)
        return (pixels.to(torch.float32) / 127.5 - 1 - mean) / std

    def decode(self, x0: Latents) -> Float[Tensor, "b f c h w"]:
        """Pixels in [-1, 1]; what lies outside is clamped. Raises ValueError as ``encode`` does."""
        mean, std = self._statistics(x0)
        return (x0 * std + mean).clamp(-1, 1)

    def _statistics(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        if tensor.shape[2] != self.channels:
            raise ValueError(f"codec {self.id} has {self.channels} channels; the data have {tensor.shape[2]}")
        dtype = tensor.dtype if tensor.dtype.is_floating_point else torch.float32
        mean, std = (
            torch.tensor(values, dtype=dtype, device=tensor.device).view(-1, 1, 1)
            for values in (self.section.mean, self.section.std)
        )
        return mean, std

"""From what the data hold to latents and back: pixels, or latents of a VAE, normalised channel by channel."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from jaxtyping import Float, UInt8
from pydantic import Field, model_validator
from torch import Tensor

from fewstep.section import Section
from fewstep.shapes import Latents


class NormalisedSection(Section):
    """Mean and standard deviation of every channel."""

    name: str
    """The codec's name in a recipe."""
    mean: tuple[float, ...] = (0.0,)
    """Of every channel; one value for every channel of the data."""
    std: tuple[float, ...] = (1.0,)
    """Of every channel; one value for every channel of the data."""

    @model_validator(mode="after")
    def _check(self):
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f"mean has {len(self.mean)} and std {len(self.std)} values: write one of each for every channel"
            )
        if min(self.std) <= 0:
            raise ValueError(f"std {self.std} must be positive in every channel")
        return self


class IdentitySection(NormalisedSection):
    """Latents are the pixels themselves, in [-1, 1], less ``mean`` and divided by ``std``, channel by channel."""

    name: Literal["identity"] = "identity"
    """The codec's name in a recipe."""
    mean: tuple[float, ...] = (0.0,)
    """Of every channel, on the scale [-1, 1]; one value for every channel of the data."""
    std: tuple[float, ...] = (1.0,)
    """Of every channel, on the scale [-1, 1]; one value for every channel of the data."""


class LatentsCodecSection(NormalisedSection):
    """The data are the latents of a VAE, as it gives them; they are taken less ``mean`` and divided by ``std``."""

    name: Literal["latents"] = "latents"
    """The codec's name in a recipe."""


CodecSection = Annotated[IdentitySection | LatentsCodecSection, Field(discriminator="name")]


class NormalisingCodec:
    """What the codecs have in common."""

    def __init__(self, section: IdentitySection | LatentsCodecSection):
        self.section = section

    @property
    def id(self) -> str:
        """Names the codec with everything that changes its latents; stored beside cached latents and with weights."""
        mean, std = (",".join(repr(value) for value in values) for values in (self.section.mean, self.section.std))
        return f"{self.section.name}(mean={mean};std={std})"

    @property
    def channels(self) -> int:
        """Channels of the data and of the latents."""
        return len(self.section.mean)

    def _statistics(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        if tensor.shape[2] != self.channels:
            raise ValueError(f"codec {self.id} has {self.channels} channels; the data have {tensor.shape[2]}")
        dtype = torch.promote_types(tensor.dtype, torch.float32) if tensor.dtype.is_floating_point else torch.float32
        mean, std = (
            torch.tensor(values, dtype=dtype, device=tensor.device).view(-1, 1, 1)
            for values in (self.section.mean, self.section.std)
        )
        return mean, std


class IdentityCodec(NormalisingCodec):
    """Normalised pixels as latents; no compression."""

    def encode(self, pixels: UInt8[Tensor, "b f c h w"]) -> Latents:
        """x0 in float32 of pixels 0 to 255. Raises ValueError if the number of channels is not the codec's."""
        mean, std = self._statistics(pixels)
        return (pixels.to(torch.float32) / 127.5 - 1 - mean) / std

    def decode(self, x0: Latents) -> Float[Tensor, "b f c h w"]:
        """Pixels in [-1, 1]; what lies outside is clamped. Raises ValueError as ``encode`` does."""
        mean, std = self._statistics(x0)
        return (x0 * std + mean).clamp(-1, 1)


class LatentsCodec(NormalisingCodec):
    """Normalised latents of a VAE; pixels are the VAE's business."""

    def encode(self, latents: Float[Tensor, "b f c h w"]) -> Latents:
        """x0, in float32 or wider, of latents as the VAE gives them. Raises ValueError if the number of channels is not
        the codec's."""
        mean, std = self._statistics(latents)
        return (latents.to(mean.dtype) - mean) / std

    def decode(self, x0: Latents) -> Float[Tensor, "b f c h w"]:
        """Latents as the VAE takes them. Raises ValueError as ``encode`` does."""
        mean, std = self._statistics(x0)
        return x0 * std + mean


Codec = IdentityCodec | LatentsCodec


def build_codec(section: IdentitySection | LatentsCodecSection) -> Codec:
    """The codec of a recipe."""
    return IdentityCodec(section) if isinstance(section, IdentitySection) else LatentsCodec(section)

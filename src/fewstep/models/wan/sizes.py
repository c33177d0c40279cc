"""The sizes of the Wan family and the recipe section that names one.

``1.3B`` and ``14B`` are the published text-to-video networks of Wan 2.1 (arXiv:2503.20314) as in the configurations of
Wan-AI/Wan2.1-T2V-1.3B-Diffusers and Wan-AI/Wan2.1-T2V-14B-Diffusers; ``nano`` and ``small`` have the same
architecture at a size for 16x16 images on CPUs and 32x32 images on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import PositiveInt, model_validator

from fewstep.models.blocks import CausalSection
from fewstep.models.wan.conditioner import ConditionerSection
from fewstep.section import Section

Size = Literal["nano", "small", "1.3B", "14B"]


@dataclass(frozen=True)
class Architecture:
    """Every number that shapes the network."""

    channels: int
    patch: tuple[int, int, int]
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    text_dim: int
    freq_dim: int
    compression: tuple[int, int, int] = (1, 1, 1)
    eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


_VIDEO = Architecture(16, (1, 2, 2), 1536, 30, 12, 8960, 4096, 256, compression=(4, 8, 8))

SIZES: dict[Size, Architecture] = {
    "nano": Architecture(1, (1, 4, 4), dim=128, layers=4, heads=4, ffn_dim=384, text_dim=64, freq_dim=64),
    "small": Architecture(1, (1, 4, 4), dim=256, layers=8, heads=4, ffn_dim=1024, text_dim=128, freq_dim=128),
    "1.3B": _VIDEO,
    "14B": replace(_VIDEO, dim=5120, layers=40, heads=40, ffn_dim=13824),
}


class WanSection(Section):
    """A Wan network: a size by name, and whatever departs from it."""

    family: Literal["wan"] = "wan"
    size: Size
    """The numbers of a published (1.3B, 14B) or of a small network; each can be overridden below."""
    conditioner: ConditionerSection
    """What the network is told about a sample."""
    causal: CausalSection | None = None
    """Blocks of frames that see those before them alone; left out, every frame sees every other."""
    channels: PositiveInt | None = None
    """Latent channels."""
    patch: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    """Latent frames (always 1), rows and columns of one token."""
    dim: PositiveInt | None = None
    """Width of a token inside the network."""
    layers: PositiveInt | None = None
    """Number of transformer blocks."""
    heads: PositiveInt | None = None
    """Attention heads; they must divide ``dim`` into even parts."""
    ffn_dim: PositiveInt | None = None
    """Width of the hidden layer of the feed-forward networks."""
    text_dim: PositiveInt | None = None
    """Width of the conditioner's tokens."""
    freq_dim: PositiveInt | None = None
    """Sines and cosines that encode the noise level; even."""

    @property
    def architecture(self) -> Architecture:
        """The numbers of the size with the overrides applied."""
        size = SIZES[self.size]
        names = ("channels", "patch", "dim", "layers", "heads", "ffn_dim", "text_dim", "freq_dim")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(size, **given)

    @model_validator(mode="after")
    def _check(self) -> WanSection:
        found = self.architecture
        if found.dim % (2 * found.heads):
            raise ValueError(f"dim {found.dim} does not divide into {found.heads} heads of an even width")
        if found.freq_dim % 2:
            raise ValueError(f"freq_dim {found.freq_dim} must be even: half of it are sines, half cosines")
        if found.patch[0] != 1:
            raise ValueError(
                f"patch {found.patch} spans several frames, but every frame has its own noise level: write 1"
            )
        return self

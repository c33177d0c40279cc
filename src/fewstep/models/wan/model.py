"""The Wan transformer (arXiv:2503.20314), text to video; an image is a clip of one frame.

Precision. Parameters may be float32 (alone, or under autocast to bfloat16), float64 or bfloat16. Time embedding,
modulation, norms, residual gates and the velocity are computed in float32 at least; the rest in the parameters' dtype,
or in autocast's. The timestep, 1000 sigma, is never rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fewstep.models.api import Geometry
from fewstep.models.division import UNDIVIDED
from fewstep.models.kv_cache import CrossCache, KeyValue
from fewstep.models.precision import WideLayerNorm, WideLinear, wide
from fewstep.models.rope import Rotation, rotation
from fewstep.models.wan.block import Block, FeedForward, FrameTokens, Modulation, Sight
from fewstep.models.wan.conditioner import ContextTokens, build_conditioner
from fewstep.models.wan.sizes import Architecture, WanSection
from fewstep.shapes import Latents, Sigma, Tokens

NUM_TIMESTEPS = 1000
"""Published Wan weights read the noise level as a timestep, 1000 sigma."""


class Entered(NamedTuple):
    """What the blocks work on."""

    tokens: FrameTokens
    context: tuple[ContextTokens, ...] | tuple[KeyValue, ...]
    """For every block, tokens of the conditioning or their keys and values."""
    time: Float[Tensor, "b f d"]
    modulation: Modulation
    grid: tuple[int, int, int]
    """Frames, rows and columns of tokens, those of other ranks too."""

    @property
    def frame_tokens(self) -> int:
        """Tokens of a frame, those of other ranks too."""
        return self.grid[1] * self.grid[2]


class Wan(nn.Module):
    """The network of a ``WanSection``: predicts the velocity ``noise - x0``.

    Its weights mean nothing until ``initialise`` draws them or a state dict is loaded. Public methods call private ones
    and never each other, so that each can be wrapped by itself (FSDP2's ``register_fsdp_forward_method``).
    """

    def __init__(self, section: WanSection):
        super().__init__()
        self.section = section
        self.recompute = False
        """Whether a backward pass computes every block again instead of keeping what is inside."""
        self.division = UNDIVIDED
        """How ranks divide the tokens of every frame."""
        shape = self._architecture = section.architecture
        self.conditioner = build_conditioner(section.conditioner, shape.text_dim)
        self.text_embedding = _TextEmbedding(shape.text_dim, shape.dim)
        self.time_embedding = _TimeEmbedding(shape.freq_dim, shape.dim)
        self.time_projection = WideLinear(shape.dim, 6 * shape.dim)
        self.patch_embedding = _PatchEmbedding(shape.channels, shape.dim, shape.patch, stride=shape.patch)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = _Head(shape)

    @property
    def geometry(self) -> Geometry:
        """Channels, patch and compression of the latents."""
        shape = self._architecture
        return Geometry(channels=shape.channels, patch=shape.patch, compression=shape.compression)

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return self._architecture.layers

    @property
    def width(self) -> int:
        """Width of a feature token."""
        return self._architecture.dim

    def velocity(self, x_t: Latents, sigma: Sigma, cond: Any) -> Latents:
        """The velocity at ``x_t``, float32 or wider. ``cond`` is the record of the section's conditioner, or what
        ``tell`` made of it."""
        entered = self._enter(x_t, sigma, cond)
        return self._velocity(entered, self._everything(entered), x_t.shape)

    def features(self, x_t: Latents, sigma: Sigma, cond: Any, layers: tuple[int, ...]) -> tuple[Tokens, ...]:
        """The tokens after each of the blocks ``layers``; nothing runs after the last.

        Raises ValueError unless ``layers`` are ascending block numbers from 0.
        """
        entered = self._enter(x_t, sigma, cond)
        return self._features(entered, self._everything(entered), layers)

    def tell(self, cond: Any) -> CrossCache:
        """The keys and values of the conditioning in every block, to be used in place of ``cond`` as long as it stays
        the same."""
        context = self.text_embedding(self.conditioner(cond))
        blocks: Any = self.blocks
        return CrossCache(tuple(block.told(context) for block in blocks))

    @torch.no_grad()
    def initialise(self, generator: Generator) -> None:
        """Draws all weights from a CPU generator in float32, in a fixed order, then casts and moves them.

        The output projection starts at zero, so a new network predicts a velocity of zero; the modulation tables start
        at N(0, 1 / dim), so its blocks are near the identity.
        """
        for (_, value), parameter in zip(self.drawn(generator), self.parameters(), strict=True):
            parameter.copy_(value)

    def drawn(self, generator: Generator) -> Iterator[tuple[str, Tensor]]:
        """The weights that ``initialise`` sets, whole and one after the other, by name."""
        for name, parameter in self.named_parameters():
            yield name, _initial(name, parameter.shape, generator)

    def _enter(self, x_t: Latents, sigma: Sigma, cond: Any) -> Entered:
        tokens, grid = self.patch_embedding(x_t)
        time = self.time_embedding(NUM_TIMESTEPS * sigma.to(self._precision))
        modulation = self.time_projection(F.silu(time)).unflatten(-1, (6, -1))
        told = isinstance(cond, CrossCache)
        context = cond.layers if told else (self.text_embedding(self.conditioner(cond)),) * self.num_layers
        return Entered(self.division.part(tokens, 2), context, time, modulation, grid)

    @property
    def _precision(self) -> torch.dtype:
        return torch.promote_types(self.patch_embedding.weight.dtype, torch.float32)

    def _turn(self, grid: tuple[int, int, int], start: int, device: torch.device) -> Rotation:
        return rotation(self._architecture.head_dim, grid, start, device, self._precision)

    def _own_turn(self, turn: Rotation, frames: int) -> Rotation:
        """Of the tokens that this rank has of each frame."""
        return Rotation(*(self.division.part(table.unflatten(0, (frames, -1)), 1).flatten(0, 1) for table in turn))

    def _everything(self, entered: Entered) -> Sight:
        """Every token sees every other."""
        return Sight(self._turn(entered.grid, 0, entered.tokens.device))

    def _through(
        self, entered: Entered, sight: Sight, past: tuple[KeyValue, ...] | None = None
    ) -> Iterator[tuple[FrameTokens, KeyValue]]:
        """What each block returns, one after the other."""
        tokens, again = entered.tokens, self.recompute and torch.is_grad_enabled()
        sight = sight._replace(turn=self._own_turn(sight.turn, tokens.shape[1]))
        for layer, block in enumerate(self.blocks):
            inputs = (tokens, entered.context[layer], entered.modulation, sight, past[layer] if past else None)
            tokens, made = checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)
            yield tokens, made

    def _velocity(
        self, entered: Entered, sight: Sight, shape: torch.Size, past: tuple[KeyValue, ...] | None = None
    ) -> Latents:
        """Of the last frames that entered, as many as ``shape`` has."""
        tokens = entered.tokens
        for after in self._through(entered, sight, past):
            tokens = after[0]
        tokens, time = tokens[:, -shape[1] :], entered.time[:, -shape[1] :]
        return _unpatch(self.division.whole(self.head(tokens, time), 2), shape, self._architecture.patch)

    def _features(self, entered: Entered, sight: Sight, layers: tuple[int, ...]) -> tuple[Tokens, ...]:
        if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_layers:
            raise ValueError(f"layers {layers} must be ascending block numbers between 0 and {self.num_layers - 1}")
        through = enumerate(islice(self._through(entered, sight), layers[-1] + 1))
        found = [tokens for layer, (tokens, _) in through if layer in layers]
        return tuple(self.division.whole(tokens, 2).flatten(1, 2) for tokens in found)


class _TextEmbedding(FeedForward):
    """From the conditioner's tokens to those that the blocks attend to."""

    def __init__(self, text_dim: int, dim: int):
        super().__init__(text_dim, dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.to(self.hidden.weight.dtype))


class _TimeEmbedding(nn.Module):
    """Cosines and sines of the timestep, then two layers; float32 or wider throughout."""

    def __init__(self, num_frequencies: int, dim: int):
        super().__init__()
        self.num_waves = num_frequencies // 2
        self.hidden = WideLinear(num_frequencies, dim)
        self.output = WideLinear(dim, dim)

    def forward(self, timestep: Float[Tensor, "b f"]) -> Float[Tensor, "b f d"]:
        steps = torch.arange(self.num_waves, dtype=timestep.dtype, device=timestep.device)
        angles = timestep.unsqueeze(-1) * torch.exp(-math.log(10000) * steps / self.num_waves)
        waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
        return self.output(F.silu(self.hidden(waves)))


class _PatchEmbedding(nn.Conv3d):
    """A convolution whose stride is its kernel, computed as the linear map that it is."""

    def forward(self, x_t: Latents) -> tuple[FrameTokens, tuple[int, int, int]]:
        """The tokens, and how many frames, rows and columns of them there are."""
        patches = x_t.to(self.weight.dtype).movedim(2, 1)
        for axis, size in zip((2, 4, 6), self.kernel_size, strict=True):
            patches = patches.unflatten(axis, (-1, size))
        b, c, f, pf, h, ph, w, pw = patches.shape
        patches = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, f, h * w, c * pf * ph * pw)
        return F.linear(patches, self.weight.flatten(1), self.bias), (f, h, w)


class _Head(nn.Module):
    """The last norm, modulated by the noise level, and the projection to patches; float32 or wider."""

    def __init__(self, shape: Architecture):
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, 2, shape.dim))
        self.norm = WideLayerNorm(shape.dim, shape.eps, elementwise_affine=False)
        self.projection = WideLinear(shape.dim, shape.channels * math.prod(shape.patch))

    def forward(self, tokens: FrameTokens, time: Float[Tensor, "b f d"]) -> Float[Tensor, "b f s p"]:
        shift, scale = (wide(self.modulation) + time.unsqueeze(-2)).unsqueeze(-2).unbind(2)
        return self.projection(torch.addcmul(shift, self.norm(tokens), 1 + scale))


def _unpatch(patches: Float[Tensor, "b f s p"], size: torch.Size, patch: tuple[int, int, int]) -> Latents:
    b, f, c, h, w = size
    _, rows, columns = patch
    grid = patches.view(b, f, h // rows, w // columns, rows, columns, c)
    return grid.permute(0, 1, 6, 2, 4, 3, 5).reshape(b, f, c, h, w)


def _initial(name: str, shape: torch.Size, generator: Generator) -> Tensor:
    value = torch.empty(shape, dtype=torch.float32)
    if name.endswith("bias") or name == "head.projection.weight":
        return value.zero_()
    if "norm" in name:
        return value.fill_(1.0)
    if name.endswith("modulation"):
        return value.normal_(std=shape[-1] ** -0.5, generator=generator)
    if name.startswith("conditioner"):
        return value.normal_(generator=generator)
    if name.startswith("time_embedding"):
        return value.normal_(std=0.02, generator=generator)
    nn.init.xavier_uniform_(value.view(shape[0], -1), generator=generator)
    return value

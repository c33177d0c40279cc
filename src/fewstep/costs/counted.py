"""Networks that count instead of computing: the same calls, the same shapes, no weights, nothing allocated.

All that a network of the family does around its blocks, blocks of frames, histories, windows, masks, is its own code;
what is replaced is what stands inside a block, and what turns latents into tokens and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fewstep.costs.kept import Inside
from fewstep.costs.ledger import Ledger
from fewstep.costs.work import Work
from fewstep.models.attention import Mask, Part, dense
from fewstep.models.discriminator import Discriminator
from fewstep.models.families import ModelSection
from fewstep.models.kv_cache import CrossCache, KeyValue
from fewstep.models.rope import Rotation
from fewstep.models.wan.block import Sight
from fewstep.models.wan.causal import CausalWan
from fewstep.models.wan.conditioner import ClassLabelConditioner
from fewstep.models.wan.model import Entered, Wan
from fewstep.models.wan.parallelize import METHODS


@cache
def pairs_of(mask: Mask) -> float:
    """How many pairs of tokens the mask lets see each other."""
    frames = dense(replace(mask, frame_tokens=1))
    return float(frames.sum()) * mask.frame_tokens**2


class CountedBlock(nn.Module):
    """A block of which the ledger learns what it was asked for."""

    def __init__(self, role: str, inside: Inside, num_weights: int, ledger: Ledger):
        super().__init__()
        self.role, self.inside, self.num_weights, self.ledger = role, inside, num_weights, ledger
        self.weights = nn.Parameter(torch.empty(0, device="meta"), requires_grad=inside.trained)
        self.learns = False
        """Whether a backward pass of this phase gives the weights their gradient."""
        self.gradient: Tensor | None = None
        self.copies: list[Tensor] = []
        """Weights in bfloat16, which autocast keeps until the call ends."""

    def forward(
        self, tokens: Tensor, context: Tensor | KeyValue, modulation: Tensor, sight: Sight, past: KeyValue | None = None
    ) -> tuple[Tensor, KeyValue]:
        told = isinstance(context, KeyValue)
        own = tokens.shape[1] * tokens.shape[2]
        keys = own + (0 if past is None else past.keys.shape[1])
        work = Work(
            self.role,
            "block",
            tokens.shape[0],
            own,
            keys,
            own * keys if sight.visible is None else pairs_of(sight.visible),
            sight.visible is not None,
            (context.values if told else context).shape[1],
            told,
            compiled=self.inside.compiled,
            shape=self.inside.shape,
        )
        copy = self.copy_of_weights()
        if not torch.is_grad_enabled() or not (tokens.requires_grad or self.weights.requires_grad):
            self.copies += [copy] if copy is not None else []
            return self.run(work, tokens)
        if self.inside.recompute and copy is not None:
            self.copies.append(copy)
            copy = None
        after, keys_made, values = _Differentiable.apply(tokens, self.weights, self, work, copy)
        return after, KeyValue(keys_made, values)

    def told(self, context: Tensor) -> KeyValue:
        """The keys and values of the conditioning."""
        rows, text, _ = context.shape
        self.ledger.add(Work(self.role, "told", rows, text, text=text, shape=self.inside.shape))
        return self.keys_values(rows, text)

    def run(self, work: Work, tokens: Tensor) -> tuple[Tensor, KeyValue]:
        """The forward pass."""
        self.ledger.add(work)
        made = self.keys_values(work.rows, work.tokens)
        spike = work.rows * self.inside.forward(work.tokens, work.keys - work.tokens)
        self.ledger.spike(spike, self.inside.part)
        return torch.empty(tokens.shape, dtype=tokens.dtype, device="meta"), made

    def keys_values(self, rows: int, tokens: int) -> KeyValue:
        shape = (rows, tokens, self.inside.shape.heads, self.inside.shape.head_dim)
        return KeyValue(*(torch.empty(shape, dtype=self.inside.precision, device="meta") for _ in range(2)))

    def copy_of_weights(self) -> Tensor | None:
        """Trained weights are float32, and compute in bfloat16; compiled blocks drop the copy at once."""
        inside = self.inside
        if not inside.trained or inside.precision != torch.bfloat16 or inside.compiled:
            return None
        return self.ledger.hold(2 * self.num_weights, "whole")

    def take_gradient(self) -> None:
        if self.learns and self.gradient is None:
            self.gradient = self.ledger.hold(4 * self.num_weights, "cut")


class _Differentiable(torch.autograd.Function):
    """A block whose backward pass is counted when it comes."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, block: CountedBlock, work: Work, copy: Tensor | None) -> Any:
        after, made = block.run(work, tokens)
        ctx.block, ctx.work, ctx.copy = block, work, copy
        ctx.set_materialize_grads(False)
        if block.inside.recompute:
            ctx.save_for_backward(tokens)
        else:
            ctx.save_for_backward(*made)
            ctx.kept = block.ledger.hold(work.rows * block.inside.kept(work.tokens), block.inside.part)
        return after, *made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        block, work = ctx.block, ctx.work
        inside, ledger = block.inside, block.ledger
        if inside.recompute:
            ctx.copy = block.copy_of_weights()
            kept = ledger.hold(work.rows * inside.kept(work.tokens), inside.part)
            ctx.kept = kept, block.keys_values(work.rows, work.tokens)
            ledger.add(replace(work, again=True))
        ledger.add(replace(work, backward=True, weights=block.learns))
        found = torch.empty(gradient.shape, dtype=gradient.dtype, device="meta")
        ledger.spike(work.rows * inside.backward(work.tokens, work.keys - work.tokens), inside.part)
        block.take_gradient()
        ctx.kept = ctx.copy = None
        return found, None, None, None, None


class _Through(torch.autograd.Function):
    """Something of a given shape, made of ``x``; keeps ``kept`` until its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, kept: Any) -> Tensor:
        ctx.like, ctx.kept = (x.shape, x.dtype), kept
        return torch.empty(shape, dtype=dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.kept = None
        shape, dtype = ctx.like
        return torch.empty(shape, dtype=dtype, device="meta"), None, None, None


class _Head(nn.Module):
    """The last norm and the projection to patches, in float32."""

    def __init__(self, network: _Counting, numel: int):
        super().__init__()
        self._network, self._numel = [network], numel

    def forward(self, tokens: Tensor, time: Tensor) -> Tensor:
        """Keeps the tokens in float32 three times."""
        b, f, s, _ = tokens.shape
        linear = 2.0 * tokens.numel() * self._numel
        network: Any = self._network[0]
        network.outside(b, f * s, linear, linear * (1 + network.learns) if tokens.requires_grad else 0.0)
        return through(tokens, network.ledger, (b, f, s, self._numel), torch.float32, 12.0 * tokens.numel())


class _Counting:
    """What counted networks have in common. ``inside``: how their blocks run."""

    ledger: Ledger

    def count(self, role: str, inside: Inside, ledger: Ledger) -> Any:
        """Makes the network one that counts."""
        network: Any = self
        shape = inside.shape
        network.role, network.inside, network.ledger, network.learns = role, inside, ledger, False
        network.num_weights = sum(p.numel() for p in network.parameters())
        network.block_weights = sum(p.numel() for p in network.blocks[0].parameters())
        network.blocks = nn.ModuleList(
            CountedBlock(role, inside, network.block_weights, ledger) for _ in network.blocks
        )
        network.head = _Head(network, shape.channels * math.prod(shape.patch))
        network.requires_grad_(False)
        ledger.heads.add((shape.heads, shape.head_dim))
        for block in network.blocks:
            block.weights.requires_grad_(inside.trained)
        for name in METHODS:
            if hasattr(network, name):
                setattr(network, name, network._called(getattr(network, name)))
        return network

    def learn(self, learns: bool) -> None:
        """Whether backward passes from here on give the weights their gradient; gradients of before are gone."""
        network: Any = self
        network.learns = learns
        for block in network.blocks:
            block.learns, block.gradient = learns, None

    def outside(self, rows: int, tokens: int, forward: float, backward: float) -> None:
        """Linear layers outside the blocks, and what their backward pass will take."""
        network: Any = self
        work = Work(network.role, "outside", rows, tokens, linear=forward, shape=network.inside.shape)
        self.ledger.add(work)
        if backward:
            self.ledger.add(replace(work, linear=backward, backward=True, weights=network.learns))

    def _called(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, after which copies of weights are gone."""
        network: Any = self

        def call(*arguments: Any, **options: Any) -> Any:
            network.ledger.calls[network.role] += 1
            try:
                return method(*arguments, **options)
            finally:
                for block in network.blocks:
                    block.copies.clear()

        return call

    def _enter(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Entered:
        network: Any = self
        inside, shape = network.inside, network.inside.shape
        b, f, c, h, w = x_t.shape
        grid = (f, h // shape.patch[1], w // shape.patch[2])
        num, tokens = grid[1] * grid[2], b * f * grid[1] * grid[2]
        embedded = 2.0 * tokens * c * math.prod(shape.patch) * shape.dim
        hidden = 2.0 * b * f * shape.freq_dim * shape.dim
        projected = 2.0 * b * f * shape.dim * 7 * shape.dim
        told, texts = isinstance(cond, CrossCache), (0.0, 0.0)
        context: Any = cond.layers if told else None
        if not told:
            context, texts = self._context(cond)
        trains = network.learns and torch.is_grad_enabled()
        backward = embedded * (trains + (torch.is_grad_enabled() and x_t.requires_grad))
        learnt = isinstance(network.conditioner, ClassLabelConditioner)  # its tokens have a gradient too
        backward += trains * (hidden + 2 * projected + (1 + learnt) * texts[0] + 2 * texts[1])
        self.outside(b, f * num, embedded + hidden + projected + sum(texts), backward)
        size, like = (b, f, num, shape.dim), x_t if x_t.requires_grad else None
        entered = through(like, self.ledger, size, inside.precision, 0.0)
        time = torch.empty((b, f, shape.dim), device="meta")
        modulation = torch.empty((b, f, 6, shape.dim), device="meta")
        return Entered(entered, context if told else (context,) * network.num_layers, time, modulation, grid)

    def _context(self, cond: Any) -> tuple[Tensor, tuple[float, float]]:
        """The tokens of the conditioning, and the operations of the two layers that embed them."""
        network: Any = self
        shape = network.inside.shape
        rows, text, width = network.conditioner(cond).shape
        first, second = 2.0 * rows * text * width * shape.dim, 2.0 * rows * text * shape.dim**2
        return torch.empty((rows, text, shape.dim), dtype=network.inside.precision, device="meta"), (first, second)

    def tell(self, cond: Any) -> CrossCache:
        network: Any = self
        context, texts = self._context(cond)
        self.outside(context.shape[0], 0, sum(texts), 0.0)
        return CrossCache(tuple(block.told(context) for block in network.blocks))

    def _turn(self, grid: tuple[int, int, int], start: int, device: torch.device) -> Rotation:
        network: Any = self
        table = torch.empty((math.prod(grid), network.inside.shape.head_dim // 2), device="meta")
        return Rotation(table, table)


class CountedWan(_Counting, Wan):
    """A network that sees whole clips."""


class CountedCausalWan(_Counting, CausalWan):
    """A causal network; masks are not worked out, their pairs are counted."""

    def _visible(self, entered: Entered, sizes: tuple[int, ...], parts: tuple[Part, ...], num_query_parts: int = 1):
        causal = self.causal
        return Mask(sizes, entered.tokens.shape[2], parts, num_query_parts, causal.window, causal.sink)


def counted(section: ModelSection, role: str, inside: Inside, ledger: Ledger) -> Any:
    """The network of the section, as the role of this name, that counts."""
    with torch.device("meta"):
        network = CountedCausalWan(section) if section.causal else CountedWan(section)
    return network.count(role, inside, ledger)


def through(x: Tensor | None, ledger: Ledger, shape: tuple[int, ...], dtype: torch.dtype, kept: float) -> Tensor:
    """What is made of ``x``, of this shape, with a gradient where ``x`` has one; ``kept`` bytes wait for it."""
    if x is None or not (torch.is_grad_enabled() and x.requires_grad):
        ledger.spike(kept)
        return torch.empty(shape, dtype=dtype, device="meta")
    return _Through.apply(x, shape, dtype, ledger.hold(kept))


class CountedDiscriminator(nn.Module):
    """A head on features that counts."""

    def __init__(self, width: int, num_features: int, ledger: Ledger):
        super().__init__()
        with torch.device("meta"):
            self.num_weights = sum(p.numel() for p in Discriminator(width, num_features).parameters())
        self.width, self.ledger, self.learns = width, ledger, False
        self.weights = nn.Parameter(torch.empty(0, device="meta"))

    def learn(self, learns: bool) -> None:
        self.learns = learns

    def forward(self, features: tuple[Tensor, ...]) -> Tensor:
        """Keeps six values of the width for each token, in float32."""
        logits = []
        for tokens in features:
            rows, count, _ = tokens.shape
            linear = 2.0 * rows * (count * self.width**2 + self.width)
            work = Work("discriminator", "outside", rows, count, linear=linear)
            self.ledger.add(work)
            reaches = self.learns or tokens.requires_grad  # the norm before the layer learns too
            backward = linear * (self.learns + reaches) * torch.is_grad_enabled()
            if backward:
                self.ledger.add(replace(work, linear=backward, backward=True, weights=self.learns))
            logits.append(through(tokens, self.ledger, (rows,), torch.float32, 24.0 * tokens.numel()))
        return torch.stack(logits).mean(0)

"""One block of a Wan network: self-attention, cross-attention to the conditioning, feed-forward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from fewstep.models.attention import Visible, attention
from fewstep.models.division import UNDIVIDED
from fewstep.models.kv_cache import KeyValue
from fewstep.models.precision import WideLayerNorm, WideRMSNorm, wide
from fewstep.models.rope import Rotation, rotate
from fewstep.models.wan.conditioner import ContextTokens
from fewstep.models.wan.sizes import Architecture
from fewstep.shapes import Tokens

FrameTokens = Float[Tensor, "b f s d"]
"""s tokens of each of f frames."""
Modulation = Float[Tensor, "b f k d"]
"""k vectors that shift, scale or gate all tokens of a frame."""


class Sight(NamedTuple):
    """Where the tokens of a call stand, and which tokens they see."""

    turn: Rotation
    """Positions of the call's own tokens; in a block, of those that this rank has."""
    visible: Visible = None
    """Which of the past and own tokens each of them sees; None is all."""
    key_turn: Rotation | None = None
    """Positions of past and own tokens, where keys are kept unturned; None: they are kept as they were turned."""


class Block(nn.Module):
    """Self-attention, cross-attention to the conditioning, feed-forward; the noise level shifts, scales and gates."""

    def __init__(self, shape: Architecture):
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, 6, shape.dim))
        self.self_norm = WideLayerNorm(shape.dim, shape.eps, elementwise_affine=False)
        self.self_attention = Attention(shape)
        self.cross_norm = WideLayerNorm(shape.dim, shape.eps)
        self.cross_attention = Attention(shape)
        self.ffn_norm = WideLayerNorm(shape.dim, shape.eps, elementwise_affine=False)
        self.ffn = FeedForward(shape.dim, shape.ffn_dim)

    def forward(
        self,
        tokens: FrameTokens,
        context: ContextTokens | KeyValue,
        modulation: Modulation,
        sight: Sight,
        past: KeyValue | None = None,
    ) -> tuple[FrameTokens, KeyValue]:
        """The tokens after the block, and the keys and values of its own tokens, to be the past of later ones.

        context: tokens, or their keys and values in this block. modulation: six vectors a frame, from the noise level.
        """
        dtype = tokens.dtype
        changes = (wide(self.modulation) + modulation).unsqueeze(-2).unbind(2)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = changes
        normed = torch.addcmul(shift, self.self_norm(tokens), 1 + scale).to(dtype)
        update, made = self._self_attend(normed, sight, past)
        tokens = torch.addcmul(wide(tokens), wide(update.view_as(tokens)), gate).to(dtype)
        tokens = tokens + self._told(tokens, context)
        normed = torch.addcmul(ffn_shift, self.ffn_norm(tokens), 1 + ffn_scale).to(dtype)
        return torch.addcmul(wide(tokens), wide(self.ffn(normed)), ffn_gate).to(dtype), made

    def told(self, context: ContextTokens) -> KeyValue:
        """The keys and values of the conditioning in this block."""
        return self.cross_attention.keys_values(context)

    def _self_attend(self, normed: FrameTokens, sight: Sight, past: KeyValue | None) -> tuple[Tokens, KeyValue]:
        """The update, and the own keys (turned unless ``sight.key_turn`` is to turn them later) and values."""
        frames, normed = normed.shape[1], normed.flatten(1, 2)
        keys, values = self.self_attention.keys_values(normed)
        if sight.key_turn is None:
            keys = rotate(keys, sight.turn)
        made = KeyValue(*(self.self_attention.division.heads(x, frames) for x in (keys.to(values.dtype), values)))
        seen = made if past is None else past.then(made)
        if sight.key_turn is not None:
            seen = KeyValue(rotate(wide(seen.keys), sight.key_turn).to(values.dtype), seen.values)
        return self.self_attention(normed, seen, sight.turn, sight.visible, frames), made

    def _told(self, tokens: FrameTokens, context: ContextTokens | KeyValue) -> Float[Tensor, "b #f #s d"]:
        """The update by the conditioning. A single token answers every query alike: the softmax over one key is 1."""
        cross = self.cross_attention
        if isinstance(context, Tensor):
            if context.shape[1] == 1:
                return cross.o(cross.v(context)).unsqueeze(1)
            context = cross.keys_values(context)
        elif context.values.shape[1] == 1:
            return cross.o(context.values.flatten(2)).unsqueeze(1)
        normed = self.cross_norm(tokens).to(tokens.dtype).flatten(1, 2)
        return cross(normed, context).view_as(tokens)


class Attention(nn.Module):
    """Attention whose queries and keys are normalised over all heads."""

    def __init__(self, shape: Architecture):
        super().__init__()
        self.heads = shape.heads
        self.division = UNDIVIDED
        self.q = nn.Linear(shape.dim, shape.dim)
        self.k = nn.Linear(shape.dim, shape.dim)
        self.v = nn.Linear(shape.dim, shape.dim)
        self.o = nn.Linear(shape.dim, shape.dim)
        self.norm_q = WideRMSNorm(shape.dim, shape.eps)
        self.norm_k = WideRMSNorm(shape.dim, shape.eps)

    def keys_values(self, context: Float[Tensor, "b m d"]) -> KeyValue:
        """Of the tokens that are attended to; the keys in float32 or wider, and not yet turned."""
        keys, values = self.norm_k(self.k(context)), self.v(context)
        return KeyValue(*(x.unflatten(-1, (self.heads, -1)) for x in (keys, values)))

    def forward(
        self, tokens: Tokens, seen: KeyValue, turn: Rotation | None = None, visible: Visible = None, frames: int = 1
    ) -> Tokens:
        """Attends from the ``tokens`` of so many frames to what is seen; with ``turn`` the queries carry their
        positions."""
        keys, values = seen
        q = self.norm_q(self.q(tokens)).unflatten(-1, (self.heads, -1))
        if turn is not None:
            q = rotate(q, turn)
        q = self.division.heads(q.to(values.dtype), frames)
        found = attention(q, keys.to(values.dtype), values, visible)
        return self.o(self.division.tokens(found, frames).flatten(2))


class FeedForward(nn.Module):
    """Two layers with a GELU (tanh form) between them."""

    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.hidden = nn.Linear(dim, hidden)
        self.output = nn.Linear(hidden, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(F.gelu(self.hidden(tokens), approximate="tanh"))

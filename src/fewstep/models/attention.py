"""The one attention function of all networks, who sees whom in it, and the kernel that computes it.

A ``Mask`` describes who sees whom; ``visibility`` turns it, once per mask and device, into what a kernel reads, outside
of compiled blocks; ``attention`` takes that. Without a mask every query sees every key, and torch chooses the kernel
(on an H200 cuDNN's, 625 TFLOP/s at the size of Wan-1.3B); ``torch.nn.attention.sdpa_kernel`` overrides its choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Queries = Float[Tensor, "b n h e"]
"""n tokens of h heads with e components each."""
Keys = Float[Tensor, "b m h e"]
Kernel = Literal["dense", "flex"]

MASKED_KERNEL: dict[str, Kernel] = {"cpu": "dense", "cuda": "flex"}
"""By type of device. FlexAttention has no backward on CPU; a dense mask of a long clip does not fit on a GPU."""

TILE = 128
"""Tokens of a tile of FlexAttention, in both directions."""


@dataclass(frozen=True)
class Part:
    """A run of consecutive blocks inside the sequence.

    A ``causal`` part can be seen by all later blocks (finished blocks, or those of diffusion forcing). Blocks of a
    ``probe`` part are seen by themselves alone (the noisy blocks of teacher forcing, a block against a history).
    """

    kind: Literal["causal", "probe"]
    first: int
    """Number of its first block in the clip."""
    last: int
    """One more than the number of its last block."""


@dataclass(frozen=True)
class Mask:
    """Which keys every query sees: its own block, and the blocks before it in causal parts, within the window.

    Keys are the tokens of all ``parts``, one after the other; queries those of the last ``num_query_parts``. Diffusion
    forcing is one causal part; teacher forcing a causal (clean) and a probe (noisy) part, both of them queries; blocks
    denoised in parallel against a history are a causal part and a probe part, the latter alone a query.
    """

    block_frames: tuple[int, ...]
    """Frames of every block of the clip."""
    frame_tokens: int
    parts: tuple[Part, ...]
    num_query_parts: int = 1
    window: int | None = None
    """Frames that a block sees, its own and the sink's among them: the sink, and the last ``window - sink``."""
    sink: int = 0
    """Frames at the beginning of the clip that stay in sight."""

    def __post_init__(self) -> None:
        if any(not 0 <= part.first < part.last <= len(self.block_frames) for part in self.parts):
            raise ValueError(f"parts {self.parts} do not fit a clip of {len(self.block_frames)} blocks")
        if not 1 <= self.num_query_parts <= len(self.parts):
            raise ValueError(f"num_query_parts {self.num_query_parts} must be between 1 and {len(self.parts)}")
        if self.window is not None and self.window - self.sink < max(self.block_frames):
            raise ValueError(
                f"a window of {self.window} frames, {self.sink} of them the sink, cannot hold a block of "
                f"{max(self.block_frames)} frames: window - sink must be at least that"
            )
        if self.window is None and self.sink:
            raise ValueError(f"a sink of {self.sink} frames means nothing without a window")


Visible = Any
"""What ``attention`` reads: None, a boolean tensor [n m], or a BlockMask."""


@lru_cache(maxsize=32)
def visibility(mask: Mask, device: torch.device, kernel: Kernel | None = None) -> Visible:
    """What ``attention`` reads of the mask on this device; shared between calls.

    kernel: overrides the table; "dense" and "flex" give the same attention.
    """
    with torch.inference_mode(False):
        if (kernel or MASKED_KERNEL[device.type]) == "dense":
            return dense(mask).to(device)
        return _block_mask(mask, device)


def dense(mask: Mask) -> Bool[Tensor, "n m"]:
    """True where the query n sees the key m."""
    queries, keys = _places(mask)
    frames = _sees(mask, _Places(*(x[:, None] for x in queries)), keys)
    return frames.repeat_interleave(mask.frame_tokens, dim=0).repeat_interleave(mask.frame_tokens, dim=1)


def attention(q: Queries, k: Keys, v: Keys, visible: Visible = None) -> Queries:
    """softmax(q k^T / sqrt(e)) v for every head, over the keys that are ``visible`` (all of them when left out)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if visible is None or isinstance(visible, Tensor):
        return scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)
    return _flex_attention()(q, k, v, block_mask=visible).transpose(1, 2)


class _Places(NamedTuple):
    """Where frames stand: their part, their block, their number, and one more than the last number of their block."""

    part: Int[Tensor, "..."]
    probe: Bool[Tensor, "..."]
    block: Int[Tensor, "..."]
    frame: Int[Tensor, "..."]
    end: Int[Tensor, "..."]


def _sees(mask: Mask, query: _Places, key: _Places) -> Tensor:
    """The rule, for dense masks and kernels alike."""
    before = ~key.probe & (key.block < query.block)
    if mask.window is not None:
        recent = key.frame >= query.end - (mask.window - mask.sink)
        before = before & (recent | (key.frame < mask.sink))
    return before | ((key.part == query.part) & (key.block == query.block))


def _places(mask: Mask) -> tuple[_Places, _Places]:
    """Of the frames that ask, and of all frames."""
    rows = []
    for number, part in enumerate(mask.parts):
        for block in range(part.first, part.last):
            start = sum(mask.block_frames[:block])
            end = start + mask.block_frames[block]
            rows += [(number, part.kind == "probe", block, frame, end) for frame in range(start, end)]
    part, probe, *others = torch.tensor(rows, dtype=torch.int32).t().contiguous().unbind()
    keys = _Places(part, probe.bool(), *others)
    asks = part >= len(mask.parts) - mask.num_query_parts
    return _Places(*(x[asks] for x in keys)), keys


def _block_mask(mask: Mask, device: torch.device) -> BlockMask:
    """What FlexAttention reads: the tiles that hold a visible pair, those that hold nothing else, and the rule.

    Tiles are found from frames: pair by pair, a mask of two clips of Wan takes 40 GiB and seconds.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = _places(mask)
    frames = _sees(mask, _Places(*(x[:, None] for x in queries)), keys)
    some = _any_in_tile(frames, mask.frame_tokens)
    only = ~_any_in_tile(~frames, mask.frame_tokens)
    rows, columns = (mask.frame_tokens * size for size in frames.shape)
    only[rows // TILE :] = only[:, columns // TILE :] = False
    queries, keys = (_Places(*(x.to(device) for x in places)) for places in (queries, keys))

    def sees(query: Tensor, key: Tensor) -> Tensor:
        query, key = query // mask.frame_tokens, key // mask.frame_tokens
        return _sees(mask, _Places(*(x[query] for x in queries)), _Places(*(x[key] for x in keys)))

    return BlockMask.from_kv_blocks(
        *_listed(some & ~only, device),
        *_listed(only, device),
        BLOCK_SIZE=TILE,
        mask_mod=lambda b, h, query, key: sees(query, key),
        seq_lengths=(rows, columns),
    )


def _any_in_tile(frames: Bool[Tensor, "n m"], frame_tokens: int) -> Bool[Tensor, "tile_rows tile_columns"]:
    """True for every tile of TILE x TILE tokens that touches a pair of frames for which ``frames`` is true."""
    for _ in range(2):
        first = torch.arange(0, len(frames) * frame_tokens, TILE)
        last = (first + TILE - 1).clamp(max=len(frames) * frame_tokens - 1)
        frame = torch.arange(len(frames))
        touches = (frame >= first[:, None] // frame_tokens) & (frame <= last[:, None] // frame_tokens)
        frames = (touches.float() @ frames.float() > 0).t()
    return frames


def _listed(tiles: Bool[Tensor, "rows columns"], device: torch.device) -> tuple[Tensor, Tensor]:
    """How many tiles are true in every row, and the numbers of the columns, those first; for every batch and head.

    Contiguous, because the kernels read them so without asking.
    """
    count, order = tiles.sum(1), tiles.int().argsort(dim=1, descending=True, stable=True).contiguous()
    return count.to(device, torch.int32)[None, None], order.to(device, torch.int32)[None, None]


@cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex_attention() -> Any:
    """FlexAttention, compiled by itself unless a compiler is already at work around it."""
    if not torch.compiler.is_compiling():
        return _compiled_flex_attention()
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention

"""What a network is asked to do, piece by piece, and how many floating-point operations that takes.

Counted are matrix products and attention, two operations for each multiplication and addition, over the pairs of
tokens that see each other. What is elementwise is counted in bytes (``traffic``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fewstep.models.wan.sizes import Architecture

Shape = Architecture
Kind = Literal["block", "told", "outside"]


@dataclass(frozen=True)
class Work:
    """One call of one part of a network, or its backward pass; for one row of the batch unless ``rows`` says more.

    kind: a ``block``; what a block makes of the conditioning alone (``told``); what stands ``outside`` the blocks.
    """

    role: str
    kind: Kind
    rows: int
    tokens: int
    """That enter, of one row."""
    keys: int = 0
    """That they are compared with, the past's among them."""
    pairs: float = 0.0
    """Query and key that see each other, of one row."""
    masked: bool = False
    """Whether some of the pairs are hidden, so that another kernel computes them."""
    text: int = 0
    """Tokens of the conditioning."""
    told: bool = False
    """Whether keys and values of the conditioning were made before."""
    backward: bool = False
    weights: bool = False
    """Of a backward pass: whether weights get a gradient too, or the input alone."""
    again: bool = False
    """Whether it is done a second time because its result was not kept."""
    linear: float = 0.0
    """Of what is outside: operations of its linear layers."""
    compiled: bool = False
    """Whether its elementwise operations are joined into few kernels."""
    shape: Shape | None = None

    def of_rows(self, factor: int) -> Work:
        """The same for ``factor`` times as many rows."""
        return replace(self, rows=self.rows * factor)


def matmul_flops(work: Work) -> float:
    """Of the linear layers."""
    if work.kind == "outside":
        return work.linear
    if work.kind == "told":
        return work.rows * _told(work)
    inner, context = _block(work)
    if not work.backward:
        return work.rows * (inner + context)
    return work.rows * (inner * (1 + work.weights) + 2 * context * work.weights)


def attention_flops(work: Work) -> float:
    """Of queries with keys, and of what they weigh. A backward pass has twice as many."""
    if work.kind != "block" or work.shape is None:
        return 0.0
    cross = work.tokens * work.text if work.text > 1 else 0
    return 4.0 * work.rows * work.shape.dim * (work.pairs + cross) * (1 + work.backward)


def flops(work: Work) -> float:
    """All of them."""
    return matmul_flops(work) + attention_flops(work)


def _told(work: Work) -> float:
    shape = work.shape
    assert shape is not None
    return 2.0 * work.text * 2 * shape.dim**2


def _block(work: Work) -> tuple[float, float]:
    """Of what works on the tokens, and of what works on the conditioning, which has a gradient only where weights have
    one. A single token of the conditioning answers all queries alike, and needs none."""
    shape, tokens = work.shape, work.tokens
    assert shape is not None
    square = shape.dim**2
    inner = tokens * (4 * square + 2 * shape.dim * shape.ffn_dim) + (2 * tokens * square if work.text > 1 else 0)
    context = square if work.text == 1 else 0
    context += 0 if work.told else square if work.text == 1 else 2 * work.text * square
    return 2.0 * inner, 2.0 * context


TRAFFIC = {
    (False, False): (284.0, 4.0),
    (False, True): (568.0, 12.0),
    (True, False): (96.0, 4.0),
    (True, True): (208.0, 12.0),
}
"""Bytes that a block moves for one token beside its matrix products, by (compiled, backward): for each of the network's
width, and of its feed-forward layer's. Counted from the block's operations in bfloat16, with norms, positions and
residual sums in float32: each operation by itself reads and writes memory, compiled ones are joined."""

KERNELS = {(False, False): 80, (False, True): 170, (True, False): 26, (True, True): 60}
"""Kernels of a block, counted in the same way; of compiled blocks with what the host does around each of them."""


def traffic(work: Work) -> float:
    """Bytes of what is elementwise in a block, and of its past, which is put before its own keys and values."""
    if work.kind != "block" or work.shape is None:
        return 0.0
    wide, hidden = TRAFFIC[work.compiled, work.backward]
    past = 8.0 * work.shape.dim * (work.keys - work.tokens) if work.keys > work.tokens else 0.0
    return work.rows * (work.tokens * (wide * work.shape.dim + hidden * work.shape.ffn_dim) + past)


def kernels(work: Work) -> int:
    """How many kernels the host launches."""
    if work.kind == "block":
        return KERNELS[work.compiled, work.backward]
    return (4 if work.kind == "told" else 60) * (1 + work.backward)


def io_bytes(work: Work) -> float:
    """Bytes that the matrix products of a block read and write at least, in bfloat16: their inputs and outputs."""
    if work.kind != "block" or work.shape is None:
        return 0.0
    shape = work.shape
    products = 8 * shape.dim + 2 * (shape.dim + shape.ffn_dim) + (4 * shape.dim if work.text > 1 else 0)
    return 2.0 * work.rows * work.tokens * products * (1 + work.weights if work.backward else 1)

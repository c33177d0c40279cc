"""The student's weights on their way to the workers that roll out.

They travel in pieces of bounded size, in the numbers in which the student keeps them, since autocast rounds both copies
alike. A piece is rows of some weights, of which every worker of the student's group sends to every worker that rolls
out what the one has and the other wants; so no worker ever holds more beside its own weights than a piece. Whoever
takes rows looks at what stands in its network afterwards: it has the sender's SHA-256, or the run ends.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fewstep.engines.ray.transport import bytes_of, tensor_of
from fewstep.engines.roles import Part, Role, span

PIECE = 2**28
"""Most bytes of a piece, over all workers; a single row may have more."""
Cut = tuple[str, int, int]
"""The weight's name, and first row and end of what of it belongs to a piece."""


class WeightError(RuntimeError):
    """Weights that were handed on are not the student's; the message names one."""


@dataclass(frozen=True)
class Rows:
    """Rows ``first`` to below ``end`` of a weight of this ``shape``: their bytes, and what these are to hash to."""

    name: str
    first: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: np.ndarray
    digest: str


def pieces(parts: Mapping[str, Part]) -> list[list[Cut]]:
    """All rows of all weights, in pieces of at most ``PIECE`` bytes; the same on every worker that holds a part."""
    found: list[list[Cut]] = [[]]
    left = PIECE
    for name, part in parts.items():
        first, num = 0, part.num_whole
        row_bytes = max(math.prod(part.shape[1:]) * part.rows.element_size(), 1)
        while first < num:
            fits = left // row_bytes
            if fits < 1 and found[-1]:
                found.append([])
                left = PIECE
                continue
            end = min(first + max(fits, 1), num)
            found[-1].append((name, first, end))
            left -= (end - first) * row_bytes
            first = end
    return found


def sent(role: Role, cuts: Sequence[Cut], takers: int, copy: tuple[int, int]) -> list[tuple[Rows, ...]]:
    """For each of the workers that roll out, the rows of a piece that this worker has and that one wants.

    copy: (i, n), where ``n`` sets of workers hold all weights each, in either group: this worker is of set ``i``, and
    sends to that set alone.
    """
    mine, sets = copy
    shards = takers // sets
    return [
        tuple(_rows(role, cuts, shards, taker % shards)) if taker // shards == mine else () for taker in range(takers)
    ]


class Taking:
    """The weights of a worker that rolls out, while new ones come."""

    def __init__(self, role: Role):
        self._parts = role.parts()
        self._left = {name: len(part.rows) for name, part in self._parts.items()}

    @torch.no_grad()
    def take(self, rows: Iterable[Rows]) -> None:
        """Writes rows in their places. Raises WeightError where they have none, or are not what was sent."""
        for one in rows:
            place = self._place(one)
            place.copy_(tensor_of(one.values, one.dtype))
            found = digest(place, one.shape, one.first)
            if found != one.digest:
                raise WeightError(f"{_named(one)} is not the student's: SHA-256 {found[:12]}, not {one.digest[:12]}")
            self._left[one.name] -= len(place)

    def end(self) -> None:
        """Raises WeightError where rows have not come."""
        lacking = [name for name, left in self._left.items() if left]
        if lacking:
            raise WeightError(f"the student has sent no weight '{lacking[0]}', or not all of it ({len(lacking)} such)")

    def _place(self, one: Rows) -> Tensor:
        part = self._parts.get(one.name)
        if part is None:
            raise WeightError(f"the student's {_named(one)} is not in the network that rolls out")
        if (part.shape, part.rows.dtype) != (one.shape, one.dtype):
            form = f"{part.rows.dtype} of {list(part.shape)}"
            raise WeightError(f"{_named(one)} is {form} here, the student's is {one.dtype} of {list(one.shape)}")
        if one.first < part.first or one.end > part.first + len(part.rows):
            raise WeightError(f"{_named(one)} does not lie in what this worker holds of it")
        return part.rows[one.first - part.first : one.end - part.first]


def digest(rows: Tensor, shape: tuple[int, ...], first: int) -> str:
    """SHA-256 of rows of a weight: their dtype, the weight's shape, the place of the rows in it, and their bytes."""
    found = hashlib.sha256(f"{rows.dtype} {list(shape)} {first}".encode())
    found.update(bytes_of(rows.cpu().contiguous()).data)
    return found.hexdigest()


def _rows(role: Role, cuts: Sequence[Cut], shards: int, shard: int) -> Iterator[Rows]:
    parts = role.parts()
    for name, first, end in cuts:
        part = parts[name]
        wanted, ends = span(part.num_whole, shards, shard)
        start, stop = max(first, part.first, wanted), min(end, part.first + len(part.rows), ends)
        if start < stop:
            held = role.weights.value(part.rows)[start - part.first : stop - part.first].cpu().contiguous()
            yield Rows(name, start, stop, part.shape, held.dtype, bytes_of(held), digest(held, part.shape, start))


def _named(one: Rows) -> str:
    return f"weight '{one.name}', rows {one.first} to {one.end - 1},"

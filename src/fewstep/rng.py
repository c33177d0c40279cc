"""Randomness without state: every draw is a pure function of what it is for.

A value depends on the seed, the phase, the name of the draw, the iteration, the row's key and its place in the row, and
on nothing else: not on the number of processes, the cut into micro-batches, the order of the rows, or what was drawn
before. So a resumed run needs no restored generator. Every device draws the same bits; normal values differ between
devices by the rounding of the logarithm, sine and cosine.

The strings are hashed on the host (BLAKE2b). Keys and counters are hashed on the device by the output function of
SplitMix64 (Steele et al., OOPSLA 2014), in 64-bit integer tensor arithmetic that wraps around.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from fewstep.shapes import Keys


@dataclass(frozen=True)
class Draw:
    """The random numbers of one phase of one iteration, for the rows ``key``.

    Draws of different names are independent, and so are rows of different keys. Two draws of the same name, shape and
    type are the same draw.
    """

    seed: int
    phase: str
    iteration: int
    key: Keys
    """The rows' positions in the global batch, on the device to draw on."""

    def normal(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Float[Tensor, "b ..."]:
        """Standard normal values ``[b, *shape]``.

        Computed in float32 (Box-Muller on 31 and 32 bits; no value lies beyond 6.7), in float64 if that is asked for:
        the same values to the rounding of float32.
        """
        numel = math.prod(shape)
        pairs = (numel + 1) // 2
        wide = torch.promote_types(dtype, torch.float32)
        halves = self._words("normal", name, pairs).view(torch.int32)
        radius = halves[:, 0::2].to(wide).add_(0.5).abs_().mul_(2**-31).log_().mul_(-2).sqrt_()
        angle = halves[:, 1::2].to(wide).mul_(math.pi * 2**-31)
        values = torch.cat([torch.cos(angle).mul_(radius), angle.sin_().mul_(radius)], dim=1)
        return values[:, :numel].reshape(len(self.key), *shape).to(dtype)

    def uniform(
        self, name: str, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "b ..."]:
        """Uniform values ``[b, *shape]`` in [0, 1), with as many bits as the type can hold."""
        bits = 1 - round(math.log2(torch.finfo(dtype).eps))
        words = self._words("uniform", name, math.prod(shape))
        values = _shift_right(words, 64 - bits, words).to(dtype).mul_(2.0**-bits)
        return values.reshape(len(self.key), *shape)

    def shared_uniform(self, name: str) -> float:
        """One number in [0, 1) for all rows, hence the same in every process; no device takes part."""
        return ((self._stream("shared", name) + 2**63) >> 11) * 2.0**-53

    def shared_index(self, name: str, count: int) -> int:
        """One of 0, ..., count - 1 for all rows, hence the same in every process; no device takes part.

        Raises ValueError for count < 1.
        """
        if count < 1:
            raise ValueError(f"an index '{name}' of {count} choices cannot be drawn: there must be 1 or more")
        return (self._stream("shared", name) + 2**63) * count >> 64

    def rows(self, index: slice | Tensor) -> Draw:
        """The draw of the rows that ``index`` names: its values are those rows of the whole."""
        return replace(self, key=self.key[index])

    def _stream(self, kind: str, name: str) -> int:
        return _hash(kind, self.seed, self.phase, name, self.iteration)

    def _words(self, kind: str, name: str, count: int) -> Int64[Tensor, "b n"]:
        """``count`` random words for every row.

        A row's place among the words and a counter's offset are both mixed before they are added, so that no two rows
        run through the same words in the same order.
        """
        place = _mix(self.key ^ self._stream(kind, name))
        return _mix(place[:, None] + _mix(torch.arange(count, device=self.key.device)))


def generator(seed: int, name: str) -> torch.Generator:
    """A generator on the CPU for what is drawn once, such as initial weights; another stream for every name."""
    return torch.Generator().manual_seed(_hash("generator", seed, name))


def permutation(seed: int, name: str, n: int) -> Int64[Tensor, "n"]:
    """A random order of 0, ..., n - 1 on the CPU, the same on every platform."""
    return torch.argsort(_mix(_mix(torch.arange(n)) ^ _hash("permutation", seed, name)))


def _hash(*parts: str | int) -> int:
    """64 bits of the parts, signed as a tensor holds them. Every part is preceded by its length, so that no two lists
    of parts look alike."""
    digest = blake2b(digest_size=8)
    for part in parts:
        text = str(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little", signed=True)


_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def _mix(words: Int64[Tensor, "..."]) -> Int64[Tensor, "..."]:
    """The output function of SplitMix64, a bijection of the 64-bit words, applied in place.

    Counters enter as they are: a compiler that folds a factor into ``arange`` can lose the wrap-around.
    """
    scratch = torch.empty_like(words)
    for bits, factor in _ROUNDS:
        words.bitwise_xor_(_shift_right(words, bits, scratch)).mul_(factor)
    return words.bitwise_xor_(_shift_right(words, 31, scratch))


def _shift_right(words: Tensor, bits: int, out: Tensor) -> Tensor:
    """The logical shift into ``out``: the sign is not dragged along."""
    return torch.bitwise_right_shift(words, bits, out=out).bitwise_and_(2 ** (64 - bits) - 1)

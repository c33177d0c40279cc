"""The history of a causal network: keys and values of finished frames, a value that is handed in and returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class KeyValue(NamedTuple):
    """Keys and values of m tokens in one attention."""

    keys: Float[Tensor, "b m h e"]
    values: Float[Tensor, "b m h e"]

    def tokens(self, *spans: slice) -> KeyValue:
        """Those of the ``spans`` of tokens, one after the other."""
        return KeyValue(*(torch.cat([x[:, span] for span in spans], dim=1) for x in self))

    def then(self, later: KeyValue) -> KeyValue:
        """These, and the later ones after them."""
        return KeyValue(*(torch.cat(pair, dim=1) for pair in zip(self, later, strict=True)))


@dataclass(frozen=True)
class CrossCache:
    """Keys and values of the conditioning in every block of the network; goes wherever the conditioning record goes.

    A prompt switch is another cache from its block on.
    """

    layers: tuple[KeyValue, ...]


@dataclass(frozen=True)
class KVCache:
    """Frames that are kept: the sink's, then the most recent ones, in every block of the network."""

    layers: tuple[KeyValue, ...]
    num_frames: int
    """Frames that were appended so far, evicted ones included."""
    frame_tokens: int

    @property
    def kept(self) -> int:
        """Frames that are still here."""
        return self.layers[0].keys.shape[1] // self.frame_tokens

    def seen(self, start: int, sink: int, recent: int | None) -> KVCache:
        """The history as a block that begins at frame ``start`` sees it: the sink, and ``recent`` frames before the
        block (None: all of them).

        Raises ValueError if one of them was evicted before, or never appended.
        """
        evicted = self.num_frames - self.kept
        first = 0 if recent is None else max(start - recent, 0)
        if start > self.num_frames or (evicted and max(first, sink) < evicted + sink):
            raise ValueError(
                f"a block at frame {start} sees frames from {first} on, and of {self.num_frames} frames the history "
                f"keeps the last {self.kept - min(sink, self.kept)} beside a sink of {sink}"
            )
        if first <= sink and not evicted:
            return self if start == self.num_frames else self._frames(start, slice(0, start))
        if first - evicted == sink and start == self.num_frames:
            return self
        return self._frames(start, slice(0, sink), slice(max(first, sink) - evicted, start - evicted))

    def then(self, later: tuple[KeyValue, ...]) -> KVCache:
        """The history with the frames of ``later`` after it."""
        layers = tuple(old.then(new) for old, new in zip(self.layers, later, strict=True))
        added = later[0].keys.shape[1] // self.frame_tokens
        return KVCache(layers, self.num_frames + added, self.frame_tokens)

    def _frames(self, num_frames: int, *spans: slice) -> KVCache:
        tokens = [slice(span.start * self.frame_tokens, span.stop * self.frame_tokens) for span in spans]
        return KVCache(tuple(layer.tokens(*tokens) for layer in self.layers), num_frames, self.frame_tokens)

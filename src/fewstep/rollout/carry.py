"""What a training rollout that goes on across iterations hands from one to the next (LongLive, arXiv:2509.22622)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fewstep.errors import UserError
from fewstep.models.blocks import CausalSection
from fewstep.models.kv_cache import KeyValue, KVCache
from fewstep.shapes import Keys, Latents


@dataclass(frozen=True)
class Carry:
    """Where the streams of a batch stand at the end of a chunk, row by row.

    A record, but for one thing: it outlives its iteration. The history in it was made by the weights that the student
    had when its frames were made, and carries no gradient.
    """

    key: Keys
    x0: Latents
    """The last frames of the chunk, clean, which the scores of the next one see before it; there may be 0 of them."""
    history: KVCache
    """What the next block sees; its number of frames says where in the stream that block stands."""

    def tensors(self) -> dict[str, Tensor]:
        """The carry as named tensors, for a checkpoint."""
        history, found = self.history, {"key": self.key, "x0": self.x0}
        found["history"] = torch.tensor([len(history.layers), history.num_frames, history.frame_tokens])
        for number, layer in enumerate(history.layers):
            found |= {f"history.{number}.{name}": tensor for name, tensor in layer._asdict().items()}
        return found

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> Carry:
        """The inverse of :meth:`tensors`. Raises KeyError where one of them is missing."""
        num_layers, num_frames, frame_tokens = tensors["history"].tolist()
        layers = tuple(
            KeyValue(*(tensors[f"history.{number}.{name}"] for name in KeyValue._fields))
            for number in range(num_layers)
        )
        return cls(tensors["key"], tensors["x0"], KVCache(layers, num_frames, frame_tokens))


def refuse_cut(num_frames: int, overlap_frames: int, causal: CausalSection) -> None:
    """Raises UserError where the new frames of a later chunk, of ``num_frames`` in all, are not whole blocks."""
    new, size = num_frames - overlap_frames, causal.block_frames
    if new > 0 and new % size == 0:
        return
    possible = sorted(range(num_frames - size, -1, -size), key=lambda overlap: abs(overlap - overlap_frames))
    raise UserError(
        f"overlap_frames {overlap_frames} of a chunk of {num_frames} leave {max(new, 0)} new frames, which are not "
        f"whole blocks of {size}; write {' or '.join(str(overlap) for overlap in sorted(possible[:2]))}"
    )

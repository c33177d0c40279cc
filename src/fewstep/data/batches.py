"""From item ids to the record that a method sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fewstep.data.api import Dataset
from fewstep.data.order import BatchOrder
from fewstep.records import Batch, map_tensors
from fewstep.shapes import Latents

RESIDENT_BYTES = 8 * 2**30
"""A data set up to this size is put on the accelerator once, with all that the network is told of it."""

_CHUNK = 256


class BatchSource:
    """The batches of a run, on ``device``.

    ``encode`` turns pixels, or latents as a VAE gives them, into x0 (the codec), ``condition`` labels, or embeddings of
    texts, into ``(cond, uncond)`` (the conditioner); both get tensors on the device, and run without gradient. On an
    accelerator a data set of up to ``RESIDENT_BYTES`` stands in its memory, so that only the ids travel; a larger one
    is copied batch by batch. Neither way waits for the device.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: BatchOrder,
        encode: Callable[[Tensor], Latents],
        condition: Callable[[Tensor], tuple[Any, Any]],
        device: torch.device | str,
    ):
        self.dataset, self.order = dataset, order
        self._encode, self._condition = encode, condition
        self._device = torch.device(device)
        self._resident = self._place() if self._device.type != "cpu" and size_of(dataset) <= RESIDENT_BYTES else None

    @torch.no_grad()
    def batch(self, iteration: int, slot: int = 0) -> Batch:
        """This process's rows of batch ``slot`` of ``iteration``; a function of these two, in whatever order they are
        asked for."""
        ids = self.order.ids(iteration, slot)
        if self._resident is not None:
            index = self._send(ids)
            items, told = (tensor[index] for tensor in self._resident)
        else:
            items, told = (self._send(tensor) for tensor in self.dataset.items(ids))
        cond, uncond = self._condition(told)
        batch = Batch(self._send(self.order.keys(slot)), self._encode(items), cond, uncond)
        return map_tensors(Tensor.detach, batch)  # a view of a weight asks for a gradient even here

    def _place(self) -> tuple[Tensor, ...]:
        """All items on the device, copied in parts so that the host never holds them twice."""
        parts = [range(start, min(start + _CHUNK, len(self.dataset))) for start in range(0, len(self.dataset), _CHUNK)]
        placed = tuple(
            torch.empty((len(self.dataset), *one.shape[1:]), dtype=one.dtype, device=self._device)
            for one in self.dataset.items([0])
        )
        for part in parts:
            for whole, rows in zip(placed, self.dataset.items(part), strict=True):
                whole[part.start : part.stop] = rows
        return placed

    def _send(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; from pinned memory, without which the host would wait for the copy."""
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)


def size_of(dataset: Dataset) -> int:
    """Bytes of all items, and of what the network is told of them."""
    return len(dataset) * sum(tensor.nbytes for tensor in dataset.items([0]))

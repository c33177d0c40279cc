"""From item ids to the record that a method sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fewstep.data.api import Dataset, Items, Labels, Pixels
from fewstep.data.order import BatchOrder
from fewstep.records import Batch, map_tensors
from fewstep.shapes import Latents

RESIDENT_BYTES = 8 * 2**30
"""A data set up to this size is put on the accelerator once, pixels and labels."""

_CHUNK = 4096


class BatchSource:
    """The batches of a run, on ``device``.

    ``encode`` turns pixels into x0 (the codec), ``condition`` labels into ``(cond, uncond)`` (the conditioner); both
    get tensors on the device, and run without gradient. On an accelerator a data set of up to ``RESIDENT_BYTES``
    stands in its memory, so that only the ids travel; a larger one is copied batch by batch. Neither way waits for the
    device.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: BatchOrder,
        encode: Callable[[Pixels], Latents],
        condition: Callable[[Labels], tuple[Any, Any]],
        device: torch.device | str,
    ):
        self.dataset, self.order = dataset, order
        self._encode, self._condition = encode, condition
        self._device = torch.device(device)
        on_device = self._device.type != "cpu" and len(dataset) * math.prod(dataset.shape) <= RESIDENT_BYTES
        self._resident = self._place() if on_device else None

    @torch.no_grad()
    def batch(self, iteration: int, slot: int = 0) -> Batch:
        """This process's rows of batch ``slot`` of ``iteration``; a function of these two, in whatever order they are
        asked for."""
        ids = self.order.ids(iteration, slot)
        if self._resident is not None:
            index = self._send(ids)
            pixels, labels = self._resident.pixels[index], self._resident.label[index]
        else:
            items = self.dataset.items(ids)
            pixels, labels = self._send(items.pixels), self._send(items.label)
        cond, uncond = self._condition(labels)
        batch = Batch(self._send(self.order.keys(slot)), self._encode(pixels), cond, uncond)
        return map_tensors(Tensor.detach, batch)  # a view of a weight asks for a gradient even here

    def _place(self) -> Items:
        """All items on the device, copied in parts so that the host never holds them twice."""
        parts = [range(start, min(start + _CHUNK, len(self.dataset))) for start in range(0, len(self.dataset), _CHUNK)]
        pixels = torch.empty((len(self.dataset), *self.dataset.shape), dtype=torch.uint8, device=self._device)
        labels = torch.empty(len(self.dataset), dtype=torch.int64, device=self._device)
        for part in parts:
            items = self.dataset.items(part)
            pixels[part.start : part.stop], labels[part.start : part.stop] = items.pixels, items.label
        return Items(pixels, labels)

    def _send(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; from pinned memory, without which the host would wait for the copy."""
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)

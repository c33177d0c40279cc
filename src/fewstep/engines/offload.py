"""Tensors that sleep: their values stand in host memory, and the memory of the device is free for others.

A tensor stays the object that it is, a key of an optimizer's state and a weight of its network: only its storage is
emptied, and filled again when it wakes, at another address. That suits FSDP2's shards, which are views of one storage,
and excludes CUDA graphs, which keep addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

SLAB = 2**30
"""Most bytes of host memory that are pinned at once; torch pins powers of two."""
ALIGNMENT = 64


class Sleeper:
    """Tensors that go to sleep together, and wake together.

    tensors: asked for each time that they go to sleep, since moments come with the first update; those that share a
    storage take it along. Tensors without axes, such as counters, stay awake, and so does what is empty.

    The host memory, pinned where the tensors are on a GPU, stays allocated: as much as sleeps, and up to ``SLAB`` of
    rounding. On a CPU all is the same, with memory of the same kind.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]):
        self._tensors = tensors
        self._places: dict[torch.UntypedStorage, Tensor] = {}
        self._slabs: list[Tensor] = []

    @property
    def asleep(self) -> bool:
        """Whether the values stand in host memory; nothing may read the tensors then, and torch does not check it."""
        return bool(self._places)

    def sleep(self) -> None:
        """Empties the storages; does nothing where they are empty. The host does not wait: values are copied after all
        that was queued so far, and the allocator hands the memory out when they are."""
        if self.asleep:
            return
        places = self._laid_out(self._storages())
        with _beside(places) as side:
            for storage, place in places.items():
                values = _values(storage)
                place.copy_(values, non_blocking=True)
                if side is not None:
                    values.record_stream(side)
        for storage in places:
            storage.resize_(0)
        self._places = places

    def wake(self) -> None:
        """Fills the storages; does nothing where they are full.

        The host waits until what went to sleep before has left the device, so that its memory is there to be taken;
        what is queued from now on runs after the copies.
        """
        if not self.asleep:
            return
        _settle(self._places)
        for storage, place in self._places.items():
            storage.resize_(place.numel())
        with _beside(self._places) as side:
            for storage, place in self._places.items():
                _values(storage).copy_(place, non_blocking=True)
        if side is not None:
            torch.cuda.current_stream(side.device).wait_stream(side)
        self._places = {}

    def value(self, tensor: Tensor) -> Tensor:
        """What a tensor holds: itself, or while it sleeps its value in host memory, until it goes to sleep again."""
        place = self._places.get(tensor.untyped_storage())
        if place is None:
            return tensor
        _settle(self._places)
        return place.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), _first(place, tensor))

    def _storages(self) -> list[torch.UntypedStorage]:
        found = dict.fromkeys(tensor.untyped_storage() for tensor in self._tensors() if tensor.ndim)
        return [storage for storage in found if storage.nbytes()]

    def _laid_out(self, storages: list[torch.UntypedStorage]) -> dict[torch.UntypedStorage, Tensor]:
        """For each storage its place in the slabs, which are kept from one sleep to the next."""
        runs: list[list[int]] = []
        for storage in storages:
            size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
            if not runs or sum(runs[-1]) + size > SLAB:
                runs.append([])
            runs[-1].append(size)
        if [len(slab) for slab in self._slabs] != [sum(run) for run in runs]:
            pinned = any(storage.device.type == "cuda" for storage in storages)
            self._slabs = [torch.empty(sum(run), dtype=torch.uint8, pin_memory=pinned) for run in runs]
        places = [place for slab, run in zip(self._slabs, runs, strict=True) for place in slab.split(run)]
        return {storage: place[: storage.nbytes()] for storage, place in zip(storages, places, strict=True)}


def keep_awake(sleepers: Mapping[str, Sleeper], names: Iterable[str], *, perhaps: Iterable[str] = ()) -> None:
    """Wakes those of ``names``, after all others have gone to sleep. perhaps: what may be used too, and stays as it is
    until then."""
    wanted, left = set(names), set(perhaps)
    for name in sleepers.keys() - wanted - left:
        sleepers[name].sleep()
    for name in wanted:
        sleepers[name].wake()


def _first(place: Tensor, tensor: Tensor) -> int:
    """Where the tensor begins in the slab, in elements of its own."""
    return int(place.storage_offset()) // tensor.element_size() + int(tensor.storage_offset())


def _values(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def _beside(places: Iterable[torch.UntypedStorage]) -> Iterator[torch.cuda.Stream | None]:
    """Inside, copies run on their GPU's stream for copies, after what is queued so far; on a CPU there is none."""
    side = _side_of(places)
    if side is None:
        yield None
        return
    side.wait_stream(torch.cuda.current_stream(side.device))
    with torch.cuda.stream(side):
        yield side


def _settle(places: Iterable[torch.UntypedStorage]) -> None:
    """The host waits until the copies that are under way have ended."""
    side = _side_of(places)
    if side is not None:
        side.synchronize()


def _side_of(places: Iterable[torch.UntypedStorage]) -> torch.cuda.Stream | None:
    device: Any = next((storage.device for storage in places), None)
    return _side_stream(device) if device is not None and device.type == "cuda" else None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

"""The order of the data: which items form a batch is a pure function of the seed, the iteration and the slot."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Int64
from torch import Tensor

from fewstep import rng
from fewstep.errors import UserError
from fewstep.shapes import Keys


class BatchOrder:
    """The rows of every batch of a run; nothing is stored that a resumed run would have to restore.

    An iteration reads ``slots`` batches of ``batch`` rows each. Row by row, slot by slot, iteration by iteration they
    walk through the epochs, each of which is another permutation of the ``num_items`` ids: every id comes once an
    epoch, and a batch may begin in one epoch and end in the next. Process ``rank`` of ``world`` takes the rows rank,
    rank + world, ... of each batch. ``hold`` iterations, one after the other, read the same batches: those of a stream
    that goes on for so many.

    Raises UserError if there are fewer items than rows in a batch.
    """

    def __init__(
        self, seed: int, num_items: int, batch: int, slots: int = 1, *, hold: int = 1, rank: int = 0, world: int = 1
    ):
        if num_items < batch:
            raise UserError(
                f"data.batch: {batch} rows are more than the {num_items} items of the data set; "
                f"set data.batch to {num_items} or less, or add items"
            )
        if not 0 <= rank < world or min(batch, slots, hold) < 1:
            raise ValueError(f"no order for rank {rank} of {world}, batch {batch}, slots {slots}, hold {hold}")
        self.num_items, self.batch, self.slots, self.hold = num_items, batch, slots, hold
        self.rank, self.world = rank, world

        @lru_cache(maxsize=2)
        def epoch_ids(epoch: int) -> Tensor:
            return rng.permutation(seed, f"data.epoch.{epoch}", num_items)

        self._epoch_ids = epoch_ids

    def ids(self, iteration: int, slot: int = 0) -> Int64[Tensor, "b"]:
        """The item ids of this process's rows, on the CPU. Both arguments count from 0."""
        self._check(iteration, slot)
        number = iteration // self.hold * self.slots + slot
        epoch, start = divmod(number * self.batch, self.num_items)
        ids = self._epoch_ids(epoch)[start : start + self.batch]
        if len(ids) < self.batch:
            ids = torch.cat([ids, self._epoch_ids(epoch + 1)[: self.batch - len(ids)]])
        return ids[self.rank :: self.world]

    def keys(self, slot: int = 0) -> Keys:
        """The names of this process's rows: their positions among all rows of an iteration, on the CPU."""
        self._check(0, slot)
        return slot * self.batch + torch.arange(self.batch)[self.rank :: self.world]

    def _check(self, iteration: int, slot: int) -> None:
        if iteration < 0 or not 0 <= slot < self.slots:
            raise ValueError(f"no batch at iteration {iteration}, slot {slot}: an iteration has {self.slots} slots")

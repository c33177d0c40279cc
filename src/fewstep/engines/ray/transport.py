"""Records on their way from the workers of one group to those of another.

Worker r of w holds rows r, r + w, ... of every global batch, whatever the size of its group. What it sends to worker q
of v are the rows that both hold; nobody else sees them. Values travel as NumPy arrays, which Ray hands to a worker on
the same machine as views of shared memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewstep.records import assert_detached, concat, leaves, map_tensors, rows


@dataclass(frozen=True)
class Parcel:
    """Rows of a record: its form, with tensors of no rows, and the bytes of each tensor."""

    form: Any
    values: tuple[np.ndarray, ...]


def meets(sender: int, senders: int, taker: int, takers: int) -> bool:
    """Whether there are rows that both workers hold."""
    return (sender - taker) % math.gcd(senders, takers) == 0


def packed(record: Any, sender: int, senders: int, taker: int, takers: int) -> Parcel:
    """Of this worker's rows of a record, those that ``taker`` of ``takers`` holds as well."""
    assert_detached(record, type(record).__name__)
    mine = sender + senders * torch.arange(len(record.key))
    wanted = (mine % takers == taker).nonzero().flatten()
    record = map_tensors(lambda tensor: tensor.detach()[wanted.to(tensor.device)].cpu().contiguous(), record)
    form = map_tensors(lambda tensor: tensor.new_empty((0, *tensor.shape[1:])), record)
    return Parcel(form, tuple(bytes_of(tensor) for tensor in leaves(record)))


def joined(parcels: Sequence[Parcel], device: torch.device) -> Any:
    """The record of all rows in the parcels, in the order of their keys, on ``device``; the parcels' own memory is not
    touched."""
    whole = concat([unpacked(parcel) for parcel in parcels])
    order = whole.key.argsort()
    return map_tensors(lambda tensor: tensor.to(device), rows(whole, order))


def unpacked(parcel: Parcel) -> Any:
    """The rows of a parcel as views of its memory, which must not be written."""
    values = iter(parcel.values)
    return map_tensors(lambda empty: tensor_of(next(values), empty.dtype), parcel.form)


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The memory of a contiguous tensor on the CPU, with its number of axes; NumPy knows no bfloat16."""
    return tensor.view(torch.uint8).numpy()


def tensor_of(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`bytes_of`: a view, which must not be written."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of arrays that cannot be written; this one is only read
        return torch.from_numpy(values).view(dtype)

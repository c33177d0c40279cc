"""Named tensors in one safetensors file, bit for bit: all at once, or one after the other."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewstep.errors import UserError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Of dtypes, in safetensors' spelling."""


@dataclass(frozen=True)
class Later:
    """A tensor that is put together when it is asked for, such as one whose parts several processes hold."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]
    """Makes it, on any device; where that takes several processes, each of them calls it."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Named = Mapping[str, Tensor | Later]


def write_tensors(file: Path, tensors: Named) -> None:
    """Tensors of any dtype, shape, stride and device; those that are one and the same are stored once. Where one of
    them comes ``Later``, all are written one after the other, and no two of those are held at a time.

    Raises safetensors.SafetensorError or OSError where the disk is full or fails.
    """
    if any(isinstance(tensor, Later) for tensor in tensors.values()):
        return _write_in_turn(file, tensors)
    kept, tied = _independent(tensors)
    save_file(kept, file, metadata={"format": "pt"} | ({"tied": json.dumps(tied)} if tied else {}))


def in_file_order(tensors: Named) -> list[str]:
    """The names in the order in which tensors that come ``Later`` are made: wide dtypes first, so that all values stand
    at multiples of their size."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of any safetensors file, on the CPU, mapped rather than read; tied names share one tensor again.

    Raises UserError that names the file where it is cut off, empty or not of this kind.
    """
    with _damage_named(file):
        tensors = load_file(file)
        with safe_open(file, framework="pt") as opened:
            tied = json.loads((opened.metadata() or {}).get("tied", "{}"))
        return tensors | {name: tensors[holder] for name, holder in tied.items()}


def dtypes(file: Path) -> dict[str, str]:
    """The dtype of every tensor in safetensors' spelling (F32, BF16, ...), from the header alone.

    Raises UserError like ``read_tensors``.
    """
    with _damage_named(file), safe_open(file, framework="pt") as opened:
        return {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} is not a whole safetensors file ({error}); it was cut off or damaged: write or copy it again"
        ) from error


def _write_in_turn(file: Path, tensors: Named) -> None:
    """The format's own layout: the length of the header, the header (JSON, padded to 8 bytes), the values."""
    order, header, end = in_file_order(tensors), {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        entry: dict = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            opened.write(_values(tensors[name]))


def _values(tensor: Tensor | Later) -> Any:
    whole = tensor.make() if isinstance(tensor, Later) else tensor
    return whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def _independent(tensors: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Contiguous tensors no two of which share memory, and for each tied name the name that holds its values."""
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
        else:
            seen[place], kept[name] = name, tensor.detach()
    memory = {name: (tensor.device, tensor.untyped_storage().data_ptr()) for name, tensor in kept.items()}
    uses = Counter(memory.values())
    return {n: t.contiguous() if uses[memory[n]] == 1 else t.contiguous().clone() for n, t in kept.items()}, tied

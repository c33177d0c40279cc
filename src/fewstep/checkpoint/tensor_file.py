"""Named tensors in one safetensors file, bit for bit."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewstep.errors import UserError


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Tensors of any dtype, shape, stride and device; those that are one and the same are stored once.

    Raises safetensors.SafetensorError where the disk is full or fails.
    """
    kept, tied = _independent(tensors)
    save_file(kept, file, metadata={"format": "pt"} | ({"tied": json.dumps(tied)} if tied else {}))


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


def _independent(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
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

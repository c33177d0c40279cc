"""Small folders of latents: odd sizes, values that tell the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SHAPE, TEXT = (6, 16, 4, 6), (5, 20)
"""Of one item, and of the embedding of its text."""


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write_shard(
    file: Path,
    num: int,
    seed: int,
    shape: tuple[int, ...] = SHAPE,
    text: tuple[int, ...] = TEXT,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float16, torch.bfloat16),
    prompts: Any = None,
) -> dict[str, Tensor]:
    """A shard of ``num`` rows; returns what is in it."""
    tensors = {
        "latents": drawn(seed, num, *shape, dtype=dtypes[0]),
        "text": drawn(seed + 1, num, *text, dtype=dtypes[1]),
    }
    save_file(tensors, file, metadata=None if prompts is None else {"prompts": json.dumps(prompts)})
    return tensors


def write_folder(folder: Path, nums: tuple[int, ...] = (3, 4), negative: bool = True, **how: Any) -> dict[str, Tensor]:
    """Shards of so many rows each, named against the order in which they are written; returns all rows in the order of
    the names, and the negative prompt."""
    folder.mkdir(parents=True)
    parts = []
    for number in reversed(range(len(nums))):
        parts.insert(0, write_shard(folder / f"part-{number}.safetensors", nums[number], 10 * number, **how))
    rows = {name: torch.cat([part[name] for part in parts]) for name in ("latents", "text")}
    if negative:
        rows["negative"] = drawn(99, *how.get("text", TEXT))
        save_file({"text": rows["negative"]}, folder / "negative.safetensors")
    return rows

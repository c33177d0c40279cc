"""Folders of the right form with random values: networks of any size as diffusers writes them, and latents with texts.
For benches, whose times do not depend on what the values are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from fewstep.models.families import build
from fewstep.models.wan.sizes import WanSection
from fewstep.models.wan.state_dict_adapter import config_to_diffusers, to_diffusers

STD = 0.02
"""Of the weights: small, and none of them zero, so that gradients reach all."""


def write_network(folder: Path, section: WanSection, device: torch.device) -> Path:
    """A published network in bfloat16, a file for every block, drawn on ``device``; kept where it is there."""
    place = folder / "transformer"
    index = place / "diffusion_pytorch_model.safetensors.index.json"
    if index.exists():
        return folder
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(config_to_diffusers(section)))
    names, _ = to_diffusers(build(section, torch.device("meta")).state_dict())
    generator, weight_map = torch.Generator(device).manual_seed(0), {}
    for part, keys in _parts(names).items():
        file = f"{part}.safetensors"
        drawn = {key: torch.randn(names[key].shape, generator=generator, device=device) * STD for key in keys}
        save_file({key: value.bfloat16().cpu().contiguous() for key, value in drawn.items()}, place / file)
        weight_map |= dict.fromkeys(keys, file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_latents(folder: Path, rows: int, shape: tuple[int, int, int, int], tokens: int, text_dim: int) -> Path:
    """Latents [rows *shape] and texts [rows tokens text_dim], and a negative prompt; kept where they are there."""
    negative = folder / "negative.safetensors"
    if negative.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).bfloat16()

    latents, text = drawn(rows, *shape), drawn(rows, tokens, text_dim)
    save_file({"latents": latents, "text": text}, folder / "shard-0.safetensors")
    save_file({"text": drawn(tokens, text_dim)}, negative)
    return folder


def _parts(names: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Keys by the file that they are in."""
    found: dict[str, list[str]] = {}
    for key in names:
        part = "block-" + key.split(".")[1] if key.startswith("blocks.") else "outside"
        found.setdefault(part, []).append(key)
    return found

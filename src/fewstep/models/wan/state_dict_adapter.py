"""Between our names and those of diffusers' ``WanTransformer3DModel``, in both directions, strictly.

Tensors are renamed, never changed. What belongs to the conditioner (a learned class table) is no part of the published
network and travels apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fewstep.errors import UserError
from fewstep.models.wan.conditioner import ConditionerSection, EmbeddingSection
from fewstep.models.wan.sizes import SIZES, Size, WanSection

State = dict[str, Tensor]

DIFFUSERS_CLASS = "WanTransformer3DModel"
CONDITIONER = "conditioner."
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""What torch.compile, DDP, FSDP and activation checkpointing put into names."""

_OUTSIDE = {
    "patch_embedding": "patch_embedding",
    "text_embedding.hidden": "condition_embedder.text_embedder.linear_1",
    "text_embedding.output": "condition_embedder.text_embedder.linear_2",
    "time_embedding.hidden": "condition_embedder.time_embedder.linear_1",
    "time_embedding.output": "condition_embedder.time_embedder.linear_2",
    "time_projection": "condition_embedder.time_proj",
    "head.projection": "proj_out",
}
_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_BLOCK = {
    **{f"self_attention.{ours}": f"attn1.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"cross_attention.{ours}": f"attn2.{theirs}" for ours, theirs in _ATTENTION.items()},
    "cross_norm": "norm2",
    "ffn.hidden": "ffn.net.0.proj",
    "ffn.output": "ffn.net.2",
}


def to_diffusers(state: Mapping[str, Tensor]) -> tuple[State, State]:
    """Our state as (that of a ``WanTransformer3DModel``, that of the conditioner, its keys without ``conditioner.``).

    Wrapper prefixes are stripped. Raises UserError that names the keys that are missing or unknown.
    """
    clean = _unwrapped(state)
    own = {key.removeprefix(CONDITIONER): value for key, value in clean.items() if key.startswith(CONDITIONER)}
    network = {key: value for key, value in clean.items() if not key.startswith(CONDITIONER)}
    return _renamed(network, _names(_num_blocks(network)), "a fewstep Wan network"), own


def from_diffusers(state: Mapping[str, Tensor], conditioner: Mapping[str, Tensor] | None = None) -> State:
    """The inverse of ``to_diffusers``. ``conditioner`` is what it gave apart.

    Raises UserError that names the keys that are missing or unknown.
    """
    clean = _unwrapped(state)
    names = {theirs: ours for ours, theirs in _names(_num_blocks(clean)).items()}
    network = _renamed(clean, names, f"a diffusers {DIFFUSERS_CLASS}")
    return network | {CONDITIONER + key: value for key, value in _unwrapped(conditioner or {}).items()}


def config_to_diffusers(section: WanSection) -> dict[str, Any]:
    """What belongs into the config.json of the exported ``WanTransformer3DModel``."""
    shape = section.architecture
    return {
        "_class_name": DIFFUSERS_CLASS,
        "patch_size": list(shape.patch),
        "num_attention_heads": shape.heads,
        "attention_head_dim": shape.head_dim,
        "in_channels": shape.channels,
        "out_channels": shape.channels,
        "text_dim": shape.text_dim,
        "freq_dim": shape.freq_dim,
        "ffn_dim": shape.ffn_dim,
        "num_layers": shape.layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": shape.eps,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "rope_max_seq_len": 1024,
        "pos_embed_seq_len": None,
    }


def section_from_diffusers(config: Mapping[str, Any], conditioner: ConditionerSection | None = None) -> WanSection:
    """The section of a ``WanTransformer3DModel`` config: the size that it equals, else overrides of the nearest family.

    conditioner: precomputed embeddings when left out. Raises UserError for configurations that are not built here
    (image-to-video, other norms), naming the key and the value.
    """
    if config.get("_class_name", DIFFUSERS_CLASS) != DIFFUSERS_CLASS:
        raise UserError(f"config.json: _class_name is {config['_class_name']!r}; only {DIFFUSERS_CLASS} can be loaded")
    _refuse_variants(config)
    missing = [key for key in _SHAPE if key not in config]
    if missing:
        raise UserError(f"config.json: {', '.join(missing)} missing; is this the folder of a {DIFFUSERS_CLASS}?")
    shape = {ours: config[theirs] for theirs, ours in _SHAPE.items()}
    shape["patch"] = tuple(shape["patch"])
    shape["dim"] = config["num_attention_heads"] * config["attention_head_dim"]
    for size, known in SIZES.items():
        if all(getattr(known, name) == value for name, value in shape.items()):
            return WanSection(size=size, conditioner=conditioner or EmbeddingSection())
    size: Size = "1.3B" if shape["channels"] == SIZES["1.3B"].channels else "nano"
    given = {name: value for name, value in shape.items() if getattr(SIZES[size], name) != value}
    return WanSection(size=size, conditioner=conditioner or EmbeddingSection(), **given)


_SHAPE = {
    "patch_size": "patch",
    "num_attention_heads": "heads",
    "in_channels": "channels",
    "text_dim": "text_dim",
    "freq_dim": "freq_dim",
    "ffn_dim": "ffn_dim",
    "num_layers": "layers",
}


def _refuse_variants(config: Mapping[str, Any]) -> None:
    fixed = {
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": 1e-6,
        "out_channels": config.get("in_channels"),
    }
    for key, value in fixed.items():
        found = config.get(key, value)
        if found != value and not (key == "out_channels" and found is None):
            kind = (
                " (an image-to-video network)" if key in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len") else ""
            )
            raise UserError(f"config.json: {key} is {found!r}{kind}; only {value!r} is supported (Wan text to video)")


def _unwrapped(state: Mapping[str, Tensor]) -> State:
    clean: State = {}
    for key, value in state.items():
        name = ".".join(component for component in key.split(".") if component not in WRAPPERS)
        if name in clean:
            raise UserError(f"two tensors are called '{name}' once wrapper prefixes are stripped")
        clean[name] = value
    return clean


def _num_blocks(keys: Iterable[str]) -> int:
    found = [re.match(r"blocks\.(\d+)\.", key) for key in keys]
    return max((int(match[1]) + 1 for match in found if match), default=0)


def _names(num_blocks: int) -> dict[str, str]:
    """Ours to theirs, every tensor of a network with ``num_blocks`` blocks."""
    layers = dict(_OUTSIDE)
    names = {"head.modulation": "scale_shift_table"}
    for block in range(num_blocks):
        prefix = f"blocks.{block}."
        layers |= {prefix + ours: prefix + theirs for ours, theirs in _BLOCK.items()}
        names[f"{prefix}modulation"] = f"{prefix}scale_shift_table"
        for ours, theirs in (("self_attention", "attn1"), ("cross_attention", "attn2")):
            names |= {
                f"{prefix}{ours}.{norm}.weight": f"{prefix}{theirs}.{norm}.weight" for norm in ("norm_q", "norm_k")
            }
    for ours, theirs in layers.items():
        names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
    return names


def _renamed(state: State, names: Mapping[str, str], what: str) -> State:
    missing, unknown = sorted(names.keys() - state.keys()), sorted(state.keys() - names.keys())
    if missing or unknown:
        parts = [
            f"{len(keys)} {word} ({_some(keys)})" for word, keys in (("missing", missing), ("unknown", unknown)) if keys
        ]
        raise UserError(f"this is not the state of {what}: {'; '.join(parts)}")
    return {names[key]: value for key, value in state.items()}


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:5]) + (", ..." if len(keys) > 5 else "")

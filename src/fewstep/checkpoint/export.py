"""The student as a plain diffusers folder, with everything that running it as trained takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor

from fewstep.checkpoint.atomic import written_aside
from fewstep.checkpoint.diffusers_scheduler import scheduler_config
from fewstep.checkpoint.meta import Exported
from fewstep.checkpoint.model_card import model_card
from fewstep.checkpoint.source import CONDITIONER, EXPORTED, WEIGHTS, Source, Which
from fewstep.checkpoint.tensor_file import write_tensors
from fewstep.errors import UserError
from fewstep.models.codec import CodecSection, build_codec
from fewstep.models.families import ModelSection
from fewstep.models.wan.state_dict_adapter import config_to_diffusers, to_diffusers

DType = Literal["float32", "bfloat16"]

_FILES = (
    Path("transformer", "config.json"),
    Path("transformer", WEIGHTS),
    CONDITIONER,
    CONDITIONER.with_name("config.json"),
    Path("model_index.json"),
    Path("scheduler", "scheduler_config.json"),
    Path(EXPORTED),
    Path("README.md"),
)
"""Everything that an export may hold."""
_FOLDERS = {file.parent for file in _FILES if file.parent.name}
_NAMED = 3

_PIPELINE: dict[str, Any] = {
    "_class_name": "WanPipeline",
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": [None, None],
    "tokenizer": [None, None],
    "vae": [None, None],
}
"""``model_index.json`` of a network that takes embeddings; text encoder and VAE are handed in on loading."""


def export(
    source: Source, folder: Path, which: Which = "ema", dtype: DType = "float32", *, overwrite: bool = False
) -> Path:
    """Writes the student of ``source`` to ``folder``, which appears complete or not at all; returns ``folder``.

    ``transformer/`` and ``scheduler/`` are what diffusers' classes load; ``conditioner/`` holds a learned class table;
    ``fewstep.json`` says how the network is run. The source is only read. Raises UserError if ``folder`` is taken
    (``overwrite`` replaces an export in which nothing else lies), if nothing is known of how to sample, or if the disk
    fails.
    """
    _refuse_taken(folder, overwrite)
    name = folder.resolve().name
    exported, scheduler, by_itself = _describe(source, which, dtype)
    section = TypeAdapter(ModelSection).validate_python(source.model)
    network, conditioner = to_diffusers(source.weights(which))
    try:
        with written_aside(folder.resolve()) as partial:
            _write_json(partial / "transformer" / "config.json", config_to_diffusers(section))
            write_tensors(partial / "transformer" / WEIGHTS, _cast(network, dtype))
            if conditioner:
                _write_json(partial / CONDITIONER.with_name("config.json"), source.model["conditioner"])
                write_tensors(partial / CONDITIONER, _cast(conditioner, dtype))
            else:
                _write_json(partial / "model_index.json", _PIPELINE)
            _write_json(partial / "scheduler" / "scheduler_config.json", scheduler)
            _write_json(partial / EXPORTED, exported.to_json())
            (partial / "README.md").write_text(model_card(name, source, exported, by_itself))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: the export could not be written: {error}; nothing of it was left behind") from error
    return folder


def _describe(source: Source, which: Which, dtype: DType) -> tuple[Exported, dict[str, Any], bool]:
    """``fewstep.json``, the scheduler's configuration, and whether that gives the noise levels by itself.

    Raises UserError for a source that does not know how it is sampled, such as a plain diffusers folder.
    """
    if source.sampling is None or source.codec is None or source.latent_shape is None or source.iteration is None:
        raise UserError(
            f"{source.path} is a plain diffusers folder already, and does not say how it is sampled; give a run or a "
            "checkpoint"
        )
    scheduler, by_itself = scheduler_config(source.sampling["sigmas"], source.sampling["solver"])
    exported = Exported.model_validate(
        {
            "iteration": source.iteration,
            "sampling": source.sampling,
            "codec": source.codec,
            "codec_id": build_codec(TypeAdapter(CodecSection).validate_python(source.codec)).id,
            "stage": source.stage,
            "classes": source.classes,
            "latent_shape": source.latent_shape,
            "versions": source.versions,
            "model": source.model,
            **{key: (source.model.get("causal") or {}).get(key) for key in ("block_frames", "window", "sink")},
            "weights": source.chosen(which),
            "dtype": dtype,
            "scheduler": "num_inference_steps" if by_itself else "sigmas",
        }
    )
    return exported, scheduler, by_itself


def _refuse_taken(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / EXPORTED).is_file():
        raise UserError(f"{folder} exists and is not an export; give another folder")
    if not overwrite:
        raise UserError(f"{folder} already holds an export; give another folder, or --overwrite to replace it")
    foreign = _foreign(folder)
    if foreign:
        more = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
        raise UserError(
            f"{folder} also holds {', '.join(foreign[:_NAMED])}{more}, which an export does not write and --overwrite "
            "would delete; move that away, or give another folder"
        )


def _foreign(folder: Path) -> list[str]:
    """What lies in the folder of an export and is not of it, by path in the folder."""
    entries = [entry for place in (folder, *(folder / name for name in _FOLDERS)) for entry in place.glob("*")]
    found = {entry.relative_to(folder): entry.is_dir() for entry in entries}
    return sorted(str(name) for name, is_dir in found.items() if name not in (_FOLDERS if is_dir else _FILES))


def _cast(state: dict[str, Tensor], dtype: DType) -> dict[str, Tensor]:
    target = getattr(torch, dtype)
    return {name: tensor.to(target) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n")

"""A model that the user named, ready to be sampled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from fewstep.checkpoint.source import Source, open_source
from fewstep.engines.device import PRECISIONS
from fewstep.engines.roles import Role
from fewstep.errors import UserError
from fewstep.models.codec import Codec, CodecSection, build_codec
from fewstep.models.families import ModelSection, build
from fewstep.rollout.few_step import SamplingSection
from fewstep.rollout.sampler import Sampler, sampler_of
from fewstep.shipped import how_to_get, recipe_of_run


@dataclass(frozen=True)
class LoadedModel:
    """The student of a run, a checkpoint or an export with its weights, as a role that computes as in training.

    sampling: the sampler that it was trained for. classes: empty where texts take their place.
    """

    source: Source
    weights: str
    role: Role
    conditioner: Any
    sampling: SamplingSection
    codec: Codec
    classes: tuple[str, ...]
    shape: tuple[int, int, int, int]
    device: torch.device

    @property
    def name(self) -> str:
        """Of the run or the export, for a checkpoint with its iteration."""
        path = self.source.path.resolve()
        return f"{path.parents[1].name}-{path.name}" if self.source.kind == "checkpoint" else path.name

    @property
    def by_text(self) -> bool:
        """Whether embeddings of texts say what is made, and latents are what comes out."""
        return self.source.model["conditioner"]["name"] == "embedding"

    @property
    def dtype(self) -> torch.dtype:
        """Of noise and states."""
        return torch.promote_types(self.role.precision, torch.float32)

    def sampler(self, sampling: SamplingSection, num_frames: int | None = None) -> Sampler:
        """The sampler of this model that ``sampling`` describes, of clips of the trained length or of another one."""
        shape = (num_frames or self.shape[0], *self.shape[1:])
        return sampler_of(sampling, shape, self.role.causal, self.dtype)


def load_model(path: Path, *, raw: bool = False, device: str = "auto", texts: bool = False) -> LoadedModel:
    """Opens what the user named and loads its weights: the average (EMA) unless ``raw``.

    Raises UserError where it does not say how it is sampled, or, unless ``texts``, is not told by class labels what to
    sample.
    """
    if not path.expanduser().exists() and (recipe := recipe_of_run(path.name)):
        raise UserError(f"{path} is not there; {how_to_get(recipe)}")
    source = open_source(path)
    if source.sampling is None or source.codec is None or source.latent_shape is None:
        raise UserError(
            f"{path} is a plain diffusers folder, which does not say how it is sampled; name a run, a checkpoint or an "
            "export (a folder with fewstep.json)"
        )
    if not texts and (source.classes is None or source.model["conditioner"]["name"] != "class_label"):
        raise UserError(
            f"{path} is told by embeddings of texts what to make, and makes latents; this command is for models of "
            f"class labels, and `fewstep sample {path}` writes the latents to a file"
        )
    which = source.chosen("raw" if raw else "ema")
    place, precision = choose_device(device, source)
    network = build(TypeAdapter(ModelSection).validate_python(source.model))
    network.load_state_dict(source.weights(which))
    network.to(place, torch.promote_types(precision, torch.float32)).requires_grad_(False).eval()
    return LoadedModel(
        source,
        which,
        Role("student", network, precision),
        network.conditioner,
        SamplingSection.model_validate(source.sampling),
        build_codec(TypeAdapter(CodecSection).validate_python(source.codec)),
        source.classes or (),
        source.latent_shape,
        place,
    )


def choose_device(device: str, source: Source) -> tuple[torch.device, torch.dtype]:
    """The device (``auto``: the GPU if there is one), and the precision in which the model was trained as far as the
    run says, else what training would take on this device. Raises UserError for a device that is not there."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        place = torch.device(name)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError):
        raise UserError(
            f"--device {device}: this machine has no such device; write cpu, or leave the option out"
        ) from None
    asked = ((source.recipe or {}).get("engine") or {}).get("precision", "auto")
    automatic = "bfloat16" if place.type == "cuda" else "float32"
    return place, PRECISIONS[automatic if asked == "auto" else asked]

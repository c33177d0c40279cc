"""What is written beside weights: how they were trained, and how they are to be run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fewstep.errors import UserError, UserErrors
from fewstep.rollout.few_step import SamplingSection

FORMAT = 1
R = TypeVar("R", bound="Record")


class Record(BaseModel):
    """A JSON file that travels with weights: versioned, complete, closed to unknown keys.

    A sampler is written resolved, as the noise levels themselves, and read in no other form.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    format: Literal[1] = FORMAT
    """Version of the file's layout."""
    iteration: int = Field(ge=0)
    """Iterations that were finished."""
    sampling: SamplingSection
    """How the network is sampled."""
    codec: dict[str, Any]
    """The codec section that made the latents."""
    stage: str
    """What the network is: ``teacher`` if it was trained on data, else ``student``."""
    classes: tuple[str, ...] | None
    """Names of the classes, if the data have some."""
    latent_shape: tuple[int, int, int, int]
    """Frames, channels, rows and columns of one sample."""
    versions: dict[str, str]
    """Of the programs that wrote it: fewstep, torch, python."""

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        values = self.model_dump(mode="json")
        del values["sampling"]["steps"]
        values["sampling"]["sigmas"] = list(self.sampling.resolved())
        return values

    @classmethod
    def from_json(cls: type[R], values: Mapping[str, Any], place: Path) -> R:
        """The inverse. Raises UserErrors that name ``place`` and every key that is unknown, missing or wrong."""
        if values.get("format") != FORMAT:
            raise UserError(
                f"{place}: its format is {values.get('format')!r}, this fewstep reads {FORMAT}; install the fewstep "
                "that wrote it"
            )
        try:
            record = cls.model_validate(values)
        except ValidationError as error:
            found = [(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
            raise UserErrors([f"{place}: {name}: {message}" for name, message in found]) from None
        if record.sampling.sigmas is None:
            raise UserError(f"{place}: sampling.sigmas is missing; a sampler is stored by its noise levels")
        return record


class Meta(Record):
    """What a checkpoint says about its tensors (``meta.json``)."""

    recipe: dict[str, Any]
    """The resolved recipe."""
    models: dict[str, dict[str, Any]]
    """The resolved model section of every role that has one, ``student`` among them."""
    sources: dict[str, int | None] = {}
    """The iteration at which the run stood that a role was loaded from; of a role from elsewhere, None."""
    counters: dict[str, Any]
    """What the engine counts: updates, skipped updates, samples seen."""
    time_s: float = Field(ge=0)
    """Seconds of training so far, those before a resume included."""


class Exported(Record):
    """What an export says about its weights (``fewstep.json``): all that running them as trained takes."""

    model: dict[str, Any]
    """The model section."""
    weights: Literal["ema", "raw"]
    """The average, or the trained weights themselves."""
    dtype: Literal["float32", "bfloat16"]
    """Of the stored weights."""
    guidance: Literal["uncond + guidance_scale * (cond - uncond)"] = "uncond + guidance_scale * (cond - uncond)"
    """What guidance_scale means: 1 is off."""
    codec_id: str
    """Names the codec; latents of another one do not fit."""
    block_frames: int | None = None
    """Latent frames that are made together by a causal network, None for one that sees everything."""
    window: int | None = None
    """Latent frames of history that a causal network sees, the sink among them."""
    sink: int | None = None
    """First latent frames that never leave the window."""
    scheduler: Literal["num_inference_steps", "sigmas"]
    """What diffusers' scheduler in the folder is given: their number, or the noise levels themselves."""

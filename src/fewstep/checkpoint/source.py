"""What a user can name as a model: a run, a checkpoint, an export, or a plain diffusers folder.

Opening reads descriptions alone; weights are read when they are asked for. Nothing that executes code (a pickle) is
ever opened.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from fewstep.checkpoint.meta import Exported, Meta
from fewstep.checkpoint.save import MARKER, Checkpoint, load_checkpoint, newest_complete
from fewstep.checkpoint.tensor_file import dtypes, read_tensors
from fewstep.errors import UserError, UserErrors
from fewstep.models.api import Geometry
from fewstep.models.families import ModelSection, build
from fewstep.models.wan.state_dict_adapter import from_diffusers, section_from_diffusers

EXPORTED = "fewstep.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
CONDITIONER = Path("conditioner", "conditioner.safetensors")
Which = Literal["ema", "raw"]
State = dict[str, Tensor]

_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")
_WANTED = (
    "give a run folder (runs/<name>), one of its checkpoints (runs/<name>/checkpoints/iteration-...), an export "
    f"(a folder with {EXPORTED}) or a diffusers folder (with transformer/config.json)"
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model that was found. What is None is not known: a plain diffusers folder tells the network alone."""

    kind: Literal["run", "checkpoint", "export", "diffusers"]
    path: Path
    """What the user named."""
    model: dict[str, Any]
    """The resolved model section of the student."""
    stage: str
    """``teacher`` or ``student``."""
    dtype: str
    """Of the stored weights, by torch's name."""
    read: Callable[[Which, str], State] = field(repr=False, compare=False)
    """Reads a role's weights; ``weights`` is the checked way."""
    holds: tuple[Which, ...] = ("raw",)
    """Which weights of the student are there."""
    iteration: int | None = None
    sampling: dict[str, Any] | None = None
    """How it is sampled: ``sigmas``, ``shift``, ``solver``, ``guidance_scale``."""
    codec: dict[str, Any] | None = None
    classes: tuple[str, ...] | None = None
    latent_shape: tuple[int, int, int, int] | None = None
    recipe: dict[str, Any] | None = None
    """The resolved recipe of the run."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the programs that wrote the weights."""

    def chosen(self, which: Which) -> Which:
        """The weights that are used where ``which`` is asked for: ``ema`` is ``raw`` where there is no average.

        Raises UserError if the trained weights are asked for and only their average is stored.
        """
        if which not in self.holds and which == "raw":
            raise UserError(f"{self.path} holds the averaged weights (ema) alone; the raw ones are in the run")
        return which if which in self.holds else "raw"

    def weights(self, which: Which = "ema", role: str = "student") -> State:
        """The weights of a role by our names, on the CPU, as stored. Only the student has an average.

        Raises UserError if they are not there, or are not exactly those of the network.
        """
        return self.read(self.chosen(which) if role == "student" else "raw", role)


def open_source(path: Path | str, besides: str | None = None) -> Source:
    """Finds out what ``path`` is. Raises UserError that says what was found there and what to give instead, but never
    a folder called ``besides``."""
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"{path} does not exist{_similar(path, besides)}; {_WANTED}")
    if not path.is_dir():
        raise UserError(f"{path} is a file{_about_file(path)}; {_WANTED}")
    if (path / EXPORTED).is_file():
        return _open_export(path)
    if (path / MARKER).is_file() or path.name.startswith("iteration-"):
        return _open_checkpoint(load_checkpoint(path), path, "checkpoint")
    if (path / "recipe.yaml").is_file() or (path / "checkpoints").is_dir():
        return _open_run(path)
    for folder in (path / "transformer", path):
        if (folder / "config.json").is_file():
            return _open_diffusers(path, folder)
    raise UserError(f"{path} is not a model: {_contents(path)}; {_WANTED}")


def _open_run(path: Path) -> Source:
    newest = newest_complete(path / "checkpoints")
    if newest is None:
        raise UserError(f"{path} is a run without a complete checkpoint; wait for its first one (checkpoint.every)")
    return _open_checkpoint(load_checkpoint(newest), path, "run")


def _open_checkpoint(checkpoint: Checkpoint, path: Path, kind: Literal["run", "checkpoint"]) -> Source:
    meta = Meta.from_json(checkpoint.meta, checkpoint.path / "meta.json")
    if "student" not in meta.models or "student" not in checkpoint.groups:
        raise UserError(f"{checkpoint.path} has no student; it holds {', '.join(checkpoint.groups)}")

    def read(which: Which, role: str) -> State:
        state = checkpoint.tensors("ema" if which == "ema" else role)
        return _fitting(state, meta.models[role], checkpoint.path) if role in meta.models else state

    return Source(
        kind=kind,
        path=path,
        iteration=meta.iteration,
        model=meta.models["student"],
        sampling=meta.to_json()["sampling"],
        codec=meta.codec,
        stage=meta.stage,
        classes=meta.classes,
        latent_shape=meta.latent_shape,
        dtype=_dtype(checkpoint.path / "student.safetensors"),
        holds=("ema", "raw") if "ema" in checkpoint.groups else ("raw",),
        recipe=meta.recipe,
        versions=meta.versions,
        read=read,
    )


def _open_export(path: Path) -> Source:
    exported = Exported.from_json(_read_json(path / EXPORTED), path / EXPORTED)
    errors = _contradictions(exported)
    if errors:
        raise UserErrors([f"{path / EXPORTED}: {error}" for error in errors])
    files = _weight_files(path / "transformer")
    table = path / CONDITIONER

    def read(which: Which, role: str) -> State:
        _only_student(role, path)
        conditioner = read_tensors(table) if table.is_file() else {}
        return _fitting(_renamed(files, conditioner), exported.model, path)

    return Source(
        kind="export",
        path=path,
        iteration=exported.iteration,
        model=exported.model,
        sampling=exported.to_json()["sampling"],
        codec=exported.codec,
        stage=exported.stage,
        classes=exported.classes,
        latent_shape=exported.latent_shape,
        dtype=exported.dtype,
        holds=(exported.weights,),
        versions=exported.versions,
        read=read,
    )


def _contradictions(exported: Exported) -> list[str]:
    """What is wrong with the model of an export, and what else it says that does not fit that model."""
    try:
        section = TypeAdapter(ModelSection).validate_python(exported.model)
    except ValidationError as error:
        return [f"{'.'.join(map(str, ('model', *found['loc'])))}: {found['msg']}" for found in error.errors()]
    errors, (frames, channels, height, width) = [], exported.latent_shape
    classes = getattr(section.conditioner, "classes", None)
    if classes is not None and exported.classes is not None and len(exported.classes) != classes:
        errors.append(f"classes: there are {len(exported.classes)} names, the conditioner of the model has {classes}")
    geometry = Geometry(section.architecture.channels, section.architecture.patch)
    if channels != geometry.channels:
        errors.append(f"latent_shape: it has {channels} channels, the model {geometry.channels}")
    if min(frames, height, width) < 1:
        errors.append(f"latent_shape: frames, rows and columns must be positive, got {list(exported.latent_shape)}")
    try:
        geometry.tokens_per_frame(height, width)
    except ValueError as error:
        errors.append(f"latent_shape: {error}")
    return errors


def _open_diffusers(path: Path, folder: Path) -> Source:
    if (path / "transformer_2").is_dir():
        raise UserError(f"{path} has two experts (transformer and transformer_2); only networks of one can be used")
    try:
        model = section_from_diffusers(_read_json(folder / "config.json")).model_dump(mode="json")
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    files = _weight_files(folder)

    def read(which: Which, role: str) -> State:
        _only_student(role, path)
        return _fitting(_renamed(files, {}), model, folder)

    return Source(kind="diffusers", path=path, model=model, stage="teacher", dtype=_dtype(files[0]), read=read)


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a diffusers network, one or several."""
    index = folder / f"{WEIGHTS}.index.json"
    names = _shards(index) if index.is_file() else [WEIGHTS]
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return [folder / name for name in names]
    pickles = [file.name for file in sorted(folder.glob("*")) if file.suffix in _PICKLES]
    if pickles:
        raise UserError(
            f"{folder} holds {', '.join(pickles)}, which can execute code and is not opened; save the model as "
            f"safetensors ({WEIGHTS}), for instance by diffusers' save_pretrained(..., safe_serialization=True)"
        )
    raise UserError(f"{folder}: {', '.join(missing)} missing; it has {_contents(folder)}")


def _shards(index: Path) -> list[str]:
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise UserError(f"{index}: weight_map must give a file for every tensor; copy the model again")
    return sorted(set(shards.values()))


def _renamed(files: list[Path], conditioner: State) -> State:
    state = {name: tensor for file in files for name, tensor in read_tensors(file).items()}
    try:
        return from_diffusers(state, conditioner)
    except UserError as error:
        raise UserError(f"{files[0].parent}: {error}") from None


def _fitting(state: State, model: Mapping[str, Any], place: Path) -> State:
    """The state, if its names and shapes are exactly those of the network."""
    network = build(TypeAdapter(ModelSection).validate_python(dict(model)), "meta")
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is not one of the network's" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"{place}: the weights do not fit the network: {'; '.join(problems[:5])}{more}")
    return state


def _only_student(role: str, path: Path) -> None:
    if role != "student":
        raise UserError(f"{path} holds one network; '{role}' is in the checkpoints of the run that trained it")


def _dtype(file: Path) -> str:
    """The dtype that most tensors of the file have."""
    found = list(dtypes(file).values())
    most = max(set(found), key=found.count) if found else "F32"
    return _DTYPES.get(most, most)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise UserError(f"{file} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"{file} must hold an object, not a {type(values).__name__}")
    return values


def _similar(path: Path, besides: str | None) -> str:
    names = [entry.name for entry in path.parent.iterdir() if entry.name != besides] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def _about_file(path: Path) -> str:
    if path.suffix in _PICKLES:
        return " of a kind that can execute code, and is not opened: convert it to safetensors first"
    return f"; perhaps you mean its folder {path.parent}" if path.suffix in (".safetensors", ".json", ".yaml") else ""


def _contents(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    return f"it holds {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}" if names else "it is empty"

"""Trajectories of a teacher on the disk: made once, by any number of processes, and read at every iteration.

The folder holds ``manifest.json``, which says what the trajectories are, and ``shard-00000.safetensors`` and so on: the
trajectories of a run of numbers in each. A shard appears complete or not at all, so whoever comes later makes those
that are missing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Int64
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewstep import rng
from fewstep.data.api import Dataset
from fewstep.data.batches import BatchSource
from fewstep.data.latents import LatentFolder
from fewstep.data.order import BatchOrder
from fewstep.errors import UserError, UserErrors
from fewstep.records import Batch, Trajectory
from fewstep.section import Section
from fewstep.shapes import Latents

MANIFEST = "manifest.json"
PARTIAL = ".partial-"
_ABANDONED_S = 3600.0  # a file that nobody has written to for so long is nobody's any more
TOLD = {"teacher": "teacher_digest", "data": "data_digest"}
"""What describes a digest to people, and is itself not compared: a run or a data set may be moved."""
FREE = ("count", "shard", *TOLD)
"""What may differ: trajectories are numbered, and each is a function of its number."""


class Manifest(Section):
    """What the trajectories of a folder are."""

    format: Literal[1] = 1
    """Version of the folder's layout."""
    teacher: str
    """Which weights of which run or folder, at which iteration."""
    teacher_digest: str
    """Of the values of the weights."""
    data: str
    """Which data set, how many items."""
    data_digest: str
    """Of pixels and labels, or of latents and texts."""
    codec: str
    """Names the codec that made the latents."""
    shape: tuple[int, int, int, int]
    """Of one latent sample: frames, channels, rows, columns."""
    nodes: int
    """Steps of the teacher."""
    shift: float
    """Shift of the teacher's grid."""
    guidance_scale: float
    """Guidance of the teacher."""
    sigmas: tuple[float, ...]
    """Noise levels of the states that were kept."""
    seed: int
    """Of the noise, and of the choice of items."""
    dtype: Literal["float32", "float16"]
    """What states and endpoints are stored in."""
    count: int = Field(ge=1)
    """Trajectories of the whole collection."""
    shard: int = Field(ge=1)
    """Trajectories of one file."""

    @property
    def digest(self) -> str:
        """The same for collections of which one can go on as the other."""
        values = self.model_dump(mode="json", exclude=set(FREE))
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def num_bytes(self) -> int:
        """Of one trajectory on the disk."""
        frames, channels, height, width = self.shape
        item = {"float32": 4, "float16": 2}[self.dtype]
        return (len(self.sigmas) + 1) * frames * channels * height * width * item

    def differences(self, found: Manifest) -> list[str]:
        """Every value by which the trajectories of ``found`` are not those wanted here, a line each."""
        told = {digest: name for name, digest in TOLD.items()}
        names = [name for name in type(self).model_fields if name not in FREE]
        return [
            f"{told.get(name, name)} = {self._said(name)}: the folder's are of {found._said(name)}"
            for name in names
            if getattr(self, name) != getattr(found, name)
        ]

    def _said(self, name: str) -> str:
        for words, digest in TOLD.items():
            if name == digest:
                return f"{getattr(self, words)} ({getattr(self, digest)[:8]})"
        return str(getattr(self, name))


@dataclass(frozen=True)
class TrajectoryFolder:
    """The trajectories 0, 1, ..., count - 1 of ``manifest``, as far as they were made."""

    path: Path
    manifest: Manifest
    _mapped: dict[int, dict[str, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The shards that were read, mapped into memory."""

    @classmethod
    def open(cls, path: Path, wanted: Manifest) -> TrajectoryFolder:
        """The folder at ``path``, which need not be there, for the collection that is wanted.

        A folder made for another count or in other shards is taken as it is: more are made, or some are left out.
        Raises UserErrors with every value that differs otherwise, and UserError if the folder holds something else.
        """
        file = path / MANIFEST
        if not file.exists():
            if path.exists() and (not path.is_dir() or any(not f.name.startswith(PARTIAL) for f in path.iterdir())):
                raise UserError(f"{path} is no folder of trajectories: it has no {MANIFEST}; take another folder")
            return cls(path, wanted)
        try:
            found = Manifest.model_validate_json(file.read_text())
        except ValidationError as error:
            raise UserError(f"{file} is damaged ({error.error_count()} problems); remove {path}") from None
        lines = wanted.differences(found)
        if lines:
            raise UserErrors([f"{path} holds other trajectories; write its values, or take another folder:", *lines])
        return cls(path, wanted.model_copy(update={"shard": found.shard}))

    @property
    def shards(self) -> range:
        """The numbers of all shards."""
        return range(-(-self.manifest.count // self.manifest.shard))

    def numbers(self, shard: int) -> range:
        """The numbers of the trajectories of a shard."""
        first = shard * self.manifest.shard
        return range(first, min(first + self.manifest.shard, self.manifest.count))

    def missing(self) -> list[int]:
        """The shards that are not there, are damaged, or were made for a smaller count."""
        return [shard for shard in self.shards if _length(self._file(shard)) < len(self.numbers(shard))]

    def begin(self) -> TrajectoryFolder:
        """Makes the folder and says in it what it holds. Returns the folder as it is to be filled: another process may
        have begun it meanwhile, in other shards. Clears what killed processes left half-written."""
        self.path.mkdir(parents=True, exist_ok=True)
        for aside in self.path.glob(f"{PARTIAL}*"):
            with suppress(FileNotFoundError):
                if time.time() - aside.stat().st_mtime > _ABANDONED_S:
                    aside.unlink()
        file = self.path / MANIFEST
        if not file.exists():
            _begin(file, self.manifest)
        found = Manifest.model_validate_json(file.read_text())
        adopted = self.manifest.model_copy(update={"shard": found.shard})
        if found.count < adopted.count:
            _replace(file, lambda aside: aside.write_text(adopted.model_dump_json(indent=1)))
        return TrajectoryFolder(self.path, adopted)

    def write(self, shard: int, made: Trajectory) -> None:
        """Keeps the trajectories of a shard, unless as many are there already. Raises UserError if the disk is full or
        fails; other shards stay."""
        if _length(self._file(shard)) >= len(made.key):
            return
        file, dtype = self._file(shard), getattr(torch, self.manifest.dtype)
        floats = {"states": made.states.to(dtype), "endpoint": made.endpoint.to(dtype)}
        tensors = {name: tensor.cpu().contiguous() for name, tensor in {"key": made.key, **floats}.items()}
        try:
            _replace(file, lambda aside: save_file(tensors, aside, metadata={"format": "pt"}))
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{file} could not be written ({error}); make room, and begin again: finished shards are kept"
            ) from error

    def read(self, numbers: Int64[Tensor, "b"]) -> Trajectory:
        """The trajectories of these numbers, as stored, on the CPU. Raises UserError where a shard holds others."""
        places = [divmod(number, self.manifest.shard) for number in numbers.tolist()]
        states = torch.stack([self._open(shard)["states"][row] for shard, row in places])
        endpoint = torch.stack([self._open(shard)["endpoint"][row] for shard, row in places])
        keys = [int(self._open(shard)["key"][row]) for shard, row in places]
        if keys != numbers.tolist():
            raise UserError(f"{self.path} holds trajectories {keys} where {numbers.tolist()} belong; remove the folder")
        return Trajectory(numbers, states, endpoint)

    def _open(self, shard: int) -> dict[str, Tensor]:
        if shard not in self._mapped:
            self._mapped[shard] = load_file(self._file(shard))
        return self._mapped[shard]

    def _file(self, shard: int) -> Path:
        return self.path / f"shard-{shard:05d}.safetensors"


class TrajectoryBatches(BatchSource):
    """Batches whose rows are trajectories, each with the item and the condition that it was made for. ``order`` is one
    of the folder's numbers."""

    def __init__(
        self,
        folder: TrajectoryFolder,
        dataset: Dataset,
        order: BatchOrder,
        encode: Callable[[Tensor], Latents],
        condition: Callable[[Tensor], tuple[Any, Any]],
        device: torch.device | str,
    ):
        super().__init__(Chosen(dataset, folder.manifest), order, encode, condition, device)
        self._folder = folder

    @torch.no_grad()
    def batch(self, iteration: int, slot: int = 0) -> Batch:
        """This process's rows; a function of the two arguments."""
        batch = super().batch(iteration, slot)
        assert batch.x0 is not None
        found = self._folder.read(self.order.ids(iteration, slot))
        states, endpoint = (self._send(tensor).to(batch.x0.dtype) for tensor in (found.states, found.endpoint))
        return dataclasses.replace(batch, trajectory=Trajectory(self._send(found.key), states, endpoint))


class Chosen:
    """The data set whose item n is the one that trajectory n was made for: epoch by epoch a permutation of all."""

    def __init__(self, dataset: Dataset, manifest: Manifest):
        self.dataset, epochs = dataset, -(-manifest.count // len(dataset))
        orders = [rng.permutation(manifest.seed, f"trajectories.epoch.{n}", len(dataset)) for n in range(epochs)]
        self._ids = torch.cat(orders)[: manifest.count]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.dataset.shape

    def __len__(self) -> int:
        return len(self._ids)

    def items(self, ids: Sequence[int] | Tensor) -> Any:
        """The items of the trajectories ``ids``, of the kind that the data set gives."""
        return self.dataset.items(self._ids[torch.as_tensor(ids)])


def data_digest(dataset: Dataset) -> str:
    """Of the items' number, shape and classes, and of all pixels and labels; a data set too large for that has a digest
    of its own."""
    if isinstance(dataset, LatentFolder):
        return dataset.digest()
    digest = hashlib.sha256(repr((len(dataset), dataset.shape, dataset.classes)).encode())
    for ids in torch.arange(len(dataset)).split(1024):
        for tensor in dataset.items(ids):
            digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def weights_digest(weights: dict[str, Tensor], *how: object) -> str:
    """Of the names and shapes of the weights, of up to 256 values of each, and of how the network runs them."""
    digest = hashlib.sha256(repr(how).encode())
    for name, tensor in sorted(weights.items()):
        digest.update(repr((name, tuple(tensor.shape))).encode())
        flat = tensor.detach().reshape(-1)
        digest.update(flat[:: max(1, len(flat) // 256)].double().numpy().tobytes())
    return digest.hexdigest()


def _length(file: Path) -> int:
    """Trajectories of a shard; 0 if it is not whole."""
    try:
        with safe_open(file, framework="pt") as opened:
            return opened.get_slice("endpoint").get_shape()[0]
    except (OSError, SafetensorError):
        return 0


def _begin(file: Path, manifest: Manifest) -> None:
    """Writes the manifest unless another process was faster: of two, one wins and both read it."""
    aside = file.with_name(f"{PARTIAL}{file.name}-{secrets.token_hex(4)}")
    aside.write_text(manifest.model_dump_json(indent=1))
    with suppress(FileExistsError):
        os.link(aside, file)
    aside.unlink()


def _replace(file: Path, write: Callable[[Path], Any]) -> None:
    """Writes aside, brings it to the disk, and renames; a process that is killed leaves what stood there before."""
    aside = file.with_name(f"{PARTIAL}{file.name}-{secrets.token_hex(4)}")
    try:
        write(aside)
        descriptor = os.open(aside, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)

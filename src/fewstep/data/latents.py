"""Latents and text embeddings that were computed before, in safetensors files of which only the asked rows are read.

The folder holds any number of shards, ``*.safetensors``, whose rows follow each other in the order of the files' names:

    latents  [n f c h w]   as the VAE gives them; the codec of the recipe normalises them
    text     [n l d]       embeddings of the prompts, zero behind the end of each

and ``negative.safetensors`` with ``text`` [l d], the embedding of the negative prompt, for guidance and for condition
dropout. Values are float16, bfloat16 or float32. A shard's metadata may hold the n prompts: ``prompts``, a JSON list.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fewstep.data.api import DatasetSection, LatentItems
from fewstep.errors import UserError, UserErrors
from fewstep.section import Section

NEGATIVE = "negative.safetensors"
FORMAT = "latents [n f c h w] and text [n l d], as docs/latents.md shows"
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_AXES = {"latents": "n f c h w", "text": "n l d"}
_PICKLES = (".pt", ".pth", ".pkl", ".ckpt", ".bin", ".npy", ".npz")
_NAMED = 5


class LatentsSection(DatasetSection):
    """Latents and text embeddings that were computed before; there are no classes, and no pictures to judge."""

    name: Literal["latents"] = "latents"
    path: str
    """Folder of ``*.safetensors`` files with ``latents`` [n f c h w], as the VAE gives them, and ``text`` [n l d];
    for guidance also ``negative.safetensors`` with ``text`` [l d]."""


@dataclass(frozen=True)
class Header:
    """What a file says of its tensors: of each, shape and dtype by safetensors' name; and the metadata."""

    file: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    metadata: dict[str, str]

    @classmethod
    def read(cls, file: Path) -> Header:
        """Reads no values. Raises UserError if the file is cut off or of another kind."""
        with _opened(file) as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            shapes = {name: tuple(found.get_shape()) for name, found in slices.items()}
            return cls(file, shapes, {name: s.get_dtype() for name, s in slices.items()}, opened.metadata() or {})

    def faults(self, axes: dict[str, str]) -> Iterator[str]:
        """What is not as it must be: the tensors that ``axes`` name, with so many dimensions, of floating point."""
        for name, wanted in axes.items():
            shape, holds = self.shapes.get(name), ", ".join(sorted(self.shapes)) or "nothing"
            if shape is None:
                yield f"{self.file}: there is no '{name}' (it holds {holds}); write {name} [{wanted}]"
            elif len(shape) != len(wanted.split()) or 0 in shape:
                yield f"{self.file}: {name} has shape {list(shape)}; write [{wanted}], each at least 1"
            elif self.dtypes[name] not in _DTYPES:
                yield f"{self.file}: {name} is {self.dtypes[name]}; write float16, bfloat16 or float32"


class LatentFolder:
    """The rows of all shards of a folder; ids follow the names of the files.

    Opening reads headers, and the values of the negative prompt alone. Raises UserErrors, each with the file, the value
    and what to write, for a folder or tensors that are missing, for files that are cut off, for shapes and dtypes that
    differ from shard to shard, and for a negative prompt that is not finite.
    """

    classes: tuple[str, ...] = ()

    def __init__(self, section: LatentsSection):
        self.path = Path(section.path).expanduser()
        self._shards = [Header.read(file) for file in _shards(self.path)]
        errors = [fault for shard in self._shards for fault in shard.faults(_AXES)] or list(self._differences())
        errors += [fault for shard in self._shards for fault in _prompt_faults(shard)]
        negative = self.path / NEGATIVE
        self._negative = Header.read(negative) if negative.exists() else None
        if self._negative is not None:
            errors += list(self._negative.faults({"text": "l d"})) or ([] if errors else list(self._odd_negative()))
        if errors:
            more = [f"data.path: and {len(errors) - _NAMED} more"] if len(errors) > _NAMED else []
            raise UserErrors([*(f"data.path: {error}" for error in errors[:_NAMED]), *more])
        self._ends = list(accumulate(shard.shapes["latents"][0] for shard in self._shards))
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._ends[-1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of one item: frames, channels, rows, columns of latents."""
        frames, channels, height, width = self._shards[0].shapes["latents"][1:]
        return frames, channels, height, width

    @property
    def text_shape(self) -> tuple[int, int]:
        """Of the embedding of one text: tokens, width."""
        length, width = self._shards[0].shapes["text"][1:]
        return length, width

    @cached_property
    def negative(self) -> Float[Tensor, "l d"] | None:
        """The embedding of the negative prompt in the dtype of the texts; None where there is none."""
        if self._negative is None:
            return None
        with _opened(self._negative.file) as opened:
            return opened.get_tensor("text").to(_DTYPES[self._shards[0].dtypes["text"]])

    def items(self, ids: Sequence[int] | Tensor) -> LatentItems:
        """The rows ``ids`` in that order, as stored, on the CPU. Raises UserError if a file went away meanwhile."""
        rows = [self._row(number) for number in torch.as_tensor(ids, dtype=torch.int64).tolist()]
        latents, text = (torch.cat(column) for column in zip(*rows, strict=True))
        return LatentItems(latents, text)

    def prompts(self, ids: Sequence[int]) -> tuple[str, ...] | None:
        """The texts themselves, where all shards name them."""
        if any("prompts" not in shard.metadata for shard in self._shards):
            return None
        texts = [text for shard in self._shards for text in json.loads(shard.metadata["prompts"])]
        return tuple(texts[number] for number in ids)

    def digest(self) -> str:
        """Of names, shapes and dtypes, of the negative prompt, and of every item the first token and a row in the midst
        of the latents: whoever encodes another clip or text changes it."""
        digest = hashlib.sha256(repr((self.shape, self.text_shape)).encode())
        frames, _, height, _ = self.shape
        for number, shard in enumerate(self._shards):
            digest.update(repr((shard.shapes["latents"], shard.dtypes["latents"], shard.dtypes["text"])).encode())
            opened = self._shard(number)
            latents, text = opened.get_slice("latents"), opened.get_slice("text")
            for row in range(shard.shapes["latents"][0]):
                digest.update(_bytes(latents[row : row + 1, frames // 2, :, height // 2]))
                digest.update(_bytes(text[row : row + 1, 0]))
        if self.negative is not None:
            digest.update(_bytes(self.negative))
        return digest.hexdigest()

    def refuse_swapped(self, channels: int) -> None:
        """Raises UserError where the second axis has as many channels as the codec, and the third has not."""
        frames, found, height, width = self.shape
        if frames == channels != found:
            raise UserError(
                f"data.path = {self.path}: latents [f c h w] of shape {[frames, found, height, width]}, and the codec "
                f"is for {channels} channels: frames and channels look swapped; write .transpose(1, 2) of [n c f h w]"
            )

    def misfits(self, classes: int | None, text_dim: int) -> Iterator[str]:
        """What does not fit of a network that is told of so many classes, or reads embeddings of width ``text_dim``."""
        if classes is not None:
            yield (
                f"its network is told one of {classes} classes, the data have texts; take a network of conditioner: "
                "{name: embedding}, such as a diffusers folder of Wan, or other data"
            )
        elif text_dim != self.text_shape[1]:
            yield (
                f"its network reads embeddings of width {text_dim} (model.text_dim), the texts of {self.path} are "
                f"{self.text_shape[1]} wide; embed them by the network's own text encoder"
            )

    def lacks(self, method: Section, sampling: Section) -> Iterator[str]:
        """The keys of a recipe that need a negative prompt, where there is none."""
        for place, section, key, off in (
            ("method", method, "guidance_scale", 1.0),
            ("method", method, "cond_dropout", 0),
            ("sampling", sampling, "guidance_scale", 1.0),
        ):
            value = getattr(section, key, off)
            if value != off and self._negative is None:
                yield (
                    f"{place}.{key} = {value}: it needs the embedding of a negative prompt, and {self.path} has no "
                    f"{NEGATIVE}; write that file with text [l d], or {off}"
                )

    def _row(self, number: int) -> tuple[Tensor, Tensor]:
        shard = bisect_right(self._ends, number)
        row = number - (self._ends[shard - 1] if shard else 0)
        opened = self._shard(shard)
        return opened.get_slice("latents")[row : row + 1], opened.get_slice("text")[row : row + 1]

    def _shard(self, number: int) -> Any:
        """The file, mapped into memory when it is first asked for."""
        if number not in self._open:
            self._open[number] = _opened(self._shards[number].file)
        return self._open[number]

    def _differences(self) -> Iterator[str]:
        """Where the rows of a shard are not like those of the first one, or its texts fewer than its latents."""
        first = self._shards[0]
        for shard in self._shards:
            if shard.shapes["text"][0] != shard.shapes["latents"][0]:
                yield (
                    f"{shard.file}: {shard.shapes['latents'][0]} latents and {shard.shapes['text'][0]} texts; write as "
                    "many of both"
                )
            for name in _AXES:
                found, wanted = list(shard.shapes[name][1:]), list(first.shapes[name][1:])
                if found != wanted:
                    padded = ", texts padded with zeros to one length" if name == "text" else ""
                    yield (
                        f"{shard.file}: {name} of shape {found}, those of {first.file.name} have {wanted}; write all "
                        f"shards alike{padded}"
                    )
                if shard.dtypes[name] != first.dtypes[name]:
                    yield (
                        f"{shard.file}: {name} of dtype {shard.dtypes[name]}, those of {first.file.name} have "
                        f"{first.dtypes[name]}; write all shards alike"
                    )

    def _odd_negative(self) -> Iterator[str]:
        """Guidance runs the network on texts and the negative prompt at once, in the dtype of the texts."""
        assert self._negative is not None
        found = self._negative.shapes["text"]
        if found != self.text_shape:
            yield (
                f"{self._negative.file}: text of shape {list(found)}, the texts of the items have "
                f"{list(self.text_shape)}; pad or encode it like them"
            )
            return
        assert self.negative is not None
        if odd := int((~self.negative.isfinite()).sum()):
            kind = str(self.negative.dtype).removeprefix("torch.")
            yield (
                f"{self._negative.file}: {odd} value(s) of text are NaN or infinite in {kind}, the dtype of the texts; "
                "encode the negative prompt again, as finite numbers of that dtype"
            )


def _shards(folder: Path) -> list[Path]:
    """The shards by name. Raises UserError if there are none."""
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise UserError(f"data.path = {folder}: it {kind}; write a folder of *.safetensors files with {FORMAT}")
    files = sorted(file for file in folder.iterdir() if not file.name.startswith("."))
    found = [file for file in files if file.suffix == ".safetensors" and file.name != NEGATIVE]
    if not found:
        others = [file.name for file in files if file.suffix in _PICKLES][:_NAMED]
        hint = f" ({', '.join(others)} may execute code or have no header, and are not read)" if others else ""
        raise UserError(f"data.path = {folder}: there is no *.safetensors file{hint}; write shards with {FORMAT}")
    return found


def _prompt_faults(shard: Header) -> Iterator[str]:
    """Prompts that are no list of as many texts as there are rows."""
    if "prompts" not in shard.metadata or "latents" not in shard.shapes:
        return
    try:
        prompts = json.loads(shard.metadata["prompts"])
    except ValueError:
        prompts = None
    rows = shard.shapes["latents"][:1]
    if not isinstance(prompts, list) or not all(isinstance(text, str) for text in prompts) or (len(prompts),) != rows:
        said = f"{len(prompts)} entries" if isinstance(prompts, list) else "no list"
        yield f"{shard.file}: metadata 'prompts' is {said}; write a JSON list of {rows[0] if rows else 0} texts"


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"data.path: {file} is not a whole safetensors file ({error}); write or copy it again"
        ) from error


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()

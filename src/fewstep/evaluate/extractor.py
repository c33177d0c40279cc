"""The networks that judge samples, chosen by the recipe: ``extractor: {name: classifier}``.

To plug in another one (Inception, DINO, a video network), write a class with the contract of ``evaluate/api.py`` and a
``build`` like those here, and name it in a module of your own as ``EXTRACTORS = (MyInception,)``; the recipe lists that
module under ``plugins`` and asks for the class by its ``name``, with the weights as a safetensors file in ``path``:

    class MyInception:
        name = "my_inception"
        num_features, num_classes = 2048, None

        @classmethod
        def build(cls, section, dataset, device):
            network = the_architecture_in_python()
            network.load_state_dict(safetensors.torch.load_file(section.path))
            return cls(network.eval().requires_grad_(False).to(device))

        id = property(lambda self: f"my_inception:{tensor_hash(self.network.state_dict())[:16]}")

        def features(self, pixels):     # [b f c h w] in [-1, 1]: resize, grey to RGB, normalise as in its training
            ...

        def logits(self, features):     # its 1000 classes are not those of the data
            return None

Weights are only ever read as tensors: a TorchScript or pickle file is a program, and is not opened.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fewstep.errors import UserError
from fewstep.evaluate.api import Extractor, Features, LabelledClips, Logits, PixelValues
from fewstep.evaluate.cache import cached, data_hash, read_checked, tensor_hash, write_checked
from fewstep.evaluate.classifier import (
    NUM_FEATURES,
    Classifier,
    ClipClassifier,
    classifier_for,
    exact_convolutions,
    train_classifier,
)
from fewstep.section import Section


class ExtractorSection(Section):
    """The frozen network whose features samples and real data are compared by."""

    name: str = "classifier"
    """``classifier`` is trained on the data set in seconds and kept; ``file`` is a classifier of your own, in ``path``;
    another name is that of a plugin's extractor."""
    path: str | None = None
    """The safetensors file of the weights, for ``file`` (written by ``fewstep.evaluate.extractor.save_classifier``)."""
    seed: int = Field(default=0, ge=0)
    """Of the training of ``classifier``; another seed gives another judge."""
    updates: int = Field(default=1000, ge=1)
    """Length of the training of ``classifier``, in batches of 128 images or 32 clips."""
    cache: str = "~/.cache/fewstep/evaluate"
    """Folder for trained classifiers and features of real data; it may be deleted at any time."""

    @model_validator(mode="after")
    def _path_where_it_is_read(self) -> ExtractorSection:
        if self.name == "file" and self.path is None:
            raise ValueError("extractor 'file' needs 'path', the safetensors file of a classifier")
        if self.name == "classifier" and self.path is not None:
            raise ValueError("extractor 'classifier' reads no 'path'; write name: file, or leave 'path' out")
        return self

    @property
    def cache_folder(self) -> Path:
        return Path(self.cache).expanduser()


class ClassifierExtractor:
    """The 64 features of a :class:`~fewstep.evaluate.classifier.Classifier` trained on the data, which stays frozen."""

    name: ClassVar[str] = "classifier"
    num_features: int = NUM_FEATURES

    def __init__(self, network: Classifier, device: torch.device | str = "cpu"):
        placed = network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.network = placed.requires_grad_(False).eval()  # the same bits, freshly trained or from the cache
        self.id = f"{network.architecture}:{tensor_hash(network.state_dict())[:16]}"
        self.num_classes: int | None = network.num_classes

    @classmethod
    def build(cls, section: ExtractorSection, dataset: LabelledClips, device: torch.device | str) -> Extractor:
        """Trained on ``dataset``, or taken from the cache, whose key is a hash of the data, the architecture and the
        settings. Raises UserError for data that it cannot be trained on."""
        network = classifier_for(dataset)
        name = f"{network.architecture}-{data_hash(dataset)[:32]}-{network.batch}x{section.updates}-{section.seed}"

        def train() -> dict[str, Tensor]:
            trained = train_classifier(network, dataset, seed=section.seed, updates=section.updates, device=device)
            return trained.state_dict()

        network.load_state_dict(cached(section.cache_folder, name, train))
        return cls(network, device)

    @torch.no_grad()
    def features(self, pixels: PixelValues) -> Features:
        """Raises UserError for images or clips of another shape than it was trained on."""
        shape = tuple(pixels.shape[1:])
        if shape != self.network.shape:
            raise UserError(
                f"extractor {self.id} judges samples of shape {self.network.shape} (frames, channels, height, width), "
                f"not {shape}"
            )
        with exact_convolutions():
            return self.network.features(pixels.float())

    @torch.no_grad()
    def logits(self, features: Features) -> Logits | None:
        return self.network.head(features)


class FileExtractor(ClassifierExtractor):
    """A classifier from a file: of any widths, trained by you, for as long as you liked, on the classes of the data."""

    name: ClassVar[str] = "file"

    @classmethod
    def build(cls, section: ExtractorSection, dataset: LabelledClips, device: torch.device | str) -> Extractor:
        """Raises UserError if the file is missing, damaged, something else, or not for the classes and the shape of
        ``dataset``."""
        network = load_classifier(Path(section.path or "").expanduser())
        ours, others = (network.shape, network.num_classes), (tuple(dataset.shape), len(dataset.classes))
        if ours != others:
            raise UserError(
                f"extractor.path: '{section.path}' knows {ours[1]} classes of shape {ours[0]} (frames, channels, "
                f"height, width), the data are {others[1]} of shape {others[0]}; name a classifier of such data"
            )
        return cls(network, device)


NETWORKS = {kind.architecture: kind for kind in (Classifier, ClipClassifier)}
"""The classifiers that a file may hold."""
EXTRACTORS: tuple[Any, ...] = (ClassifierExtractor, FileExtractor)


def build_extractor(
    section: ExtractorSection, dataset: LabelledClips, device: torch.device | str, plugins: Sequence[str] = ()
) -> Extractor:
    """The extractor that the section names, for data like ``dataset`` (the split that is trained on).

    plugins: modules whose ``EXTRACTORS`` are known too, where they have any. Raises UserError for an unknown name.
    """
    return _kind(section, plugins).build(section, dataset, device)


def fewest_items(section: ExtractorSection, plugins: Sequence[str] = ()) -> int:
    """How many samples, and how many real items, the extractor needs to tell a distance: one more than its features;
    1 where its class does not say how many these are. Raises UserError for an unknown name."""
    num_features = getattr(_kind(section, plugins), "num_features", 0)
    return 1 + num_features if isinstance(num_features, int) else 1


def _kind(section: ExtractorSection, plugins: Sequence[str]) -> Any:
    known = {extractor.name: extractor for extractor in EXTRACTORS}
    for plugin in plugins:
        known |= {extractor.name: extractor for extractor in getattr(importlib.import_module(plugin), "EXTRACTORS", ())}
    if section.name not in known:
        close = difflib.get_close_matches(section.name, known, 1)
        hint = f"write {close[0]}" if close else f"write one of {', '.join(known)}, or name its module under 'plugins'"
        raise UserError(f"extractor.name = {section.name}: there is no such extractor; {hint}")
    return known[section.name]


def save_classifier(network: Classifier, path: Path) -> None:
    """The file that extractor ``file`` reads: tensors, and in the header the widths, shape and number of classes."""
    layout = {"widths": network.widths, "shape": network.shape, "num_classes": network.num_classes}
    tensors = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
    write_checked(path, tensors, {"architecture": network.architecture, "layout": json.dumps(layout)})


def load_classifier(path: Path) -> Classifier:
    """Raises UserError if the file is missing, damaged or something else."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        layout = json.loads(header["layout"])
        kind = NETWORKS[header["architecture"]]
        network = kind(tuple(layout["widths"]), tuple(layout["shape"]), layout["num_classes"])
        network.to_empty(device="cpu").load_state_dict(read_checked(path))
    except FileNotFoundError:
        raise UserError(f"extractor.path: there is no file '{path}'; write one by save_classifier") from None
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise UserError(f"extractor.path: '{path}' is no classifier of fewstep, or damaged ({error})") from error
    return network

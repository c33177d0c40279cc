"""Small convolutional classifiers, trained in seconds: the default eyes of the evaluation for images and clips."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from fewstep.errors import UserError
from fewstep.evaluate.api import Features, LabelledClips, Logits, PixelValues
from fewstep.rng import generator
from fewstep.watched import watched

NUM_FEATURES = 64
BATCH, CLIP_BATCH = 128, 32
"""Images or clips in one batch of the training."""
PEAK_LR = 1e-2
_WIDTHS = (24, 48, 64)
_SMALLEST = 4
_PLACES = 16


class Classifier(nn.Module):
    """Of images: convolutions of stride 2 with batch normalisation, 64 features, one linear layer.

    widths: channels of the convolutions. shape: (frames, channels, height, width) of an item. Made without memory:
    weights follow by ``to_empty`` and :meth:`initialise` or ``load_state_dict``, and no global generator is touched.
    """

    architecture: ClassVar[str] = "classifier-1"
    """To be raised when the network or its training changes what comes out."""
    batch: ClassVar[int] = BATCH

    def __init__(self, widths: tuple[int, ...], shape: tuple[int, int, int, int], num_classes: int):
        super().__init__()
        self.widths, self.shape, self.num_classes = widths, shape, num_classes
        _, channels, height, width = shape
        with torch.device("meta"):
            self.stages = nn.Sequential()
            for out in widths:
                self.stages.append(nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False))
                self.stages.append(nn.BatchNorm2d(out))
                self.stages.append(nn.ReLU())
                channels, height, width = out, math.ceil(height / 2), math.ceil(width / 2)
            self._read(channels, channels * height * width)
            self.head = nn.Linear(NUM_FEATURES, num_classes)

    def _read(self, channels: int, size: int) -> None:
        """The layers from the last convolution, of ``size`` values in all, to the features."""
        self.project = nn.Sequential(nn.Flatten(), *_dense(size, NUM_FEATURES))

    def features(self, pixels: PixelValues) -> Features:
        """Of items in [-1, 1]."""
        return self.project(self.stages(_frames(pixels)))

    def forward(self, pixels: PixelValues) -> Logits:
        return self.head(self.features(pixels))

    @torch.no_grad()
    def initialise(self, rng: torch.Generator) -> None:
        """Draws the weights: normal with variance 2 / inputs, which keeps the scale through a ReLU; the head 0."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1 and not name.startswith("head"):
                drawn = torch.randn(parameter.shape, generator=rng) * math.sqrt(2 / parameter[0].numel())
                parameter.copy_(drawn)
            else:
                parameter.zero_()
        for module in self.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                nn.init.ones_(module.weight)
                module.reset_running_stats()


class ClipClassifier(Classifier):
    """Of clips: the same convolutions for every frame; then *what* is seen, their mean over places and frames, and
    *how* it moves, a convolution over every three frames of 16 values that say where things are, mean over frames."""

    architecture: ClassVar[str] = "clip-classifier-1"
    batch: ClassVar[int] = CLIP_BATCH

    def _read(self, channels: int, size: int) -> None:
        self.where = nn.Sequential(nn.Flatten(), *_dense(size, _PLACES))
        self.how = nn.Sequential(
            nn.Conv1d(_PLACES, NUM_FEATURES, 3, padding=1, bias=False), nn.BatchNorm1d(NUM_FEATURES), nn.ReLU()
        )
        self.project = nn.Sequential(*_dense(channels + NUM_FEATURES, NUM_FEATURES))

    def features(self, pixels: PixelValues) -> Features:
        seen, clips = self.stages(_frames(pixels)), pixels.shape[:2]
        what = seen.mean((2, 3)).unflatten(0, clips).mean(1)
        how = self.how(self.where(seen).unflatten(0, clips).transpose(1, 2)).mean(2)
        return self.project(torch.cat([what, how], 1))


def _dense(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()


def _frames(pixels: PixelValues) -> Float[Tensor, "n c h w"]:
    return pixels.flatten(0, 1).contiguous(memory_format=torch.channels_last)


def classifier_for(dataset: LabelledClips, widths: tuple[int, ...] = ()) -> Classifier:
    """A classifier without weights for the images or clips of ``dataset``; left out, ``widths`` halve them to 4 rows or
    columns.

    Raises UserError for data with fewer than two classes.
    """
    frames, _, height, width = dataset.shape
    if len(dataset.classes) < 2:
        raise UserError("extractor 'classifier' needs data of two classes or more; write another extractor")
    num_stages = max(1, math.ceil(math.log2(min(height, width) / _SMALLEST)))
    default = tuple(_WIDTHS[min(stage, len(_WIDTHS) - 1)] for stage in range(num_stages))
    kind = Classifier if frames == 1 else ClipClassifier
    return kind(widths or default, dataset.shape, len(dataset.classes)).to_empty(device="cpu")


def train_classifier(
    network: Classifier,
    dataset: LabelledClips,
    *,
    seed: int = 0,
    updates: int = 1000,
    device: torch.device | str = "cpu",
) -> Classifier:
    """``network``, trained from the start for ``updates`` batches (128 images, 32 clips); it comes back frozen,
    on the CPU.

    AdamW under a one-cycle learning rate. Deterministic by ``seed`` on one machine; global generators are not touched.
    """
    network.initialise(generator(seed, "classifier"))
    network = network.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_LR, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LR, total_steps=updates + 1, pct_start=0.15, cycle_momentum=False
    )
    with torch.enable_grad(), exact_convolutions():
        for ids in watched("training the judge", _batches(len(dataset), updates, network.batch, seed)):
            items = dataset.items(ids)
            logits = network(as_values(items.pixels.to(device)))
            loss = nn.functional.cross_entropy(logits, items.label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return network.requires_grad_(False).cpu().eval()


def as_values(pixels: UInt8[Tensor, "b f c h w"]) -> PixelValues:
    """Pixels 0 to 255 on the scale [-1, 1]."""
    return pixels.float() / 127.5 - 1


def exact_convolutions() -> AbstractContextManager[None]:
    """Inside, convolutions on a GPU are repeatable and in full float32."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


def _batches(num: int, updates: int, batch: int, seed: int) -> tuple[Int64[Tensor, "batch"], ...]:
    """Ids for every update; every item once before any comes again."""
    rng = generator(seed, "classifier batches")
    rounds = math.ceil(updates * batch / num)
    return torch.cat([torch.randperm(num, generator=rng) for _ in range(rounds)])[: updates * batch].split(batch)

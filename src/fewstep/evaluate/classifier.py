"""A small convolutional classifier, trained in seconds: the default eyes of the evaluation for small images."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor, nn

from fewstep.errors import UserError
from fewstep.evaluate.api import Features, LabelledImages, Logits, PixelValues
from fewstep.rng import generator

ARCHITECTURE = "classifier-1"
"""To be raised when the network or its training changes what comes out."""

NUM_FEATURES = 64
BATCH = 128
PEAK_LR = 1e-2
_WIDTHS = (24, 48, 64)
_SMALLEST = 4


class Classifier(nn.Module):
    """Convolutions of stride 2 with batch normalisation, 64 features, one linear layer.

    widths: channels of the convolutions. shape: (channels, height, width) of the images. Made without memory: weights
    follow by ``to_empty`` and :meth:`initialise` or ``load_state_dict``, and no global generator is touched.
    """

    def __init__(self, widths: tuple[int, ...], shape: tuple[int, int, int], num_classes: int):
        super().__init__()
        self.widths, self.shape, self.num_classes = widths, shape, num_classes
        channels, height, width = shape
        with torch.device("meta"):
            self.stages = nn.Sequential()
            for out in widths:
                self.stages.append(nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False))
                self.stages.append(nn.BatchNorm2d(out))
                self.stages.append(nn.ReLU())
                channels, height, width = out, math.ceil(height / 2), math.ceil(width / 2)
            self.project = nn.Sequential(
                nn.Flatten(),
                nn.Linear(channels * height * width, NUM_FEATURES, bias=False),
                nn.BatchNorm1d(NUM_FEATURES),
                nn.ReLU(),
            )
            self.head = nn.Linear(NUM_FEATURES, num_classes)

    def features(self, pixels: PixelValues) -> Features:
        """Of images with one frame, in [-1, 1]."""
        images = pixels[:, 0].contiguous(memory_format=torch.channels_last)
        return self.project(self.stages(images))

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


def classifier_for(dataset: LabelledImages, widths: tuple[int, ...] = ()) -> Classifier:
    """A classifier without weights for the images of ``dataset``; left out, ``widths`` halve them to 4 rows or columns.

    Raises UserError for videos and for data with fewer than two classes.
    """
    frames, channels, height, width = dataset.shape
    if frames != 1:
        raise UserError(
            f"extractor 'classifier' judges images, and the data are clips of {frames} frames; write another"
        )
    if len(dataset.classes) < 2:
        raise UserError("extractor 'classifier' needs data of two classes or more; write another extractor")
    num_stages = max(1, math.ceil(math.log2(min(height, width) / _SMALLEST)))
    default = tuple(_WIDTHS[min(stage, len(_WIDTHS) - 1)] for stage in range(num_stages))
    return Classifier(widths or default, (channels, height, width), len(dataset.classes)).to_empty(device="cpu")


def train_classifier(
    network: Classifier,
    dataset: LabelledImages,
    *,
    seed: int = 0,
    updates: int = 1000,
    device: torch.device | str = "cpu",
) -> Classifier:
    """``network``, trained from the start for ``updates`` batches of 128; it comes back frozen, on the CPU.

    AdamW under a one-cycle learning rate. Deterministic by ``seed`` on one machine; global generators are not touched.
    """
    network.initialise(generator(seed, "classifier"))
    network = network.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(network.parameters(), lr=PEAK_LR, weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LR, total_steps=updates + 1, pct_start=0.15, cycle_momentum=False
    )
    with torch.enable_grad(), exact_convolutions():
        for ids in _batches(len(dataset), updates, seed):
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


def _batches(num: int, updates: int, seed: int) -> tuple[Int64[Tensor, "batch"], ...]:
    """Ids for every update; every item once before any comes again."""
    rng = generator(seed, "classifier batches")
    rounds = math.ceil(updates * BATCH / num)
    return torch.cat([torch.randperm(num, generator=rng) for _ in range(rounds)])[: updates * BATCH].split(BATCH)

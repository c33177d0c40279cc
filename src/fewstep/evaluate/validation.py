"""Validation: now and then the student is sampled from the same noise, judged and shown, and training never notices."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import Field, PositiveInt

from fewstep.errors import named
from fewstep.evaluate.api import LabelledClips, PixelValues
from fewstep.evaluate.clip import save_clip_grid
from fewstep.evaluate.extractor import ExtractorSection, build_extractor
from fewstep.evaluate.judge import Judge
from fewstep.evaluate.picture import class_rows, save_film, save_grid
from fewstep.evaluate.sample import LabelConditioner, balanced_labels, generate
from fewstep.models.api import FlowModel
from fewstep.models.blocks import CausalSection
from fewstep.models.codec import Codec
from fewstep.rollout.few_step import SamplingSection
from fewstep.rollout.sampler import sampler_of
from fewstep.section import Section

_MOST_ROWS, _MOST_CLIP_ROWS = 10, 20


class ValidationSection(Section):
    """What is measured while training goes on; always from the same noise, under the averaged weights."""

    every: int = Field(ge=1)
    """Iterations between two validations; there is one after the last iteration too."""
    samples: int = Field(default=200, ge=1)
    """Samples at each number of steps, all classes alike."""
    steps: tuple[PositiveInt, ...] = ()
    """Numbers of steps to sample with; left out, that of ``sampling`` alone. At that number the trained sampler runs,
    at others its solver and guidance on the ladder of so many steps at its shift."""
    seed: int = Field(default=0, ge=0)
    """Of the noise."""
    batch: int = Field(default=100, ge=1)
    """Samples made at once; does not change them."""
    columns: int = Field(default=8, ge=1)
    """Pictures or clips of each class in the grids."""
    extractor: ExtractorSection | None = ExtractorSection()
    """What the samples are judged by; null for pictures only."""


class Validator:
    """Validates a model when it is called with (iteration, model).

    sampling, shape, causal, dtype: of the sampler that is trained, of the latents, and how the network cuts clips into
    blocks (None: not at all). train, test: the extractor is trained on one, samples are compared with the other, and
    clips that are continued begin like its clips; reading them is all that is done before training begins. folder:
    where the grids go, ``iteration-000050.steps4.png``; None writes none (on all processes but one). Of clips, that
    file is film strips, one sample of each class, and the grid plays in a GIF beside it.

    Training is the same, bit for bit, with and without validation: the random numbers are functions of the section's
    seed alone, no gradient is recorded, and modules get their mode back even when an error is raised.

    Raises UserError for too few samples, or data that the extractor cannot judge.
    """

    def __init__(
        self,
        section: ValidationSection,
        sampling: SamplingSection,
        conditioner: LabelConditioner,
        codec: Codec,
        train: LabelledClips,
        test: LabelledClips,
        *,
        shape: tuple[int, int, int, int],
        causal: CausalSection | None = None,
        folder: Path | None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        plugins: Sequence[str] = (),
    ):
        self.section, self.conditioner, self.codec, self.folder, self.device = (
            section,
            conditioner,
            codec,
            folder,
            device,
        )
        self.classes = train.classes
        trained = len(sampling.resolved())
        if section.steps and trained not in section.steps:
            warnings.warn(
                f"validation.steps = {list(section.steps)} leaves out {trained}, the number of steps that is trained; "
                "the best checkpoint for it cannot be told",
                stacklevel=2,
            )
        self.samplers = {
            n: sampler_of(sampling.with_steps(n), shape, causal, dtype) for n in section.steps or (trained,)
        }
        self.labels, self.given = balanced_labels(section.samples, len(train.classes)), None
        if sampling.given_frames:
            items = test.items(torch.arange(section.samples) % len(test))
            self.labels, self.given = items.label, codec.encode(items.pixels)[:, : sampling.given_frames]
        self.judge: Judge | None = None
        if section.extractor is not None:
            extractor = build_extractor(section.extractor, train, device, plugins)
            self.judge = Judge(extractor, test, section.extractor.cache_folder, device)
            self.judge.check(section.samples, "validation.samples")

    def __call__(self, iteration: int, model: FlowModel) -> dict[str, float]:
        """The metrics by name, ``validation/frechet.steps4``; the grids are written meanwhile."""
        metrics: dict[str, float] = {}
        for num_steps, sampler in self.samplers.items():
            samples = generate(
                model,
                sampler,
                self.conditioner,
                self.labels,
                self.section.seed,
                batch=self.section.batch,
                given=self.given,
                device=self.device,
            )
            pixels = self.codec.decode(samples.x0)
            if self.folder is not None:
                with named(self.folder):
                    self._show(self.folder, pixels, f"iteration-{iteration:06d}.steps{num_steps}")
            quality = self.judge(pixels, self.labels).model_dump(exclude_none=True) if self.judge else {}
            metrics |= {f"validation/{name}.steps{num_steps}": value for name, value in quality.items()}
        return metrics

    def _show(self, folder: Path, pixels: PixelValues, name: str) -> None:
        """A grid of one class a row; only the first classes where there are many."""
        is_clip = pixels.shape[1] > 1
        chosen = class_rows(self.labels, _MOST_CLIP_ROWS if is_clip else _MOST_ROWS, self.section.columns)
        names = [self.classes[label] for label in self.labels[chosen[:, 0]].tolist()]
        rows = [pixels[row] for row in chosen]
        if is_clip:
            save_film(folder / f"{name}.png", pixels[chosen[:, 0]], names)
            save_clip_grid(folder / f"{name}.gif", rows, names)
        else:
            save_grid(folder / f"{name}.png", rows, names)

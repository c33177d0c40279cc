"""The judge of samples: an extractor and real data that no training sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import torch
from jaxtyping import Float, Int64
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fewstep.errors import UserError
from fewstep.evaluate.api import Extractor, Features, LabelledClips, MovingClips, PixelValues
from fewstep.evaluate.cache import cached, data_hash
from fewstep.evaluate.classifier import as_values
from fewstep.evaluate.motion import motion_errors, num_motions
from fewstep.evaluate.picture import to_uint8
from fewstep.evaluate.quality import Gaussian, frechet_distance, neighbourhood
from fewstep.evaluate.windows import as_windows
from fewstep.rng import permutation
from fewstep.watched import watched

_BATCH = 500

MAX_REFERENCE = 10_000
"""Real items that samples are compared with, at most."""


class Quality(BaseModel):
    """How good a set of samples is. NaN where it cannot be said: some samples are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", use_attribute_docstrings=True)

    frechet: float
    """Frechet distance to the real data on the extractor's features, 0 or more; its scale is the extractor's."""
    accuracy: float | None
    """Share of the samples that the extractor sees as the class that was asked for; None without classes."""
    precision: float
    """Share of the samples that lie among real data: fidelity."""
    recall: float
    """Share of the real data that lie among the samples: diversity."""
    coverage: float
    """Share of the real data that have a sample near them: diversity."""
    item_accuracy: float | None = None
    """Share of the samples that show the item that was asked for; None where classes are not items in motion."""
    motion_accuracy: float | None = None
    """Share of the samples that move as it was asked for; None where classes are not items in motion."""
    motion_error: float | None = None
    """Pixels that an item is on average from where the known physics sends it; None without such physics."""


METRICS = tuple(Quality.model_fields)
HEADINGS = {
    "frechet": "Frechet",
    "accuracy": "Acc.",
    "item_accuracy": "Item",
    "motion_accuracy": "Motion",
    "motion_error": "Error",
    "precision": "Prec.",
    "recall": "Recall",
    "coverage": "Cover.",
}
"""Of the metrics in tables, in their order there, short enough for a terminal of 80 columns."""


def filled(rows: Sequence[Quality]) -> list[str]:
    """The metrics that a table of ``rows`` shows: those that any of them has. Where item and motion are told apart, the
    accuracy of both together and the precision are left out, which say less than these and would make it too wide."""
    known = [name for name in HEADINGS if any(getattr(row, name) is not None for row in rows)]
    return [name for name in known if "item_accuracy" not in known or name not in ("accuracy", "precision")]


def mean(qualities: Sequence[Quality]) -> Quality:
    """Metric by metric."""
    return _by_metric(qualities, fmean)


def spread(qualities: Sequence[Quality]) -> Quality:
    """The standard deviation between seeds (n - 1), metric by metric; NaN for one seed."""
    return _by_metric(
        qualities, lambda values: torch.tensor(values).double().std().item() if len(values) > 1 else math.nan
    )


class Judge:
    """Compares samples with the features of real data. Clips longer than the real ones are judged by their windows.

    reference: the split that is compared with; where there is one that no training sees, that. At most 10,000 of its
    items are used. Their features are kept in ``cache``, by the hash of the data and the extractor.
    num_frames: of the real items. accuracy: the extractor's own, on the reference; None without classes.

    Raises UserError if the reference holds too few items for the extractor.
    """

    def __init__(self, extractor: Extractor, reference: LabelledClips, cache: Path, device: torch.device | str = "cpu"):
        self.extractor, self.classes, self.device = extractor, reference.classes, device
        self.num_frames = reference.shape[0]
        self._physics = reference.motion if isinstance(reference, MovingClips) else None
        self._num_motions = num_motions(reference.classes) if self._physics else None
        ids = chosen_ids(len(reference), MAX_REFERENCE)
        self.reference_id = data_hash(reference, ids)[:16]
        self.features, self._labels = reference_features(reference, ids, extractor, cache, device)
        self.gaussian = Gaussian.of(self.features)
        self.accuracy = self._accuracies(self.features, self._labels)["accuracy"]

    def check(self, num_samples: int, place: str) -> None:
        """Raises UserError, naming ``place``, unless so many samples can be judged."""
        fewest = self.extractor.num_features + 1
        if num_samples < fewest:
            raise UserError(
                f"{place} = {num_samples}: the Frechet distance on {fewest - 1} features needs more samples than that; "
                f"write {fewest} or more (some thousands for a figure to trust)"
            )

    def __call__(self, pixels: PixelValues, labels: Int64[Tensor, "b"]) -> Quality:
        """Judges samples as 8-bit pictures, as the real data are.

        Raises UserError for too few samples, and for clips shorter than the real ones.
        """
        pixels, labels = as_windows(pixels, labels, self.num_frames)
        features = features_of(self.extractor, to_uint8(pixels), self.device)
        quality = self._compare(features, labels, self.gaussian, self.features, self._motion_error(pixels, labels))
        if torch.isfinite(pixels).all():
            return quality
        return quality.model_copy(update=dict.fromkeys(quality.model_dump(exclude_none=True), math.nan))

    def real(self, dataset: LabelledClips, num_samples: int) -> Quality:
        """Real data against real data: what a perfect model would reach with so many samples.

        ``dataset`` should be another split than the reference; where it is the same, one half of it is judged by the
        other.
        """
        ids = chosen_ids(len(dataset), MAX_REFERENCE)
        if data_hash(dataset, ids)[:16] == self.reference_id:
            judged, kept = permutation(0, "halves", len(ids)).chunk(2)
            judged, rest = judged[:num_samples], self.features[kept]
            motion_error = self._motion_error(as_values(dataset.items(ids[judged]).pixels), self._labels[judged])
            return self._compare(self.features[judged], self._labels[judged], Gaussian.of(rest), rest, motion_error)
        items = dataset.items(chosen_ids(len(dataset), num_samples))
        return self(as_values(items.pixels), items.label)

    def _compare(
        self,
        features: Features,
        labels: Int64[Tensor, "b"],
        gaussian: Gaussian,
        reference: Float[Tensor, "m d"],
        motion_error: float | None,
    ) -> Quality:
        """Precision, recall and coverage compare with as many real items as there are samples, where there are."""
        frechet = frechet_distance(Gaussian.of(features), gaussian)
        shares = neighbourhood(features, reference[chosen_ids(len(reference), len(features))])
        accuracies = self._accuracies(features, labels)
        return Quality(frechet=frechet, **accuracies, **shares._asdict(), motion_error=motion_error)

    def _accuracies(self, features: Features, labels: Int64[Tensor, "b"]) -> dict[str, float | None]:
        logits = self.extractor.logits(features)
        if logits is None:
            return {"accuracy": None}
        seen, asked = logits.argmax(1).cpu(), labels.cpu()
        pairs = {"accuracy": (seen, asked)}
        if (n := self._num_motions) is not None:
            pairs |= {"item_accuracy": (seen // n, asked // n), "motion_accuracy": (seen % n, asked % n)}
        return {name: (one == other).double().mean().item() for name, (one, other) in pairs.items()}

    def _motion_error(self, pixels: PixelValues, labels: Int64[Tensor, "b"]) -> float | None:
        if self._physics is None or self._num_motions is None or pixels.shape[1] < 3:
            return None
        return motion_errors(pixels, labels.cpu() % self._num_motions, self._physics).mean().item()


def reference_features(
    dataset: LabelledClips, ids: Int64[Tensor, "n"], extractor: Extractor, cache: Path, device: torch.device | str
) -> tuple[Features, Int64[Tensor, "n"]]:
    """Features and labels of the items ``ids``, from the cache where they are there."""

    def make() -> dict[str, Tensor]:
        items = dataset.items(ids)
        return {"features": features_of(extractor, items.pixels, device), "label": items.label}

    extractor_id = "".join(character if character.isalnum() else "-" for character in extractor.id)
    tensors = cached(cache, f"features-{extractor_id}-{data_hash(dataset, ids)[:32]}", make)
    return tensors["features"].to(device), tensors["label"]


def features_of(extractor: Extractor, pixels: Tensor, device: torch.device | str) -> Features:
    """Of pixels 0 to 255, in batches."""
    chunks = watched("looking at samples", pixels.split(_BATCH))
    return torch.cat([extractor.features(as_values(chunk.to(device))) for chunk in chunks])


def chosen_ids(num: int, most: int) -> Int64[Tensor, "n"]:
    """At most ``most`` of the ids 0, ..., num - 1: always the same random choice, in ascending order."""
    return permutation(0, "chosen items", num)[:most].sort().values


def _by_metric(qualities: Sequence[Quality], reduce: Callable[[list[float]], float]) -> Quality:
    columns = {name: [getattr(quality, name) for quality in qualities] for name in METRICS}
    return Quality.model_validate(
        {name: None if None in values else reduce(values) for name, values in columns.items()}
    )

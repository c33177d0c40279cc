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
from fewstep.evaluate.api import Extractor, Features, LabelledImages, PixelValues
from fewstep.evaluate.cache import cached, data_hash
from fewstep.evaluate.classifier import as_values
from fewstep.evaluate.picture import to_uint8
from fewstep.evaluate.quality import Gaussian, frechet_distance, neighbourhood
from fewstep.rng import permutation

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


METRICS = tuple(Quality.model_fields)


def mean(qualities: Sequence[Quality]) -> Quality:
    """Metric by metric."""
    return _by_metric(qualities, fmean)


def spread(qualities: Sequence[Quality]) -> Quality:
    """The standard deviation between seeds (n - 1), metric by metric; NaN for one seed."""
    return _by_metric(
        qualities, lambda values: torch.tensor(values).double().std().item() if len(values) > 1 else math.nan
    )


class Judge:
    """Compares samples with the features of real data.

    reference: the split that is compared with; where there is one that no training sees, that. At most 10,000 of its
    items are used. Their features are kept in ``cache``, by the hash of the data and the extractor.
    accuracy: the extractor's own, on that data; None without classes.

    Raises UserError if the reference holds too few items for the extractor.
    """

    def __init__(
        self, extractor: Extractor, reference: LabelledImages, cache: Path, device: torch.device | str = "cpu"
    ):
        self.extractor, self.classes, self.device = extractor, reference.classes, device
        ids = chosen_ids(len(reference), MAX_REFERENCE)
        self.reference_id = data_hash(reference, ids)[:16]
        self.features, self._labels = reference_features(reference, ids, extractor, cache, device)
        self.gaussian = Gaussian.of(self.features)
        self.accuracy = self._accuracy(self.features, self._labels)

    def check(self, num_samples: int, place: str) -> None:
        """Raises UserError, naming ``place``, unless so many samples can be judged."""
        fewest = self.extractor.num_features + 1
        if num_samples < fewest:
            raise UserError(
                f"{place} = {num_samples}: the Frechet distance on {fewest - 1} features needs more samples than that; "
                f"write {fewest} or more (some thousands for a figure to trust)"
            )

    def __call__(self, pixels: PixelValues, labels: Int64[Tensor, "b"]) -> Quality:
        """Judges samples as 8-bit pictures, as the real data are. Raises UserError for too few samples."""
        if not torch.isfinite(pixels).all():
            accuracy = None if self.accuracy is None else math.nan
            return Quality(frechet=math.nan, accuracy=accuracy, precision=math.nan, recall=math.nan, coverage=math.nan)
        features = features_of(self.extractor, to_uint8(pixels), self.device)
        return self._compare(features, labels, self.gaussian, self.features)

    def real(self, dataset: LabelledImages, num_samples: int) -> Quality:
        """Real data against real data: what a perfect model would reach with so many samples.

        ``dataset`` should be another split than the reference; where it is the same, one half of it is judged by the
        other.
        """
        ids = chosen_ids(len(dataset), MAX_REFERENCE)
        if data_hash(dataset, ids)[:16] == self.reference_id:
            judged, kept = permutation(0, "halves", len(ids)).chunk(2)
            judged, rest = judged[:num_samples], self.features[kept]
            return self._compare(self.features[judged], self._labels[judged], Gaussian.of(rest), rest)
        items = dataset.items(chosen_ids(len(dataset), num_samples))
        return self(as_values(items.pixels), items.label)

    def _compare(
        self, features: Features, labels: Int64[Tensor, "b"], gaussian: Gaussian, reference: Float[Tensor, "m d"]
    ) -> Quality:
        """Precision, recall and coverage compare with as many real items as there are samples, where there are."""
        frechet = frechet_distance(Gaussian.of(features), gaussian)
        shares = neighbourhood(features, reference[chosen_ids(len(reference), len(features))])
        return Quality(frechet=frechet, accuracy=self._accuracy(features, labels), **shares._asdict())

    def _accuracy(self, features: Features, labels: Int64[Tensor, "b"]) -> float | None:
        logits = self.extractor.logits(features)
        return None if logits is None else (logits.argmax(1).cpu() == labels.cpu()).double().mean().item()


def reference_features(
    dataset: LabelledImages, ids: Int64[Tensor, "n"], extractor: Extractor, cache: Path, device: torch.device | str
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
    return torch.cat([extractor.features(as_values(chunk.to(device))) for chunk in pixels.split(_BATCH)])


def chosen_ids(num: int, most: int) -> Int64[Tensor, "n"]:
    """At most ``most`` of the ids 0, ..., num - 1: always the same random choice, in ascending order."""
    return permutation(0, "chosen items", num)[:most].sort().values


def _by_metric(qualities: Sequence[Quality], reduce: Callable[[list[float]], float]) -> Quality:
    columns = {name: [getattr(quality, name) for quality in qualities] for name in METRICS}
    return Quality.model_validate(
        {name: None if None in values else reduce(values) for name, values in columns.items()}
    )

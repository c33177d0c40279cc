"""How far samples are from real data, from features alone: tensors in, numbers out.

Frechet distance: Heusel et al. 2017 (arXiv:1706.08500). Precision and recall: Kynkaanniemi et al. 2019
(arXiv:1904.06991). Coverage: Naeem et al. 2020 (arXiv:2002.09797).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fewstep.errors import UserError

_ELEMENTS = 2**22
"""Distances that are held at once."""

Points = Float[Tensor, "n d"]
Matrix = Float[Tensor, "d d"]


@dataclass(frozen=True)
class Gaussian:
    """The mean [d] and the covariance [d d] of a set of features, in float64."""

    mean: Float[Tensor, "d"]
    covariance: Matrix

    @classmethod
    def of(cls, features: Points) -> Gaussian:
        """The covariance is the unbiased one (divided by n - 1).

        Raises UserError unless there are more features than they are wide: fewer span no full covariance, and the
        distance would measure how few they are.
        """
        num, width = features.shape
        if num <= width:
            raise UserError(
                f"{num} samples are too few for the Frechet distance on {width} features: take at least {width + 1}, "
                "and some thousands for a figure to trust"
            )
        wide = features.double()
        return cls(wide.mean(0), wide.T.cov(correction=1).reshape(width, width))

    @cached_property
    def root(self) -> Matrix:
        """The symmetric square root of the covariance."""
        values, vectors = torch.linalg.eigh(self.covariance)
        return (vectors * _roots(values)) @ vectors.T


def frechet_distance(a: Gaussian, b: Gaussian) -> float:
    """The squared 2-Wasserstein distance of two Gaussians: |m_a - m_b|^2 + tr(C_a + C_b - 2 (C_a C_b)^(1/2)); >= 0.

    The trace of the root is that of (C_a^(1/2) C_b C_a^(1/2))^(1/2), which is symmetric: no complex numbers arise, and
    singular covariances do no harm.
    """
    product = a.root @ b.covariance @ a.root
    cross = _roots(torch.linalg.eigvalsh((product + product.T) / 2)).sum()
    spread = a.covariance.trace() + b.covariance.trace() - 2 * cross
    return max(0.0, float((a.mean - b.mean).square().sum() + spread))


def _roots(eigenvalues: Float[Tensor, "d"]) -> Float[Tensor, "d"]:
    """Square roots of the eigenvalues of a positive matrix; what is zero but for rounding counts as zero."""
    rounding = eigenvalues.abs().max() * len(eigenvalues) * torch.finfo(eigenvalues.dtype).eps
    return torch.where(eigenvalues > rounding, eigenvalues, 0).sqrt()


class Neighbourhood(NamedTuple):
    """Shares from 0 to 1. precision: of the samples that lie among real data. recall: of the real data that lie among
    samples. coverage: of the real data that have a sample near them."""

    precision: float
    recall: float
    coverage: float


def neighbourhood(samples: Points, real: Float[Tensor, "m d"], k: int = 3, coverage_k: int = 5) -> Neighbourhood:
    """Fidelity and diversity by nearest neighbours. A point lies among a set if it is in a ball around one of the set's
    points that reaches that point's k-th nearest fellow.

    precision and recall take ``k``; coverage asks which balls around real points, to the ``coverage_k``-th fellow, hold
    a sample. The values depend on how many points there are: compare equal numbers. Raises UserError where a set has no
    more than ``max(k, coverage_k)`` points.
    """
    fewest = min(len(samples), len(real))
    if fewest <= max(k, coverage_k):
        raise UserError(f"precision, recall and coverage need at least {max(k, coverage_k) + 1} samples, not {fewest}")
    samples, real = samples.double(), real.double()
    sample_radius, (real_radius, coverage_radius) = _radii(samples, k)[0], _radii(real, k, coverage_k)
    precise = torch.zeros(len(samples), dtype=torch.bool, device=samples.device)
    recalled = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    nearest = torch.full((len(real),), torch.inf, dtype=torch.float64, device=real.device)
    for rows in _chunks(len(samples), len(real), samples.device):
        distance = torch.cdist(samples[rows], real)
        precise[rows] = (distance <= real_radius).any(1)
        recalled |= (distance <= sample_radius[rows, None]).any(0)
        nearest = torch.minimum(nearest, distance.amin(0))
    covered = nearest <= coverage_radius
    return Neighbourhood(*(share.double().mean().item() for share in (precise, recalled, covered)))


def _radii(points: Points, *ks: int) -> tuple[Float[Tensor, "n"], ...]:
    """Every point's distance to its k-th nearest other point, for each k."""
    found = []
    for rows in _chunks(len(points), len(points), points.device):
        ascending = torch.cdist(points[rows], points).topk(max(ks) + 1, dim=1, largest=False).values
        found.append(ascending[:, list(ks)])
    return tuple(torch.cat(found).unbind(1))


def _chunks(num_rows: int, num_columns: int, device: torch.device) -> tuple[Tensor, ...]:
    return torch.arange(num_rows, device=device).split(max(1, _ELEMENTS // num_columns))

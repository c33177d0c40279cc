"""Distances between sets of features, against closed forms, scipy and counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm
from torch import Tensor

from fewstep.errors import UserError
from fewstep.evaluate import quality
from fewstep.evaluate.quality import Gaussian, frechet_distance, neighbourhood


def gaussian(width: int, seed: int, rank: int | None = None) -> Gaussian:
    rng = torch.Generator().manual_seed(seed)
    factor = torch.randn(width, rank or width, generator=rng, dtype=torch.float64)
    return Gaussian(torch.randn(width, generator=rng, dtype=torch.float64), factor @ factor.T)


def points(num: int, width: int, seed: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(num, width, generator=rng) @ torch.randn(width, width, generator=rng) * scale + offset


def oracle(a: Gaussian, b: Gaussian) -> float:
    root = sqrtm(a.covariance.numpy() @ b.covariance.numpy()).real
    gap = (a.mean - b.mean).numpy()
    return float(gap @ gap + np.trace(a.covariance.numpy() + b.covariance.numpy() - 2 * root))


def test_the_distance_of_diagonal_gaussians_is_the_closed_form():
    a_var, b_var = torch.tensor([4.0, 0.25, 9.0]).double(), torch.tensor([1.0, 0.25, 16.0]).double()
    a, b = Gaussian(torch.tensor([1.0, 0, -2]).double(), a_var.diag()), Gaussian(torch.zeros(3).double(), b_var.diag())
    expected = (1 + 4) + ((2 - 1) ** 2 + 0 + (3 - 4) ** 2)
    assert frechet_distance(a, b) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("width", [1, 3, 17])
def test_the_distance_of_full_gaussians_is_that_of_scipy(width: int):
    a, b = gaussian(width, 1), gaussian(width, 2)
    assert frechet_distance(a, b) == pytest.approx(oracle(a, b), rel=1e-9)


def test_features_give_the_mean_and_covariance_of_numpy():
    features = points(40, 7, 3, offset=2.0)
    found = Gaussian.of(features)
    np.testing.assert_allclose(found.mean, features.double().numpy().mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.covariance, np.cov(features.double().numpy(), rowvar=False), rtol=1e-12)
    assert Gaussian.of(points(5, 1, 4)).covariance.shape == (1, 1)


def test_a_set_has_no_distance_to_itself():
    found = Gaussian.of(points(90, 33, 6, offset=50.0))
    assert 0 <= frechet_distance(found, found) < 1e-10 * found.covariance.trace()


def test_dead_features_do_no_harm():
    """Covariances of rank 4 in 9 dimensions; rounding must not leak through the square root of zero eigenvalues."""
    a = gaussian(9, 7, rank=4)
    assert 0 <= frechet_distance(a, a) < 1e-12 * a.covariance.trace()
    scaled = Gaussian(a.mean, 9 * a.covariance)
    assert frechet_distance(a, scaled) == pytest.approx(4 * a.covariance.trace().item(), rel=1e-12)


def test_constant_features_are_compared_by_their_means_alone():
    still = Gaussian.of(torch.full((8, 3), 2.0))
    assert frechet_distance(still, Gaussian.of(torch.full((9, 3), 4.0))) == pytest.approx(12.0)


def test_the_distance_is_symmetric_and_does_not_see_rotations_or_common_moves():
    a, b = points(60, 11, 8), points(70, 11, 9, scale=1.5, offset=0.3)
    rotation = torch.linalg.qr(torch.randn(11, 11, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    expected = frechet_distance(Gaussian.of(a), Gaussian.of(b))
    assert frechet_distance(Gaussian.of(b), Gaussian.of(a)) == pytest.approx(expected, rel=1e-10)
    turned = [Gaussian.of(x.double() @ rotation + 7) for x in (a, b)]
    assert frechet_distance(*turned) == pytest.approx(expected, rel=1e-10)
    assert frechet_distance(*(Gaussian.of(3 * x) for x in (a, b))) == pytest.approx(9 * expected, rel=1e-5)


def test_as_many_samples_as_features_are_too_few():
    with pytest.raises(UserError, match=r"5 samples are too few.*5 features.*at least 6"):
        Gaussian.of(torch.randn(5, 5))
    Gaussian.of(torch.randn(6, 5))


def counted(samples: np.ndarray, real: np.ndarray, k: int, coverage_k: int) -> tuple[float, float, float]:
    """The definitions, point by point."""

    def radius(of: np.ndarray, i: int, k: int) -> float:
        return sorted(np.linalg.norm(of[i] - other) for j, other in enumerate(of) if j != i)[k - 1]

    def among(point: np.ndarray, of: np.ndarray) -> bool:
        return any(np.linalg.norm(point - of[i]) <= radius(of, i, k) for i in range(len(of)))

    covered = [min(np.linalg.norm(s - r) for s in samples) <= radius(real, i, coverage_k) for i, r in enumerate(real)]
    return (
        float(np.mean([among(s, real) for s in samples])),
        float(np.mean([among(r, samples) for r in real])),
        float(np.mean(covered)),
    )


@pytest.mark.parametrize("elements", [1, 50, 2**22])
def test_the_shares_are_those_counted_point_by_point_whatever_the_chunks(elements: int, monkeypatch):
    monkeypatch.setattr(quality, "_ELEMENTS", elements)
    samples, real = points(13, 3, 1, scale=0.6, offset=0.4), points(17, 3, 2)
    for k, coverage_k in ((1, 2), (3, 5), (5, 3)):
        expected = counted(samples.double().numpy(), real.double().numpy(), k, coverage_k)
        assert neighbourhood(samples, real, k, coverage_k) == pytest.approx(expected)
        assert any(0 < share < 1 for share in expected)


def test_equal_sets_share_everything_and_distant_ones_nothing():
    real = points(20, 4, 3)
    assert neighbourhood(real, real) == (1, 1, 1)
    assert neighbourhood(real + 1000, real) == (0, 0, 0)


def test_samples_of_one_mode_out_of_two_are_precise_but_recall_half():
    near, far = points(24, 3, 4, scale=0.1), points(24, 3, 5, scale=0.1, offset=500.0)
    precision, recall, coverage = neighbourhood(near[:12].repeat(2, 1) + 1e-4, torch.cat([near, far]))
    assert precision == 1.0
    assert 0.25 < recall <= 0.5
    assert 0.4 < coverage <= 0.5


def test_one_outlier_with_a_wide_ball_deceives_precision_but_not_coverage():
    """Why coverage is there (arXiv:2002.09797): samples beside the data count as precise if an outlier's ball reaches
    them."""
    real = torch.cat([points(20, 2, 6, scale=0.1), torch.tensor([[100.0, 0.0]])])
    samples = torch.tensor([[50.0, 1.0]]).repeat(8, 1) + points(8, 2, 7, scale=0.01)
    precision, _, coverage = neighbourhood(samples, real)
    assert precision == 1.0
    assert coverage == pytest.approx(1 / 21)


def test_too_few_points_for_the_neighbours_are_refused():
    with pytest.raises(UserError, match="at least 6 samples, not 5"):
        neighbourhood(torch.randn(5, 2), torch.randn(9, 2))
    neighbourhood(torch.randn(6, 2), torch.randn(9, 2))

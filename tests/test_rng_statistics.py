"""The statistics of stateless randomness. The draws are fixed, so a bound holds always or never; bounds stand at five
standard deviations or at a probability of 1e-4."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from fewstep.rng import Draw, permutation


def draw(rows: int | list[int] = 3, seed: int = 0, phase: str = "student", iteration: int = 0) -> Draw:
    key = torch.arange(rows) if isinstance(rows, int) else torch.tensor(rows, dtype=torch.int64)
    return Draw(seed, phase, iteration, key)


def assert_standard_normal(values: np.ndarray) -> None:
    """Moments up to the fourth, each against its standard error, and Kolmogorov-Smirnov."""
    n = values.size
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = (np.mean(values**power) - moment) / math.sqrt(variance / n)
        assert abs(error) < 5, f"moment {power} is {error:.1f} standard errors off"
    assert stats.kstest(values, "norm").pvalue > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_values_are_standard_normal(dtype: torch.dtype):
    values = draw(64, seed=2).normal("noise", (1, 3, 31, 33), dtype).double()
    assert_standard_normal(values.flatten().numpy())
    for place in range(5):  # one element over many rows: of both halves, and of an odd number
        assert_standard_normal(draw(20000, seed=3).normal("noise", (5,), dtype)[:, place].double().numpy())


def test_uniform_values_are_uniform():
    values = draw(64, seed=4).uniform("sigma", (4096,), torch.float64).numpy()
    assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-4
    for column in range(8):  # one level a sample, as training draws them
        sigma = draw(5000, seed=column).uniform("sigma").numpy()
        assert stats.kstest(sigma, "uniform").pvalue > 1e-4
    counts = np.bincount((values.ravel() * 256).astype(int), minlength=256)
    assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4


def test_every_bit_of_a_uniform_value_is_fair_and_independent_of_the_others():
    scaled = (draw(64, seed=6).uniform("u", (2048,), torch.float64) * 2**53).long().flatten().numpy()
    bits = ((scaled[:, None] >> np.arange(53)) & 1) * 2.0 - 1
    assert_uncorrelated(bits.T)
    assert np.abs(bits.mean(0)).max() * math.sqrt(len(bits)) < 5


def assert_uncorrelated(streams: np.ndarray) -> None:
    """No pair of the streams is correlated, and all pairs together are as scattered as chance has it."""
    count, n = streams.shape
    scores = np.corrcoef(streams)[np.triu_indices(count, 1)] * math.sqrt(n)
    assert np.abs(scores).max() < 5
    assert 1e-4 < stats.chi2.cdf(np.sum(scores**2), len(scores)) < 1 - 1e-4


N = 1 << 14
FAMILIES = {
    "rows": lambda i: draw([i]).normal("noise", (N,)),
    "distant rows": lambda i: draw([2**i]).normal("noise", (N,)),
    "iterations": lambda i: draw(1, iteration=i).normal("noise", (N,)),
    "seeds": lambda i: draw(1, seed=i).normal("noise", (N,)),
    "names": lambda i: draw(1).normal(f"renoise.{i}", (N,)),
    "phases": lambda i: draw(1, phase=f"critic.{i}").normal("noise", (N,)),
    "places": lambda i: draw(N).normal("noise", (40,))[:, i][None],
    "types of draw": lambda i: draw([i // 2]).uniform("x", (N,)) if i % 2 else draw([i // 2]).normal("x", (N,)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbouring_streams_are_uncorrelated(family: str):
    """40 neighbours, as they are, squared and folded: no pair stands out, nor do all together."""
    streams = torch.cat([FAMILIES[family](i) for i in range(40)]).double().numpy()
    assert_uncorrelated(streams)
    assert_uncorrelated(streams**2)
    assert_uncorrelated(np.abs(streams - streams.mean(1, keepdims=True)))


@pytest.mark.parametrize("other", [0, 1, 2, 1000])
def test_no_row_is_a_shifted_copy_of_another_or_of_itself(other: int):
    """Correlation at every lag, so that rows which run through the same counters from different places are found."""
    here = draw([0]).normal("noise", (1 << 16,)).double().numpy()[0]
    there = draw([other]).normal("noise", (1 << 16,)).double().numpy()[0]
    lags = np.fft.irfft(np.fft.rfft(here) * np.conj(np.fft.rfft(there)))
    scores = lags[1:] / math.sqrt(here.size)
    assert np.abs(scores).max() < 6
    assert np.std(scores) == pytest.approx(1, abs=0.05)


def test_the_two_values_of_a_pair_are_jointly_normal():
    """Radius and angle of the pair that one word makes: exponential, uniform, independent."""
    values = draw(32, seed=8).normal("noise", (8192,), torch.float64).numpy()
    cosine, sine = values[:, :4096].ravel(), values[:, 4096:].ravel()
    radius, angle = np.exp(-(cosine**2 + sine**2) / 2), np.arctan2(sine, cosine) / (2 * math.pi) + 0.5
    assert stats.kstest(radius, "uniform").pvalue > 1e-4
    assert stats.kstest(angle, "uniform").pvalue > 1e-4
    cells = np.histogram2d(radius, angle, bins=16, range=[[0, 1], [0, 1]])[0]
    assert 1e-4 < stats.chisquare(cells.ravel()).pvalue < 1 - 1e-4


def test_no_value_is_repeated_beyond_chance():
    """Birthdays: none among two million of 53 bits; among 2^17 of 24 bits as many as independent draws have."""
    wide = np.concatenate(
        [
            draw(64, seed=s, iteration=i).uniform("u", (1 << 13,), torch.float64).numpy().ravel()
            for s in (0, 1)
            for i in (0, 1)
        ]
    )
    assert len(np.unique(wide)) == wide.size == 1 << 21
    n = 1 << 17
    repeated = n - len(np.unique(draw(64, seed=9).uniform("u", (n // 64,)).numpy()))
    expected = n**2 / 2 / 2**24
    assert abs(repeated - expected) < 5 * math.sqrt(expected)


def test_the_tail_holds_as_many_values_as_it_should_and_ends_below_7():
    values = torch.cat([draw(64, iteration=i).normal("noise", (1 << 14,)).flatten() for i in range(4)]).abs()
    for bound in (2.0, 3.0, 4.0, 4.5):
        expected = values.numel() * 2 * stats.norm.sf(bound)
        assert abs((values > bound).sum().item() - expected) < 5 * math.sqrt(expected)
    assert 4.6 < values.max().item() < 6.7


def test_shared_draws_are_uniform_over_iterations():
    """The stops of 1500 iterations: every index alike, no memory from one iteration to the next."""
    numbers = np.array([draw(1, iteration=i).shared_uniform("stop") for i in range(1500)])
    assert stats.kstest(numbers, "uniform").pvalue > 1e-4
    stops = np.array([draw(1, iteration=i).shared_index("stop", 4) for i in range(1500)])
    assert 1e-4 < stats.chisquare(np.bincount(stops, minlength=4)).pvalue < 1 - 1e-4
    pairs = np.bincount(stops[:-1] * 4 + stops[1:], minlength=16)
    assert 1e-4 < stats.chisquare(pairs).pvalue < 1 - 1e-4


def test_every_order_is_as_likely_as_any_other():
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(1200):
        order = tuple(permutation(0, f"epoch.{epoch}", 4).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert 1e-4 < stats.chisquare(list(counts.values())).pvalue < 1 - 1e-4

"""Shift, grids, ladders, and every density against its distribution function."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from scipy import stats
from scipy.special import logit

from fewstep.errors import UserError
from fewstep.flow.sigmas import Grid, LogitNormal, Shifted, SigmaDensity, Uniform, grid, ladder, shift

SHIFTS = st.floats(0.05, 50)
LEVELS = st.floats(0, 1)


def parse(section: dict):
    """The density that a recipe's section names."""
    return TypeAdapter(SigmaDensity).validate_python(section)


# The shift


@given(u=LEVELS, s=SHIFTS)
def test_the_shift_is_its_formula_on_numbers_and_on_tensors(u: float, s: float):
    exact = float(Fraction(s) * Fraction(u) / (1 + (Fraction(s) - 1) * Fraction(u)))
    assert shift(u, s) == pytest.approx(exact, rel=1e-15, abs=1e-300)
    assert shift(torch.tensor([u], dtype=torch.float64), s).item() == shift(u, s)


@given(u=LEVELS, s=SHIFTS)
def test_the_shift_keeps_both_ends_and_is_undone_by_its_inverse(u: float, s: float):
    assert shift(0.0, s) == 0
    assert shift(1.0, s) == 1
    assert shift(u, 1.0) == u
    assert 0 <= shift(u, s) <= 1
    assert shift(shift(u, s), 1 / s) == pytest.approx(u, rel=1e-12, abs=1e-300)


@given(u=LEVELS, first=SHIFTS, second=SHIFTS)
def test_two_shifts_are_one_shift_by_their_product(u: float, first: float, second: float):
    assert shift(shift(u, first), second) == pytest.approx(shift(u, first * second), rel=1e-12, abs=1e-300)


def test_a_float32_tensor_is_shifted_in_float64_and_rounded_once():
    u = torch.rand(1000)
    assert torch.equal(shift(u, 7.3), shift(u.double(), 7.3).float())


# Grids and ladders


def test_the_four_step_ladder_is_every_twelfth_node_of_the_48_grid():
    """Invariant 1, to the last bit."""
    nodes = grid(48, 5.0)
    assert ladder(4, 5.0) == tuple(nodes[i] for i in (0, 12, 24, 36))


@given(steps=st.integers(1, 16), factor=st.integers(1, 40), s=SHIFTS)
def test_a_ladder_is_contained_in_every_grid_of_a_multiple_of_its_steps(steps: int, factor: int, s: float):
    """Invariant 1 for every ladder and shift."""
    assert ladder(steps, s) == grid(steps * factor, s)[::factor]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(1, [1.0]), (2, [1.0, 5 / 6]), (3, [1.0, 10 / 11, 5 / 7]), (4, [1.0, 0.9375, 5 / 6, 0.625])],
)
def test_the_ladders_at_shift_5(steps: int, expected: list[float]):
    assert ladder(steps, 5.0) == pytest.approx(expected, rel=1e-15)


@given(num_nodes=st.integers(1, 1000), s=SHIFTS)
def test_a_grid_falls_strictly_from_1_to_its_last_node(num_nodes: int, s: float):
    """Invariant 2, in float64 and after rounding to float32, the last node to one ulp of float32."""
    nodes = np.array(grid(num_nodes, s))
    assert len(nodes) == num_nodes
    assert nodes[0] == 1
    assert (np.diff(nodes) < 0).all()
    assert (np.diff(nodes.astype(np.float32)) < 0).all()
    last = np.float32(s / (num_nodes + s - 1))
    assert abs(np.float32(nodes[-1]) - last) <= np.spacing(last)


def test_a_grid_is_the_shifted_linspace():
    u = np.linspace(1, 0, 51)[:-1]
    np.testing.assert_allclose(grid(50, 3.0), 3 * u / (1 + 2 * u), rtol=1e-14)


@pytest.mark.parametrize(("steps", "s", "named"), [(0, 5.0, "0 nodes"), (4, 0.0, "shift 0.0"), (4, -1.0, "shift -1.0")])
def test_an_impossible_grid_is_refused_with_its_value(steps: int, s: float, named: str):
    for make in (grid, ladder):
        with pytest.raises(UserError, match=named):
            make(steps, s)


# Densities

DENSITIES = [
    Uniform(),
    Uniform(low=0.02, high=0.98),
    LogitNormal(),
    LogitNormal(mean=-0.7, std=1.8, shift=3.0),
    Shifted(shift=5.0, bounds="clamped"),
    Shifted(shift=5.0, bounds="index"),
    Shifted(shift=1.0, low=0.1, high=0.5, bounds="index"),
    Grid(nodes=48, shift=5.0),
    Grid(nodes=7, shift=1.0, low=0.2, high=0.8),
]
CONTINUOUS = [d for d in DENSITIES if not isinstance(d, Grid) and getattr(d, "bounds", "") != "clamped"]
NAME = str


def distribution(density, sigma: np.ndarray) -> np.ndarray:
    """The share of the density at or below sigma, of the continuous ones, written out with scipy."""
    if isinstance(density, Uniform):
        return stats.uniform.cdf(sigma, density.low, density.high - density.low)
    u = sigma / (density.shift - (density.shift - 1) * sigma)
    if isinstance(density, LogitNormal):
        return stats.norm.cdf(logit(u), density.mean, density.std)
    return stats.uniform.cdf(u, density.low, density.high - density.low)


@pytest.mark.parametrize("density", CONTINUOUS, ids=NAME)
def test_a_density_is_the_inverse_of_its_distribution_function(density):
    u = torch.linspace(0.001, 0.999, 999, dtype=torch.float64)
    sigma = density.sigma(u).double().numpy()
    np.testing.assert_allclose(distribution(density, sigma), u.numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("density", CONTINUOUS, ids=NAME)
def test_levels_of_random_draws_follow_the_density(density):
    """Kolmogorov-Smirnov; a density with the wrong shift or bounds fails by orders of magnitude."""
    u = torch.from_numpy(np.random.default_rng(11).random(20000))
    levels = density.sigma(u).double().numpy()
    assert stats.kstest(levels, lambda sigma: distribution(density, sigma)).pvalue > 1e-3


def test_clamped_bounds_gather_what_lies_beyond_them():
    """The ends hold the mass of the shifted uniform density beyond them; between, it is untouched."""
    u = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:-1]
    sigma = Shifted(shift=5.0, low=0.1, high=0.9, bounds="clamped").sigma(u)
    low, high = torch.tensor(0.1).item(), torch.tensor(0.9).item()
    assert (sigma == low).double().mean().item() == pytest.approx(0.1 / (5 - 4 * 0.1), abs=2e-5)
    assert (sigma == high).double().mean().item() == pytest.approx(1 - 0.9 / (5 - 4 * 0.9), abs=2e-5)
    between = (sigma > low) & (sigma < high)
    assert torch.equal(sigma[between], shift(u, 5.0)[between].float())


def test_the_two_bounds_differ_as_their_sources_do():
    """Clamped ends at the bounds themselves; index at the shifted bounds."""
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    clamped = Shifted(shift=5.0, bounds="clamped").sigma(ends)
    index = Shifted(shift=5.0, bounds="index").sigma(ends)
    torch.testing.assert_close(clamped, torch.tensor([0.02, 0.98]), rtol=1e-7, atol=0)
    torch.testing.assert_close(index, torch.tensor([0.1 / 1.08, 4.9 / 4.92]), rtol=1e-7, atol=0)


@given(
    nodes=st.integers(1, 60),
    s=SHIFTS,
    low=st.floats(0, 0.5),
    high=st.floats(0.5, 1, exclude_min=True),
    copies=st.integers(1, 5),
)
def test_a_grid_density_takes_every_node_between_its_bounds_alike(
    nodes: int, s: float, low: float, high: float, copies: int
):
    inside = [node for node in grid(nodes, s) if low <= node <= high]
    if not inside:
        with pytest.raises(ValidationError, match="no node lies between low"):
            Grid(nodes=nodes, shift=s, low=low, high=high)
        return
    draws = len(inside) * copies
    u = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    levels = Grid(nodes=nodes, shift=s, low=low, high=high).sigma(u)
    expected = torch.tensor(inside, dtype=torch.float64).float()
    assert Counter(levels.tolist()) == dict.fromkeys(expected.tolist(), copies)


@pytest.mark.parametrize("density", DENSITIES, ids=NAME)
def test_a_level_rises_with_its_draw_and_never_leaves_0_to_1(density):
    """The draw 0 and the largest draws of float32 and of float64 included."""
    ends = torch.tensor([0.0, 1e-300, 2**-53, 2**-24, 1 - 2**-24, 1 - 2**-53], dtype=torch.float64)
    u = torch.cat([ends, torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]]).sort().values
    for sigma in (density.sigma(u), density.sigma(u.float().clamp_max(1 - 2**-24))):
        assert sigma.dtype == torch.float32
        assert not sigma.isnan().any()
        assert sigma.min() >= 0
        assert sigma.max() <= 1
        assert (sigma.diff() >= 0).all()


@given(mean=st.floats(-50, 50), std=st.floats(1e-3, 50), s=SHIFTS, u=st.floats(0, 1, exclude_max=True))
def test_an_extreme_logit_normal_stays_a_level(mean: float, std: float, s: float, u: float):
    sigma = LogitNormal(mean=mean, std=std, shift=s).sigma(torch.tensor([u], dtype=torch.float64)).item()
    assert 0 <= sigma <= 1


def test_a_level_depends_on_its_own_draw_alone():
    u = torch.rand(7)
    for density in DENSITIES:
        whole = density.sigma(u)
        assert torch.equal(torch.cat([density.sigma(part) for part in u.split(2)]), whole)


# Recipes


@pytest.mark.parametrize("density", DENSITIES, ids=NAME)
def test_a_recipe_names_a_density_and_gets_it_back(density):
    assert parse(density.model_dump()) == density
    assert next(iter(density.model_dump())) == "name"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "uniform", "low": 0.5, "high": 0.5}, "low 0.5 is not below high 0.5"),
        ({"name": "uniform", "low": 0.9, "high": 0.1}, "low 0.9 is not below high 0.1"),
        ({"name": "uniform", "low": -0.1}, "greater than or equal to 0"),
        ({"name": "uniform", "high": 1.5}, "less than or equal to 1"),
        ({"name": "uniform", "shift": 5.0}, "Extra inputs"),
        ({"name": "logit_normal", "std": 0.0}, "greater than 0"),
        ({"name": "logit_normal", "mean": float("inf")}, "finite number"),
        ({"name": "logit_normal", "shift": -1.0}, "greater than 0"),
        ({"name": "shifted", "shift": 5.0}, "bounds"),
        ({"name": "shifted", "bounds": "index"}, "shift"),
        ({"name": "shifted", "shift": 5.0, "bounds": "clipped"}, "'clamped' or 'index'"),
        ({"name": "shifted", "shift": 5.0, "bounds": "index", "low": 0.99}, "low 0.99 is not below high 0.98"),
        ({"name": "grid", "nodes": 0, "shift": 5.0}, "greater than or equal to 1"),
        ({"name": "grid", "nodes": 48, "shift": 5.0, "high": 0.05}, "48 nodes at shift 5.0 run from 0.09615 to 1"),
        ({"name": "beta"}, "'uniform', 'logit_normal', 'shifted', 'grid'"),
        ({"low": 0.1}, "discriminator"),
    ],
)
def test_a_density_that_cannot_be_is_refused_with_its_field(section: dict, message: str):
    with pytest.raises(ValidationError, match=message):
        parse(section)

"""Stateless randomness: an independent implementation, pinned values, purity, types and what is drawn once."""

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewstep.rng import Draw, _mix, generator, permutation

WORD = 2**64


def draw(rows: int | list[int] = 3, seed: int = 0, phase: str = "student", iteration: int = 0) -> Draw:
    key = torch.arange(rows) if isinstance(rows, int) else torch.tensor(rows, dtype=torch.int64)
    return Draw(seed, phase, iteration, key)


# An independent implementation, in Python's integers


def splitmix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def hashed(*parts) -> int:
    texts = [str(part).encode() for part in parts]
    joined = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "little", signed=True)


def words(kind: str, seed: int, phase: str, name: str, iteration: int, key: int, count: int) -> list[int]:
    place = splitmix((key ^ hashed(kind, seed, phase, name, iteration)) % WORD)
    return [splitmix((place + splitmix(i)) % WORD) for i in range(count)]


def signed32(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def box_muller(pairs: list[int]) -> list[float]:
    """The low half of a word makes the radius, the high half the angle; cosines come first."""
    radii = [math.sqrt(-2 * math.log(abs(signed32(word % 2**32) + 0.5) / 2**31)) for word in pairs]
    angles = [math.pi * signed32(word >> 32) / 2**31 for word in pairs]
    return [r * math.cos(a) for r, a in zip(radii, angles, strict=True)] + [
        r * math.sin(a) for r, a in zip(radii, angles, strict=True)
    ]


def test_mixing_gives_the_published_outputs_of_splitmix64():
    """The first outputs of the reference generator seeded with 0, whose state grows by the golden ratio of 2^64."""
    states = torch.tensor([1, 2, 3]) * (0x9E3779B97F4A7C15 - WORD)
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [word % WORD for word in _mix(states).tolist()] == published


@pytest.mark.parametrize("seed", [0, -3, 2**70])
def test_draws_equal_an_independent_implementation(seed: int):
    keys = [0, 1, 5, 2**40, -1]
    d = draw(keys, seed=seed, phase="rollout.3", iteration=12345)
    uniform, normal = d.uniform("sigma", (4,), torch.float64), d.normal("noise", (7,), torch.float64)
    for row, key in enumerate(keys):
        of_uniform = words("uniform", seed, "rollout.3", "sigma", 12345, key, 4)
        assert uniform[row].tolist() == [(word >> 11) / 2**53 for word in of_uniform]
        of_normal = words("normal", seed, "rollout.3", "noise", 12345, key, 4)
        assert normal[row].tolist() == pytest.approx(box_muller(of_normal)[:7], rel=1e-12, abs=1e-14)
    shared = hashed("shared", seed, "rollout.3", "stop", 12345)
    assert d.shared_uniform("stop") == ((shared >> 11) + 2**52) / 2**53
    assert d.shared_index("stop", 4) == (shared >> 62) + 2


def test_the_values_of_a_version_stay_for_ever():
    """Pinned: a run that is resumed by a later version goes on with the same noise."""
    d = draw([0, 1, 77], seed=1, phase="rollout.0", iteration=9)
    normal = d.normal("noise", (3,), torch.float64)
    uniform = d.uniform("sigma", dtype=torch.float64)
    torch.testing.assert_close(normal, torch.tensor(PINNED_NORMAL, dtype=torch.float64), rtol=0, atol=1e-13)
    assert uniform.tolist() == PINNED_UNIFORM
    assert (d.shared_uniform("stop"), d.shared_index("stop", 1000)) == PINNED_SHARED
    assert permutation(1, "epoch.0", 12).tolist() == PINNED_ORDER
    assert generator(1, "student").initial_seed() == PINNED_GENERATOR


PINNED_NORMAL = [
    [-0.19478099496752116, 0.7332245028995578, -0.9152133373084395],
    [0.5321330304525217, -0.2602605461800824, -1.5457868056986328],
    [-0.41784182248818863, 1.3300169346572566, 1.4238104546149053],
]
PINNED_UNIFORM = [0.19264207958286927, 0.2795202775428436, 0.991639779595199]
PINNED_SHARED = (0.9522507736343213, 952)
PINNED_ORDER = [1, 7, 5, 0, 3, 11, 8, 6, 10, 4, 2, 9]
PINNED_GENERATOR = 6415432853977599751


# Purity: a value depends on what names it, and on nothing else


@settings(max_examples=40)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9),
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    data=st.data(),
)
def test_a_row_does_not_depend_on_its_batch_mates(keys: list[int], shape: tuple[int, ...], data: st.DataObject):
    """PITFALLS 'ranks': any cut, any order, alone or in company, to the last bit."""
    index = data.draw(st.lists(st.integers(0, len(keys) - 1), min_size=1, max_size=12))
    d = draw(keys, iteration=4)
    torch.randn(data.draw(st.integers(0, 3)))
    for values in (Draw.normal, Draw.uniform):
        whole = values(d, "x", shape)
        assert whole.shape == (len(keys), *shape)
        assert torch.equal(values(d.rows(torch.tensor(index)), "x", shape), whole[index])
        assert torch.equal(torch.cat([values(d.rows(slice(i, i + 1)), "x", shape) for i in range(len(keys))]), whole)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_batch_equals_its_parts_whatever_the_number_of_threads(threads: int):
    """Vectorised loops and their remainders round alike."""
    d = draw(33, seed=5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = d.normal("noise", (3, 5, 31, 17))
    finally:
        torch.set_num_threads(before)
    for part in (slice(0, 1), slice(1, 8), slice(8, 33)):
        assert torch.equal(d.rows(part).normal("noise", (3, 5, 31, 17)), whole[part])


def test_drawing_does_not_touch_the_global_generator_nor_itself():
    state = torch.get_rng_state()
    d = draw()
    first = d.normal("noise", (5,))
    for other in (d.uniform, d.normal):
        other("another", (5,))
    torch.randn(2, generator=generator(0, "noise"))
    permutation(0, "noise", 5)
    assert torch.equal(d.normal("noise", (5,)), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_every_part_of_a_name_matters():
    """Also where the parts run into each other: 'a', 'bc' is not 'ab', 'c'."""
    reference = draw(4, 11, "a", 1)
    same_rows = [
        (reference, "bc"),
        (draw(4, 1, "a", 1), "bc"),
        (draw(4, 11, "ab", 1), "c"),
        (draw(4, 11, "a", 11), "bc"),
        (draw(4, 1, "a", 11), "bc"),
        (draw(4, 11, "a", 1), "b"),
        (draw(4, 11, "abc", 1), ""),
        (draw([4, 5, 6, 7], 11, "a", 1), "bc"),
    ]
    values = torch.cat([d.normal(name, (2,)).flatten() for d, name in same_rows])
    assert len(values.unique()) == len(values)
    shared = {d.shared_uniform(name) for d, name in same_rows}
    assert len(shared) == len(same_rows) - 1  # the last differs by its key alone


def test_what_ranks_share_leaves_the_key_out_and_needs_no_device():
    """Invariant 36 at its root: the stop is the same for every row on every rank, and no device is asked."""
    elsewhere = Draw(0, "student", 0, torch.empty(2, dtype=torch.int64, device="meta"))
    for other in (draw(1), draw([9, 4]), elsewhere):
        assert other.shared_uniform("stop") == draw().shared_uniform("stop")
        assert other.shared_index("stop", 4) == draw().shared_index("stop", 4)


def test_drawing_reads_nothing_back_from_the_device():
    """On the meta device any synchronisation would raise."""
    d = Draw(0, "student", 0, torch.empty(2, dtype=torch.int64, device="meta"))
    assert d.normal("noise", (3, 5)).shape == (2, 3, 5)
    assert d.uniform("sigma").device.type == "meta"


def test_shapes_without_axes_and_without_elements():
    assert draw().normal("x", ()).shape == (3,)
    assert draw().normal("x", (0, 4)).shape == (3, 0, 4)
    assert draw([]).normal("x", (2, 5)).shape == (0, 2, 5)
    assert draw([]).uniform("x").shape == (0,)


def test_an_index_of_no_choices_is_refused_by_name():
    with pytest.raises(ValueError, match="'stop' of 0 choices"):
        draw().shared_index("stop", 0)


# Types


def test_float64_is_the_same_draw_to_the_rounding_of_float32():
    d = draw(64)
    narrow, wide = d.normal("noise", (1000,)), d.normal("noise", (1000,), torch.float64)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(narrow.double(), wide, rtol=0, atol=5e-4)
    assert (narrow - wide).abs().median() < 1e-7
    narrow, wide = d.uniform("sigma", (1000,)), d.uniform("sigma", (1000,), torch.float64)
    assert torch.equal(narrow.double(), torch.floor(wide * 2**24) / 2**24)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_uniform_values_are_below_1_in_every_type_and_use_its_bits(dtype: torch.dtype):
    values = draw(16).uniform("u", (1 << 13,), dtype)
    digits = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}[dtype]
    assert values.dtype == dtype
    assert values.min() >= 0
    assert values.max() < 1
    scaled = values.double() * 2**digits
    assert torch.equal(scaled, scaled.round())
    assert (scaled % 2 == 1).double().mean().item() == pytest.approx(0.5, abs=0.01)


def test_bfloat16_noise_is_rounded_float32_noise():
    d = draw()
    assert torch.equal(d.normal("noise", (99,), torch.bfloat16), d.normal("noise", (99,)).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rarest_words_give_finite_values_and_the_widest_tail(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """The ends of both halves, which no test would meet by chance: the radius runs from 0 to 6.66."""
    halves = [0, 1, -1, 2**30, 2**31 - 1, -(2**31), -(2**31) + 1, -(2**30)]
    rare = [(low % 2**32) + (high % 2**32) * 2**32 for low in halves for high in halves]
    column = torch.tensor([[word - WORD if word >= 2**63 else word for word in rare]])
    monkeypatch.setattr(Draw, "_words", lambda self, kind, name, count: column.clone())
    values = draw(1).normal("x", (2 * len(rare),), dtype)[0]
    assert values.isfinite().all()
    assert values.abs().max().item() == pytest.approx(math.sqrt(-2 * math.log(2**-32)), rel=1e-6)
    expected = torch.tensor(box_muller(rare), dtype=torch.float64)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 5e-5)


# What is drawn once


@pytest.mark.parametrize("n", [0, 1, 2, 5, 1000])
def test_a_permutation_holds_every_number_once(n: int):
    order = permutation(3, "epoch.0", n)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(n))


def test_a_permutation_depends_on_its_seed_and_on_its_name():
    orders = [permutation(0, "epoch.0", 500), permutation(1, "epoch.0", 500), permutation(0, "epoch.1", 500)]
    assert torch.equal(orders[0], permutation(0, "epoch.0", 500))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        correlation = np.corrcoef(orders[one].numpy(), orders[other].numpy())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(500)


def test_a_generator_gives_another_stream_for_every_seed_and_name():
    """PITFALLS 'ranks': initial weights are drawn by (seed, role), whatever was drawn before."""
    torch.randn(3)
    first = torch.randn(64, generator=generator(0, "student"))
    assert torch.equal(first, torch.randn(64, generator=generator(0, "student")))
    for other in (generator(1, "student"), generator(0, "critic")):
        assert abs(torch.corrcoef(torch.stack([first, torch.randn(64, generator=other)]))[0, 1]) < 0.6

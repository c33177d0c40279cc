"""The average of the student's weights against its closed form (invariant 49)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fewstep.optim.ema import EMA, EMASection

YES, NO = torch.tensor(True), torch.tensor(False)


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    drawn = {"a": torch.randn(3, 5, generator=generator), "b.c": torch.randn(7, generator=generator)}
    return {name: nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


@torch.no_grad()
def move(weights: dict[str, nn.Parameter], seed: int) -> dict[str, Tensor]:
    """Other weights; returns a copy of them."""
    generator = torch.Generator().manual_seed(seed)
    for weight in weights.values():
        weight.add_(torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype))
    return {name: weight.detach().clone() for name, weight in weights.items()}


def test_a_new_average_is_the_weights():
    weights = parameters()
    ema = EMA(weights, EMASection())
    assert all(torch.equal(ema.shadows[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("start", [0, 1, 3])
def test_the_average_is_the_sum_of_the_closed_form(start):
    """Invariant 49: decay^k w_start + (1 - decay) sum of decay^(k - j) w_(start + j); before, the weights."""
    weights, decay = parameters(), 0.9
    ema = EMA(weights, EMASection(decay=decay, start=start))
    history = [{name: weight.detach().clone() for name, weight in weights.items()}]
    for update in range(1, 7):
        history.append(move(weights, update))
        ema.update(torch.tensor(update), YES)
        k = max(update - start, 0)
        first = history[update - k]
        for name, shadow in ema.shadows.items():
            terms = [decay ** (k - j) * (1 - decay) * history[update - k + j][name] for j in range(1, k + 1)]
            expected = decay**k * first[name] + sum(terms)
            torch.testing.assert_close(shadow, expected, rtol=1e-12, atol=1e-12)


def test_the_average_follows_exactly_until_its_start():
    weights = parameters()
    ema = EMA(weights, EMASection(decay=0.999, start=2))
    for update in (1, 2, 3):
        move(weights, update)
        ema.update(torch.tensor(update), YES)
        same = all(torch.equal(ema.shadows[name], weight) for name, weight in weights.items())
        assert same == (update <= 2)


def test_a_skipped_update_moves_nothing():
    weights = parameters(torch.float32)
    ema = EMA(weights, EMASection(decay=0.5, start=1))
    for update, start in ((1, 0), (5, 1)):
        move(weights, update)
        before = {name: shadow.clone() for name, shadow in ema.shadows.items()}
        ema.update(torch.tensor(update), NO)
        assert all(torch.equal(ema.shadows[name], shadow) for name, shadow in before.items()), start


def test_the_average_of_bfloat16_weights_is_float32():
    """PITFALLS, EMA: in bfloat16 a decay of 0.999 would never move."""
    weights = {"a": nn.Parameter(torch.ones(4, dtype=torch.bfloat16))}
    ema = EMA(weights, EMASection(decay=0.999))
    with torch.no_grad():
        weights["a"].mul_(2)
    ema.update(torch.tensor(1), YES)
    assert ema.shadows["a"].dtype == torch.float32
    torch.testing.assert_close(ema.shadows["a"], torch.full((4,), 1.001), rtol=2e-6, atol=0)


def test_the_weights_hold_the_average_inside_and_themselves_afterwards():
    """Invariant 49: the live weights come back bit for bit, in the same tensors."""
    weights = parameters(torch.float32)
    ema = EMA(weights, EMASection(decay=0.9))
    live = move(weights, 1)
    ema.update(torch.tensor(1), YES)
    places = {name: weight.data_ptr() for name, weight in weights.items()}
    with ema.swapped():
        for name, weight in weights.items():
            assert torch.equal(weight, ema.shadows[name])
            assert not torch.equal(weight, live[name])
    assert all(torch.equal(weight, live[name]) for name, weight in weights.items())
    assert {name: weight.data_ptr() for name, weight in weights.items()} == places


def test_the_weights_come_back_when_the_inside_fails():
    """PITFALLS, validation: raising leaves no averaged weights in place."""
    weights = parameters(torch.float32)
    ema = EMA(weights, EMASection())
    live = move(weights, 1)
    with pytest.raises(RuntimeError, match="broken"), ema.swapped():
        raise RuntimeError("broken")
    assert all(torch.equal(weight, live[name]) for name, weight in weights.items())


def test_a_loaded_average_goes_on_as_the_saved_one():
    weights, others = parameters(torch.float32), parameters(torch.float32)
    section = EMASection(decay=0.9)
    ema, fresh = EMA(weights, section), EMA(others, section)
    move(weights, 1)
    ema.update(torch.tensor(1), YES)
    fresh.load({name: tensor.clone() for name, tensor in ema.state().items()})
    for average, live in ((ema, weights), (fresh, others)):
        with torch.no_grad():
            for weight in live.values():
                weight.fill_(2.0)
        average.update(torch.tensor(2), YES)
    assert all(torch.equal(fresh.shadows[name], shadow) for name, shadow in ema.shadows.items())


def test_a_missing_shadow_is_an_error():
    ema = EMA(parameters(), EMASection())
    with pytest.raises(KeyError, match=r"b\.c"):
        ema.load({"a": ema.shadows["a"].clone()})

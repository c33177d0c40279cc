"""The discriminator's head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm, silu, softplus

from fewstep.models.discriminator import Discriminator
from tests.models.tiny import randomise


def features(num: int = 2, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, 7, 48, dtype=dtype) for _ in range(num))


def made(num: int = 2, dtype: torch.dtype = torch.float64) -> Discriminator:
    discriminator = Discriminator(48, num)
    randomise(discriminator)
    return discriminator.to(dtype)


def test_with_a_zero_output_the_losses_are_those_of_a_coin():
    """Invariant 48: 2 ln 2 for the discriminator, ln 2 for the student."""
    discriminator = made()
    for head in discriminator.heads:
        nn.init.zeros_(head.output.weight)
        nn.init.zeros_(head.output.bias)
    real, fake = discriminator(features()), discriminator(features())
    assert torch.allclose(softplus(-real) + softplus(fake), torch.full((3,), 2 * math.log(2), dtype=torch.float64))
    assert torch.allclose(softplus(-fake), torch.full((3,), math.log(2), dtype=torch.float64))


def test_the_logit_is_the_written_formula():
    discriminator = made(1)
    state = {name.removeprefix("heads.0."): value for name, value in discriminator.state_dict().items()}
    (tokens,) = features(1)
    x = layer_norm(tokens, (48,), state["norm.weight"], state["norm.bias"])
    x = silu(x @ state["hidden.weight"].T + state["hidden.bias"]).mean(1)
    x = layer_norm(x, (48,), state["output_norm.weight"], state["output_norm.bias"])
    expected = x @ state["output.weight"][0] + state["output.bias"]
    assert torch.allclose(discriminator((tokens,)), expected, atol=1e-12)


def test_several_layers_are_averaged_and_samples_do_not_know_each_other():
    discriminator = made(2)
    both = features(2)
    alone = [head(tokens) for head, tokens in zip(discriminator.heads, both, strict=True)]
    assert torch.allclose(discriminator(both), (alone[0] + alone[1]) / 2)
    assert torch.allclose(discriminator(tuple(tokens[1:2] for tokens in both)), discriminator(both)[1:2])


def test_narrow_features_and_weights_are_judged_in_float32():
    narrow = made(2, torch.bfloat16)
    given = features(2, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = narrow(given)
    assert found.dtype == torch.float32
    expected = narrow.double()(tuple(tokens.double() for tokens in given))
    assert torch.allclose(found.double(), expected, atol=1e-5)


def test_weights_are_a_function_of_the_generator_alone():
    one, two = Discriminator(48), Discriminator(48).to(torch.bfloat16)
    for discriminator in (one, two):
        discriminator.initialise(torch.Generator().manual_seed(3))
    for name, value in one.state_dict().items():
        assert torch.equal(value.bfloat16(), two.state_dict()[name])
    logits = one(features(1, torch.float32))
    assert 0 < logits.abs().max() < 10


def test_another_number_of_layers_is_refused():
    with pytest.raises(ValueError, match="reads 2 layers; 1 were given"):
        made(2)(features(1))

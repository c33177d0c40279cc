"""Guidance and its rescaled form against their formulas."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewstep.flow.guidance import guide


def pair(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.randn(2, 3, 2, 3, 4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)
    return draws[0] * 2 + 1, draws[1]


@given(scale=st.floats(-3, 12))
def test_guidance_starts_from_the_unconditional_prediction(scale: float):
    """PITFALLS 'guidance': one convention; scale 4 is what the cond-based form calls 3."""
    cond, uncond = pair()
    guided = guide(cond, uncond, scale)
    torch.testing.assert_close(guided, uncond + scale * (cond - uncond), rtol=0, atol=1e-13)
    torch.testing.assert_close(guided, cond + (scale - 1) * (cond - uncond), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rescale", [0.0, 0.7, 1.0])
def test_scale_1_is_the_conditional_prediction_to_the_last_bit(dtype: torch.dtype, rescale: float):
    cond, uncond = pair(dtype)
    assert torch.equal(guide(cond, uncond, 1.0, rescale), cond)


def test_scale_0_is_the_unconditional_prediction_to_the_last_bit():
    cond, uncond = pair(torch.float32)
    assert torch.equal(guide(cond, uncond, 0.0), uncond)


@pytest.mark.parametrize("rescale", [0.25, 0.7, 1.0])
def test_rescaling_mixes_the_guided_prediction_with_its_copy_of_the_conditional_deviation(rescale: float):
    """Lin et al., equations 14 to 16, written out with numpy, sample by sample."""
    cond, uncond = pair()
    result = guide(cond, uncond, 5.0, rescale).numpy()
    for b in range(3):
        guided = uncond[b].numpy() + 5.0 * (cond[b].numpy() - uncond[b].numpy())
        rescaled = guided * (np.std(cond[b].numpy()) / np.std(guided))
        np.testing.assert_allclose(result[b], rescale * rescaled + (1 - rescale) * guided, rtol=1e-13, atol=1e-13)


def test_full_rescaling_gives_every_sample_the_deviation_of_its_conditional_prediction():
    cond, uncond = pair()
    guided = guide(cond, uncond, 7.5, 1.0)
    torch.testing.assert_close(guided.flatten(1).std(1), cond.flatten(1).std(1), rtol=1e-13, atol=0)


def test_rescaling_does_not_couple_batch_mates():
    cond, uncond = pair()
    whole = guide(cond, uncond, 5.0, 0.7)
    for b in range(3):
        alone = guide(cond[b : b + 1], uncond[b : b + 1], 5.0, 0.7)
        torch.testing.assert_close(alone[0], whole[b], rtol=1e-14, atol=1e-14)


def test_a_constant_prediction_stays_finite_under_rescaling():
    cond, uncond = torch.full((2, 1, 3, 2, 2), 0.5), torch.full((2, 1, 3, 2, 2), 0.25)
    cond[1] += torch.arange(4.0).view(2, 2)
    guided = guide(cond, uncond, 2.0, 0.7)
    assert guided.isfinite().all()
    torch.testing.assert_close(guided[0], torch.full((1, 3, 2, 2), 0.75))


def test_bfloat16_predictions_are_combined_in_float32():
    cond, uncond = pair(torch.bfloat16)
    guided = guide(cond, uncond, 4.0)
    assert guided.dtype == torch.float32
    torch.testing.assert_close(guided, guide(cond.float(), uncond.float(), 4.0), rtol=0, atol=0)

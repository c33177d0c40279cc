"""The identity codec."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from fewstep.models.codec import IdentityCodec, IdentitySection

CODEC = IdentityCodec(IdentitySection(mean=(0.1, -0.3, 0.0), std=(0.5, 2.0, 0.7)))


def every_pixel() -> torch.Tensor:
    """All 256 values in all 3 channels, as 2 clips of 2 frames."""
    return torch.arange(256, dtype=torch.uint8).view(2, 2, 1, 8, 8).expand(-1, -1, 3, -1, -1)


def test_encode_is_normalised_pixels():
    pixels = every_pixel()
    x0 = CODEC.encode(pixels)
    assert x0.dtype == torch.float32
    for channel, (mean, std) in enumerate(zip((0.1, -0.3, 0.0), (0.5, 2.0, 0.7), strict=True)):
        expected = ((pixels[:, :, channel].double() / 127.5 - 1) - mean) / std
        assert torch.allclose(x0[:, :, channel].double(), expected, atol=1e-6)


def test_decode_undoes_encode():
    """PITFALLS: latents (normalised once each way)."""
    pixels = every_pixel()
    decoded = CODEC.decode(CODEC.encode(pixels))
    assert torch.allclose(decoded.double(), pixels.double() / 127.5 - 1, atol=3e-7)
    assert torch.equal(((decoded + 1) * 127.5).round().to(torch.uint8), pixels)


def test_decoded_pixels_are_clamped():
    x0 = torch.full((1, 1, 3, 2, 2), 9.0)
    assert torch.equal(CODEC.decode(x0), torch.ones_like(x0))
    assert torch.equal(CODEC.decode(-x0), -torch.ones_like(x0))


def test_the_id_names_the_statistics():
    """PITFALLS: latents (the codec's id is stored and checked): two codecs with equal ids give equal latents."""
    assert CODEC.id == "identity(mean=0.1,-0.3,0.0;std=0.5,2.0,0.7)"
    assert IdentityCodec(IdentitySection(mean=(0.1,), std=(0.5,))).id != IdentityCodec(IdentitySection()).id


def test_other_channels_are_refused_both_ways():
    with pytest.raises(ValueError, match=r"3 channels.*have 1"):
        CODEC.encode(torch.zeros(1, 1, 1, 2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"3 channels.*have 1"):
        CODEC.decode(torch.zeros(1, 1, 1, 2, 2))


@pytest.mark.parametrize("wrong", [{"mean": (0.0, 0.0)}, {"mean": (), "std": ()}, {"std": (0.0,)}, {"std": (-1.0,)}])
def test_statistics_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValidationError):
        IdentitySection(**wrong)

"""Our Wan network against diffusers' ``WanTransformer3DModel`` on the same random weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fewstep.models.wan.model import Wan
from fewstep.models.wan.state_dict_adapter import config_to_diffusers, to_diffusers
from tests.models.tiny import inputs, relative, tiny_section, tiny_wan

SHAPES = {
    "an image": {"b": 2, "f": 1, "h": 8, "w": 8},
    "a tall image": {"b": 1, "f": 1, "h": 12, "w": 4, "text": 2},
    "a single token of text": {"b": 2, "f": 2, "h": 4, "w": 4, "text": 1},
    "a clip": {"b": 2, "f": 3, "h": 4, "w": 6, "text": 7},
    "a long clip": {"b": 1, "f": 5, "h": 2, "w": 2, "text": 8},
}


def diffusers_twin(network: Wan) -> nn.Module:
    from diffusers import WanTransformer3DModel

    twin = WanTransformer3DModel.from_config(config_to_diffusers(network.section))
    twin.load_state_dict(to_diffusers(network.state_dict())[0], strict=True)
    return twin


def diffusers_velocity(twin: nn.Module, x_t: Tensor, sigma: Tensor, tokens: Tensor, per_token: bool) -> Tensor:
    """diffusers wants [b c f h w] and one timestep a sample, or one a token."""
    timestep = 1000 * sigma
    if per_token:
        _, rows, columns = twin.config.patch_size
        timestep = timestep.repeat_interleave(x_t.shape[3] // rows * (x_t.shape[4] // columns), dim=1)
    else:
        timestep = timestep[:, 0]
    return twin(x_t.transpose(1, 2), timestep, tokens, return_dict=False)[0].transpose(1, 2)


def compare(network: Wan, twin: nn.Module, shape: dict, *, per_token: bool, dtype: torch.dtype, tolerance: float):
    x_t, sigma, cond = inputs(**shape, dtype=dtype)
    if not per_token:
        sigma = sigma[:, :1].expand(-1, shape["f"])
    weight = torch.randn(x_t.shape, generator=torch.Generator().manual_seed(3), dtype=dtype)
    ours = [x_t.clone().requires_grad_(), cond.tokens.clone().requires_grad_()]
    theirs = [x_t.clone().requires_grad_(), cond.tokens.clone().requires_grad_()]
    found = network.velocity(ours[0], sigma, type(cond)(ours[1]))
    expected = diffusers_velocity(twin, theirs[0], sigma, theirs[1], per_token)
    assert relative(found, expected) < tolerance
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    gradients, _ = to_diffusers({name: parameter.grad for name, parameter in network.named_parameters()})
    parameters = dict(twin.named_parameters())
    assert gradients.keys() == parameters.keys()
    for name, gradient in gradients.items():
        if gradient is None:
            assert unheard(name)
            assert shape["text"] == 1
            assert parameters[name].grad.abs().max() < tolerance
            continue
        assert parameters[name].grad.abs().max() > 0, name
        assert relative(gradient, parameters[name].grad) < tolerance, name
    for ours_input, theirs_input in zip(ours, theirs, strict=True):
        assert relative(ours_input.grad, theirs_input.grad) < tolerance


def unheard(name: str) -> bool:
    """What asks in cross-attention: with one key to answer, nobody hears the question."""
    return "norm2." in name or any(f"attn2.{part}." in name for part in ("to_q", "to_k", "norm_q", "norm_k"))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("per_token", [False, True], ids=["one sigma a sample", "one sigma a frame"])
def test_outputs_and_every_gradient_equal_diffusers(shape, per_token):
    """f = 1 and f > 1, odd text, 3 heads, not square; a noise level a frame is diffusers' timestep a token."""
    network = tiny_wan()
    compare(network, diffusers_twin(network), shape, per_token=per_token, dtype=torch.float32, tolerance=1e-5)


def test_an_uneven_head_split_and_a_patch_of_four_equal_diffusers():
    """A head of 14 components turns as 6 + 4 + 4; patches of 4x4; 2 blocks."""
    network = tiny_wan(tiny_section(dim=42, patch=(1, 4, 4), layers=2))
    shape = {"b": 2, "f": 2, "h": 8, "w": 12}
    compare(network, diffusers_twin(network), shape, per_token=False, dtype=torch.float32, tolerance=1e-5)


class _Waves(nn.Module):
    """The sinusoids in float64: cosines first, frequency i is 10000^(-i / half)."""

    def __init__(self, num: int):
        super().__init__()
        self.frequencies = [math.exp(-math.log(10000) * i / (num // 2)) for i in range(num // 2)]

    def forward(self, timestep: Tensor) -> Tensor:
        angles = timestep[:, None] * torch.tensor(self.frequencies, dtype=torch.float64)
        return torch.cat((angles.cos(), angles.sin()), dim=1)


@pytest.mark.parametrize("per_token", [False, True], ids=["one sigma a sample", "one sigma a frame"])
def test_in_float64_outputs_and_gradients_equal_diffusers_to_rounding(monkeypatch, per_token):
    """diffusers casts to float32 wherever it wants precision; here ``float()`` widens instead."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    network = tiny_wan(dtype=torch.float64)
    twin = diffusers_twin(network).double()
    twin.condition_embedder.timesteps_proj = _Waves(32)
    compare(network, twin, SHAPES["a clip"], per_token=per_token, dtype=torch.float64, tolerance=1e-11)

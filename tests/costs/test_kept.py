"""Memory inside a block against what torch keeps for the backward pass of the real one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fewstep.costs.kept import Inside
from fewstep.engines.roles import Role, freeze
from tests.models.tiny import inputs, tiny_section, tiny_wan

LAYERS = (1, 4)


def kept_bytes(precision: torch.dtype, trained: bool, layers: int) -> int:
    """Of the tensors that a network's forward pass leaves for its backward pass, weights and tables apart."""
    network = tiny_wan(tiny_section(layers=layers, dim=96, ffn_dim=256))
    if not trained:
        freeze(network, torch.device("cpu"), precision)
    x_t, sigma, cond = inputs(b=2, f=3, h=16, w=12)
    if not trained:
        x_t.requires_grad_()
    parameters = {p.untyped_storage().data_ptr() for p in network.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        tokens = tensor.numel() >= 2 * 3 * 48 * 96  # what grows with the clip; neither modulation nor text does
        if storage.data_ptr() not in parameters and tokens and not is_weight(tensor):
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    def is_weight(tensor: Tensor) -> bool:
        """A copy of one in bfloat16."""
        return tensor.ndim <= 2 and any(sorted(tensor.shape) == sorted(p.shape) for p in network.parameters())

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        velocity = Role("student", network, precision).velocity(x_t, sigma, cond)
    assert velocity.requires_grad
    return sum(found.values())


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("trained", [True, False])
def test_a_block_keeps_what_torch_keeps(precision, trained):
    """One block's share is the difference between networks of one and of four."""
    few, many = (kept_bytes(precision, trained, layers) for layers in LAYERS)
    shape, tokens = tiny_section(dim=96, ffn_dim=256).architecture, 2 * 3 * 48
    inside = Inside(shape, precision, trained, recompute=False)
    own = 2 * precision.itemsize * shape.dim * tokens  # keys and values
    apart = 3 * 4 * shape.dim * tokens if trained else 0  # on a CPU, the three RMS norms keep their result too
    assert inside.kept(tokens) + own + apart == pytest.approx((many - few) / 3, rel=0.02)

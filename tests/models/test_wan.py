"""The Wan network by itself: precision, noise level per frame, features, initialisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fewstep.models.api import FlowModel
from fewstep.models.families import build
from fewstep.models.wan.model import Wan
from fewstep.models.wan.sizes import WanSection
from fewstep.records import map_tensors, rows
from tests.models.tiny import LABELS, TEXT, inputs, relative, tiny_section, tiny_wan


def test_a_wan_network_is_a_flow_model():
    network = tiny_wan()
    assert isinstance(network, FlowModel)
    assert (network.num_layers, network.width) == (3, 48)
    assert network.geometry.channels == 4
    assert network.geometry.tokens_per_frame(8, 6) == 12


def outputs_of(network: Wan, kinds: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Filled by the next forward: the output of every submodule whose name ends with one of ``kinds``."""
    found: dict[str, torch.Tensor] = {}
    for name, module in network.named_modules():
        if name.endswith(kinds):
            module.register_forward_hook(lambda _, __, output, name=name: found.__setitem__(name, output))
    return found


def timesteps_of(network: Wan) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    network.time_embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_timestep_is_1000_sigma_and_never_rounded(dtype, autocast):
    """PITFALLS: precision (t rounded in bf16), shift (t == 1000 sigma at every call). Invariant 7."""
    network = tiny_wan(dtype=dtype)
    seen = timesteps_of(network)
    x_t, _, cond = inputs(b=1, f=3)
    sigma = torch.tensor([[0.9375, 0.93871, 1.0]])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        network.velocity(x_t, sigma, cond)
        network.features(x_t, sigma, cond, (0,))
    for timestep in seen:
        assert timestep.dtype == torch.float32
        assert torch.equal(timestep, 1000 * sigma)
    assert seen[0][0, 0] == 937.5
    assert len(seen) == 2


WIDE = ("time_embedding", "time_projection", "norm", "norm_q", "norm_k", "head")


@pytest.mark.parametrize(
    ("dtype", "autocast", "wide", "narrow"),
    [
        (torch.float32, False, torch.float32, torch.float32),
        (torch.float64, False, torch.float64, torch.float64),
        (torch.bfloat16, False, torch.float32, torch.bfloat16),
        (torch.float32, True, torch.float32, torch.bfloat16),
    ],
)
def test_norms_time_and_output_stay_wide_and_the_rest_follows_the_parameters(dtype, autocast, wide, narrow):
    network = tiny_wan(dtype=dtype)
    found_wide, found_narrow = outputs_of(network, WIDE), outputs_of(network, (".q", ".v", ".o", "ffn.hidden"))
    x_t, sigma, cond = inputs()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        velocity = network.velocity(x_t, sigma, cond)
    assert velocity.dtype == wide
    assert len(found_wide) == 4 + 7 * 3
    assert {x.dtype for x in found_wide.values()} == {wide}
    assert len(found_narrow) == 7 * 3
    assert {x.dtype for x in found_narrow.values()} == {narrow}


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 parameters", "bf16 autocast"])
def test_bfloat16_stays_close_to_float32(autocast):
    """Same (rounded) weights: what differs is the arithmetic of three blocks, about 1 % at 8 bits."""
    narrow = tiny_wan(dtype=torch.bfloat16)
    network = tiny_wan()
    network.load_state_dict({name: value.float() for name, value in narrow.state_dict().items()})
    x_t, sigma, cond = inputs()
    expected = network.velocity(x_t, sigma, cond)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = (network if autocast else narrow).velocity(x_t, sigma, cond)
    assert 1e-5 < relative(found, expected) < 0.03


def test_a_frame_is_modulated_by_its_own_noise_level():
    """Where frames do not attend to each other, a clip with mixed sigma equals its frames as images."""
    network = tiny_wan(dtype=torch.float64)
    for block in network.blocks:
        nn.init.zeros_(block.self_attention.o.weight)
    x_t, sigma, cond = inputs(b=2, f=3, dtype=torch.float64)
    clip = network.velocity(x_t, sigma, cond)
    for frame in range(3):
        alone = network.velocity(x_t[:, frame : frame + 1], sigma[:, frame : frame + 1], cond)
        assert relative(clip[:, frame : frame + 1], alone) < 1e-12


def test_every_frame_sees_every_other_and_every_noise_level():
    """The network is bidirectional: velocity of frame 0 depends on x_t and sigma of the last frame, and vice versa."""
    network = tiny_wan(dtype=torch.float64)
    x_t, sigma, cond = inputs(b=1, f=3, dtype=torch.float64)
    base = network.velocity(x_t, sigma, cond)
    for frame, other in ((0, 2), (2, 0)):
        moved, hotter = x_t.clone(), sigma.clone()
        moved[:, other] += 0.1
        hotter[:, other] = 0.5 * sigma[:, other]
        assert (network.velocity(moved, sigma, cond) - base)[:, frame].abs().max() > 1e-4
        assert (network.velocity(x_t, hotter, cond) - base)[:, frame].abs().max() > 1e-4


def test_rows_of_a_batch_do_not_know_each_other():
    """Invariant 22."""
    network = tiny_wan(dtype=torch.float64)
    x_t, sigma, cond = inputs(b=2, dtype=torch.float64)
    both = network.velocity(x_t, sigma, cond)
    for row in (slice(0, 1), slice(1, 2)):
        assert relative(both[row], network.velocity(x_t[row], sigma[row], rows(cond, row))) < 1e-12


def test_alternating_shapes_equal_a_fresh_network_each_time():
    """Invariant 20, for the bidirectional network."""
    network = tiny_wan(dtype=torch.float64)
    for shape in ({"f": 1}, {"f": 3, "h": 4, "w": 10}, {"f": 1, "text": 2}, {"f": 3, "h": 10, "w": 4}, {"f": 1}):
        given = inputs(**shape, dtype=torch.float64)
        assert torch.equal(network.velocity(*given), tiny_wan(dtype=torch.float64).velocity(*given))


def test_features_equal_the_outputs_of_the_blocks_of_a_full_forward():
    network = tiny_wan(dtype=torch.float64)
    found = outputs_of(network, ("blocks.0", "blocks.1", "blocks.2"))
    x_t, sigma, cond = inputs(dtype=torch.float64)
    network.velocity(x_t, sigma, cond)
    expected = {name: output[0].flatten(1, 2) for name, output in found.items()}
    first, last = network.features(x_t, sigma, cond, (0, 2))
    assert first.shape == (2, 3 * 12, 48)
    assert torch.equal(first, expected["blocks.0"])
    assert torch.equal(last, expected["blocks.2"])


def test_nothing_runs_after_the_last_layer_asked_for():
    network = tiny_wan()
    found = outputs_of(network, ("blocks.0", "blocks.1", "blocks.2", "head"))
    network.features(*inputs(), (1,))
    assert found.keys() == {"blocks.0", "blocks.1"}


def test_public_methods_never_call_each_other(monkeypatch):
    """FSDP2 wraps each of them by itself (DESIGN section 7)."""
    network = tiny_wan()
    for broken, works in (("velocity", "features"), ("features", "velocity")):
        with monkeypatch.context() as patch:
            patch.setattr(network, broken, None)
            getattr(network, works)(*inputs(), *([(1,)] if works == "features" else []))


@pytest.mark.gpu
@pytest.mark.parametrize("conditioner", [TEXT, LABELS], ids=["embedding", "class_label"])
def test_nothing_waits_for_the_device(conditioner):
    """No host sync in forward or backward, once the positions of the shape are known."""
    network = tiny_wan(tiny_section(conditioner)).cuda()
    x_t, sigma, cond = inputs()
    given = map_tensors(torch.Tensor.cuda, (x_t, sigma, cond if conditioner is TEXT else network.conditioner.null(2)))
    network.velocity(*given).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        network.velocity(*given).sum().backward()
        network.features(*given, (1,))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0), (-1,), (3,)])
def test_layers_out_of_order_or_range_are_refused(layers):
    with pytest.raises(ValueError, match="between 0 and 2"):
        tiny_wan().features(*inputs(), layers)


def test_the_class_steers_the_velocity_and_the_null_is_a_class_of_its_own():
    network = tiny_wan(tiny_section(LABELS), dtype=torch.float64)
    x_t, sigma, _ = inputs(b=1, dtype=torch.float64)
    conds = [network.conditioner.condition(torch.tensor([label])) for label in range(5)] + [network.conditioner.null(1)]
    velocities = torch.cat([network.velocity(x_t, sigma, cond) for cond in conds])
    distances = torch.cdist(velocities.flatten(1), velocities.flatten(1)) + torch.eye(6)
    assert distances.min() > 1e-3


def test_a_new_network_predicts_zero_and_all_its_blocks_are_alive():
    network = build(tiny_section(LABELS))
    network.initialise(torch.Generator().manual_seed(0))
    x_t, sigma, _ = inputs()
    cond = network.conditioner.null(2)
    assert not network.velocity(x_t, sigma, cond).any()
    network.velocity(x_t, sigma, cond).sum().backward()
    assert network.head.projection.weight.grad.abs().max() > 0
    before, after = network.features(x_t, sigma, cond, (0, 1))
    assert 1e-3 < relative(after, before) < 0.5, "near the identity, but not the identity"


def test_weights_are_a_function_of_the_generator_alone():
    """The same float32 draws whatever dtype the network is kept in; global randomness is neither read nor moved."""
    before = torch.get_rng_state()
    drawn = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        network = build(tiny_section(LABELS)).to(dtype)
        network.initialise(torch.Generator().manual_seed(7))
        drawn.append(network.state_dict())
    assert torch.equal(before, torch.get_rng_state())
    for name, value in drawn[0].items():
        assert value.isfinite().all()
        assert torch.equal(drawn[1][name], value.double())
        assert torch.equal(drawn[2][name], value.bfloat16())
    network = build(tiny_section(LABELS))
    network.initialise(torch.Generator().manual_seed(8))
    assert not torch.equal(network.state_dict()["blocks.0.ffn.hidden.weight"], drawn[0]["blocks.0.ffn.hidden.weight"])


def test_initial_scales_follow_the_rules():
    network = build(WanSection(size="nano", conditioner=LABELS))
    network.initialise(torch.Generator().manual_seed(0))
    scale = {name: float(parameter.detach().std()) for name, parameter in network.named_parameters()}
    assert scale["blocks.3.modulation"] == pytest.approx(128**-0.5, rel=0.1)
    assert scale["blocks.3.self_attention.q.weight"] == pytest.approx((2 / 256) ** 0.5, rel=0.05)
    assert scale["time_embedding.hidden.weight"] == pytest.approx(0.02, rel=0.05)
    assert scale["conditioner.table"] == pytest.approx(1.0, rel=0.2)
    assert scale["blocks.0.cross_norm.weight"] == scale["head.projection.weight"] == 0.0


def test_a_network_without_storage_has_the_same_tensors():
    empty, real = build(tiny_section(), device="meta"), build(tiny_section())
    assert all(parameter.is_meta for parameter in empty.parameters())
    shapes = map_tensors(lambda tensor: tensor.new_empty(0), real.state_dict()).keys()
    assert empty.state_dict().keys() == shapes


def test_weights_move_to_another_network_with_their_conditioner():
    """A role's state dict holds the learned class table: each role has its own."""
    network = tiny_wan(tiny_section(LABELS))
    other = build(tiny_section(LABELS))
    other.load_state_dict(network.state_dict(), strict=True)
    assert "conditioner.table" in network.state_dict()
    x_t, sigma, _ = inputs()
    cond = network.conditioner.null(2)
    assert torch.equal(network.velocity(x_t, sigma, cond), other.velocity(x_t, sigma, cond))

"""Names and configurations of the published networks, in both directions."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fewstep.errors import UserError
from fewstep.models.families import build
from fewstep.models.wan.sizes import SIZES, WanSection
from fewstep.models.wan.state_dict_adapter import (
    config_to_diffusers,
    from_diffusers,
    section_from_diffusers,
    to_diffusers,
)
from tests.models.tiny import LABELS, TEXT, tiny_section, tiny_wan

PUBLISHED = {
    "1.3B": {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960},
    "14B": {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824},
}
"""transformer/config.json of Wan-AI/Wan2.1-T2V-1.3B-Diffusers and Wan-AI/Wan2.1-T2V-14B-Diffusers."""
PUBLISHED_ALIKE = {
    "_class_name": "WanTransformer3DModel",
    "_diffusers_version": "0.33.0.dev0",
    "added_kv_proj_dim": None,
    "attention_head_dim": 128,
    "cross_attn_norm": True,
    "eps": 1e-06,
    "freq_dim": 256,
    "image_dim": None,
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
    "text_dim": 4096,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("conditioner", [TEXT, LABELS], ids=["embedding", "class_label"])
def test_there_and_back_is_the_same_state_at_every_size(size, conditioner):
    state = build(WanSection(size=size, conditioner=conditioner), device="meta").state_dict()
    transformer, own = to_diffusers(state)
    assert own.keys() == ({"table"} if conditioner is LABELS else set())
    back = from_diffusers(transformer, own)
    assert back.keys() == state.keys()
    assert all(back[name] is state[name] for name in state)


@pytest.mark.parametrize("size", SIZES)
def test_names_and_shapes_are_those_of_the_diffusers_class(size):
    from diffusers import WanTransformer3DModel

    section = WanSection(size=size, conditioner=LABELS)
    transformer, _ = to_diffusers(build(section, device="meta").state_dict())
    with torch.device("meta"):
        expected = WanTransformer3DModel.from_config(config_to_diffusers(section)).state_dict()
    assert {name: value.shape for name, value in transformer.items()} == {n: v.shape for n, v in expected.items()}


@pytest.mark.parametrize(
    ("size", "millions"), [("nano", (0.9, 1.3)), ("small", (8, 11)), ("1.3B", (1418, 1420)), ("14B", (14280, 14290))]
)
def test_a_size_has_about_the_parameters_of_its_name(size, millions):
    network = build(WanSection(size=size, conditioner=TEXT), device="meta")
    assert millions[0] <= sum(parameter.numel() for parameter in network.parameters()) / 1e6 <= millions[1]


def test_wrapper_prefixes_are_stripped():
    """PITFALLS: exported names. The real wrappers of torch.compile and checkpointing; DDP and FSDP by name."""
    network = tiny_wan(tiny_section(LABELS))
    expected = to_diffusers(network.state_dict())
    network.blocks[1] = checkpoint_wrapper(network.blocks[1])
    network.blocks[2] = torch.compile(network.blocks[2], backend="eager")
    wrapped = dict(torch.compile(network, backend="eager").named_parameters())
    assert any("_checkpoint_wrapped_module" in name for name in wrapped)
    for prefix in ("", "module.", "_fsdp_wrapped_module.", "module._fsdp_wrapped_module."):
        found = to_diffusers({prefix + name: value for name, value in wrapped.items()})
        assert [part.keys() for part in found] == [part.keys() for part in expected]


@pytest.mark.parametrize("outward", [True, False], ids=["to diffusers", "from diffusers"])
def test_missing_and_unknown_names_are_refused_by_name(outward):
    """PITFALLS: LoRA (0 of N keys matched), exported names (strict)."""
    state = tiny_wan().state_dict()
    if not outward:
        state = to_diffusers(state)[0]
    rename = to_diffusers if outward else from_diffusers
    lost = next(name for name in state if name.startswith("blocks.1."))
    with pytest.raises(UserError, match=rf"1 missing .{lost}"):
        rename({name: value for name, value in state.items() if name != lost})
    with pytest.raises(UserError, match=r"1 unknown .blocks.0.extra.weight"):
        rename(state | {"blocks.0.extra.weight": torch.zeros(1)})
    with pytest.raises(UserError, match="missing"):
        rename({})


def test_two_names_that_become_one_are_refused():
    state = tiny_wan().state_dict()
    with pytest.raises(UserError, match=r"two tensors are called 'head.modulation'"):
        to_diffusers(state | {"module.head.modulation": state["head.modulation"]})


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_configurations_are_recognised(size):
    config = PUBLISHED_ALIKE | PUBLISHED[size]
    assert section_from_diffusers(config) == WanSection(size=size, conditioner=TEXT)
    ours = config_to_diffusers(WanSection(size=size, conditioner=TEXT))
    assert {name: ours[name] for name in config if name in ours} == {n: v for n, v in config.items() if n in ours}


@pytest.mark.parametrize(
    "section", [WanSection(size=size, conditioner=LABELS) for size in SIZES] + [tiny_section(LABELS)]
)
def test_a_section_survives_the_way_through_a_config(section):
    back = section_from_diffusers(config_to_diffusers(section), LABELS)
    assert (back.architecture, back.conditioner) == (section.architecture, section.conditioner)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_dim": 1280}, "image_dim is 1280.*image-to-video"),
        ({"added_kv_proj_dim": 5120}, "added_kv_proj_dim is 5120.*image-to-video"),
        ({"in_channels": 36}, "out_channels is 16.*only 36"),
        ({"qk_norm": None}, "qk_norm is None"),
        ({"cross_attn_norm": False}, "cross_attn_norm is False"),
        ({"_class_name": "FluxTransformer2DModel"}, "FluxTransformer2DModel"),
    ],
)
def test_configurations_that_are_not_built_here_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        section_from_diffusers(PUBLISHED_ALIKE | PUBLISHED["14B"] | change)


def test_a_config_that_lacks_numbers_is_refused():
    with pytest.raises(UserError, match="num_layers missing"):
        section_from_diffusers(
            {name: value for name, value in (PUBLISHED_ALIKE | PUBLISHED["14B"]).items() if name != "num_layers"}
        )

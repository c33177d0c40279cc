"""Compilation block by block."""

from __future__ import annotations

import pytest
import torch

from fewstep.models.blocks import CausalSection
from fewstep.models.wan.parallelize import compile_blocks, compile_whole
from tests.models.tiny import inputs, relative, tiny_section, tiny_wan


def test_compiled_blocks_share_one_graph_and_change_neither_names_nor_results(unchecked_shapes):
    """No graph break (fullgraph); forward and every gradient equal the eager network, for an image and a clip."""
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    network, compiled = tiny_wan(dtype=torch.float64), tiny_wan(dtype=torch.float64)
    compile_blocks(compiled, backend=count, dynamic=False)
    assert compiled.state_dict().keys() == network.state_dict().keys()
    for f in (1, 3):
        x_t, sigma, cond = inputs(f=f, dtype=torch.float64)
        for one in (network, compiled):
            one.zero_grad()
            one.velocity(x_t, sigma, cond).square().sum().backward()
        assert relative(compiled.velocity(x_t, sigma, cond), network.velocity(x_t, sigma, cond)) < 1e-12
        for name, parameter in network.named_parameters():
            assert relative(compiled.get_parameter(name).grad, parameter.grad) < 1e-12, name
    assert len(graphs) == 2, "one graph a shape, whatever the number of blocks"


@pytest.mark.thorough
def test_a_compiled_stream_has_one_graph_from_its_full_window_on_and_equals_the_eager_one(unchecked_shapes):
    """No graph break; masks of teacher forcing and of blocks in parallel too, with every gradient."""
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    section = tiny_section(causal=CausalSection(block_frames=1, window=3, positions="reindexed"))
    network, compiled = (tiny_wan(section, torch.float64) for _ in range(2))
    compile_whole(compiled, backend=count, fullgraph=True)
    x_t, sigma, cond = inputs(f=8, dtype=torch.float64)
    histories = [None, None]
    with torch.no_grad():
        for block in range(8):
            span = slice(block, block + 1)
            found = [
                one.velocity_given(x_t[:, span], sigma[:, span], cond, history, block)
                for one, history in zip((network, compiled), histories, strict=True)
            ]
            histories = [
                one.append(history, x_t[:, span], cond)
                for one, history in zip((network, compiled), histories, strict=True)
            ]
            assert relative(found[1], found[0]) < 1e-12
            if block == 3:
                warm = len(graphs)
    assert len(graphs) == warm, "a block more compiles nothing more"
    for one in (network, compiled):
        with torch.no_grad():
            history = one.prefill(x_t, cond)
        forced = one.velocity(x_t, sigma, cond, clean=x_t.flip(1)) + one.velocity_given(x_t, sigma, cond, history, 0)
        forced.square().sum().backward()
    for name, parameter in network.named_parameters():
        assert relative(compiled.get_parameter(name).grad, parameter.grad) < 1e-11, name


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu_compiled_blocks_equal_eager_ones(autocast, unchecked_shapes):
    network, compiled = tiny_wan().cuda(), tiny_wan().cuda()
    compile_blocks(compiled)
    x_t, sigma, cond = inputs()
    given = x_t.cuda(), sigma.cuda(), type(cond)(cond.tokens.cuda())
    gradients = []
    for one in (network, compiled):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            velocity = one.velocity(*given)
        assert velocity.dtype == torch.float32
        velocity.square().mean().backward()
        gradients.append([velocity, *(parameter.grad for parameter in one.parameters())])
    for expected, found in zip(*gradients, strict=True):
        assert relative(found, expected) < (0.1 if autocast else 1e-3)


@pytest.mark.gpu
def test_on_a_gpu_replayed_networks_equal_eager_ones_and_their_results_outlive_the_next_call(unchecked_shapes):
    network, replayed = tiny_wan().cuda(), tiny_wan().cuda()
    compile_whole(replayed)
    x_t, sigma, cond = inputs()
    given = x_t.cuda(), sigma.cuda(), type(cond)(cond.tokens.cuda())
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        replayed.zero_grad()
        replayed.velocity(*given).square().mean().backward()
    network.velocity(*given).square().mean().backward()
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            assert relative(replayed.get_parameter(name).grad, parameter.grad) < 1e-3, name
    with torch.no_grad():
        first = replayed.velocity(*given)
        kept = first.clone()
        replayed.velocity(given[0] + 1, *given[1:])
    assert torch.equal(first, kept)

"""How a Wan network is compiled, block by block or whole and replayed; and how it is cut over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from fewstep.models.division import Division
from fewstep.models.wan.model import Wan
from fewstep.records import map_tensors

METHODS = ("velocity", "features", "tell", "prefill", "velocity_given", "append")
"""The public methods of a network, causal ones included; none calls another."""


def shard_blocks(model: Wan, axes: Any) -> None:
    """Cuts every weight along its first axis over the ranks of ``axes`` (a ``DeviceMesh``), in place, by FSDP2: a block
    is gathered while it runs, what stands around the blocks while a public method runs, and afterwards all weights are
    parts again.

    Weights keep their dtype when they are gathered; autocast, where it is on, casts them as it does in one process.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of views that a block returns: nothing writes to them
    for block in model.blocks:
        fully_shard(block, mesh=axes, reshard_after_forward=True)
        register_fsdp_forward_method(block, "told")
    fully_shard(model, mesh=axes, reshard_after_forward=True)
    for name in METHODS:
        if hasattr(model, name):
            register_fsdp_forward_method(model, name)


def divide_tokens(model: Wan, division: Division) -> None:
    """Divides the tokens of every frame over ranks, in place, for good: where tokens meet, in self-attention, they are
    exchanged for heads."""
    model.division = division
    blocks: Any = model.blocks
    for block in blocks:
        block.self_attention.division = division


def compile_blocks(model: Wan, **options: Any) -> None:
    """Compiles every block in place, without graph breaks; names in the state dict stay as they are. All blocks share
    one compiled graph, so that the start is as short as that of one block: for large networks.

    options: handed to ``torch.compile``.
    """
    compiler: Any = torch._dynamo.config
    compiler.recompile_limit = max(compiler.recompile_limit, 64)  # a role has several masks, a run several roles
    for block in model.blocks:
        block.compile(fullgraph=True, **options)


def compile_whole(model: Wan, **options: Any) -> None:
    """Compiles the network in place as one graph for every shape and, on a GPU, replays it as CUDA graphs: for small
    networks, whose kernels are over before the host has launched the next one. Of a causal network what is compiled
    begins behind the history's bookkeeping, so that a stream with a window has one graph, however long it gets.

    The engine marks where an iteration's memory may be used again (``torch.compiler.cudagraph_mark_step_begin``). What
    is returned is a copy, out of that memory. options: handed to ``torch.compile``.
    """
    options = {"mode": "reduce-overhead"} | options if "backend" not in options else options
    for name in ("_velocity", "_made", "_features") if model.section.causal else ("velocity", "features"):
        setattr(model, name, _kept(torch.compile(getattr(model, name), dynamic=False, **options)))


def _kept(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: map_tensors(torch.clone, compiled(*arguments))

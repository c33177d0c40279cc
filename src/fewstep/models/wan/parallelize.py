"""How a Wan network is compiled: block by block, or whole and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fewstep.models.wan.model import Wan
from fewstep.records import map_tensors


def compile_blocks(model: Wan, **options: Any) -> None:
    """Compiles every block in place, without graph breaks; names in the state dict stay as they are. All blocks share
    one compiled graph, so that the start is as short as that of one block: for large networks.

    options: handed to ``torch.compile``.
    """
    compiler: Any = torch._dynamo.config
    compiler.recompile_limit = max(compiler.recompile_limit, 64)  # a role has several masks, a run several roles
    for block in model.blocks:
        block.compile(fullgraph=True, **options)


def compile_whole(model: Wan, mode: str = "reduce-overhead") -> None:
    """Compiles ``velocity`` and ``features`` in place as one graph for every shape and, on a GPU, replays them as CUDA
    graphs: for small networks, whose kernels are over before the host has launched the next one.

    The engine marks where an iteration's memory may be used again (``torch.compiler.cudagraph_mark_step_begin``). What
    is returned is a copy, out of that memory.
    """
    for name in ("velocity", "features"):
        setattr(model, name, _kept(torch.compile(getattr(model, name), mode=mode, dynamic=False)))


def _kept(compiled: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: map_tensors(torch.clone, compiled(*arguments))

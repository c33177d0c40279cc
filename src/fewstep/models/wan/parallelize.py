"""How a Wan network is compiled: block by block, so that all blocks share one compiled graph."""

from __future__ import annotations

from typing import Any

from fewstep.models.wan.model import Wan


def compile_blocks(model: Wan, **options: Any) -> None:
    """Compiles every block in place, without graph breaks; names in the state dict stay as they are.

    options: handed to ``torch.compile``.
    """
    for block in model.blocks:
        block.compile(fullgraph=True, **options)

"""Which device a process runs on, and in which precision."""

from __future__ import annotations

import torch

from fewstep.engines.api import EngineSection
from fewstep.engines.mesh import Ranks
from fewstep.errors import UserError

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def resolve_device(engine: EngineSection, ranks: Ranks) -> tuple[torch.device, torch.dtype]:
    """The device and the precision that the engine section stands for in this process."""
    name = engine.device if engine.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(
            f"engine.device = {name}: there is no such kind of device; write 'auto', 'cpu' or 'cuda'"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"engine.device = {name}: fewstep runs on 'cpu' and 'cuda'; write one of them, or 'auto'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"engine.device = {name}: this machine has no CUDA device; write 'cpu' or 'auto'")
    if device.type == "cuda" and ranks.world > 1:
        if device.index is not None:
            raise UserError(f"engine.device = {name}: {ranks.world} processes need a GPU each; write 'cuda' or 'auto'")
        if ranks.local >= torch.cuda.device_count():
            raise UserError(
                f"{ranks}: it is process {ranks.local} of this machine, which has {torch.cuda.device_count()} GPUs; "
                "start one process for each GPU (torchrun --nproc-per-node)"
            )
        device = torch.device("cuda", ranks.local)
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    return device, PRECISIONS[automatic if engine.precision == "auto" else engine.precision]

"""The guided velocity: one call of the network on both halves, for samplers and for teachers alike."""

from __future__ import annotations

from typing import Any

import torch

from fewstep.flow.guidance import guide
from fewstep.models.api import FlowModel
from fewstep.records import concat
from fewstep.shapes import Latents, Sigma


def guided_velocity(
    model: FlowModel,
    x_t: Latents,
    sigma: Sigma,
    cond: Any,
    uncond: Any | None,
    *,
    scale: float,
    rescale: float = 0.0,
    clean: Latents | None = None,
) -> Latents:
    """``uncond + scale (cond - uncond)``; scale 1 is one plain call, any other needs ``uncond`` (ValueError).

    clean: the history that a causal network is teacher-forced on, the same for both halves.
    """
    forced = {} if clean is None else {"clean": clean}
    if scale == 1.0:
        return model.velocity(x_t, sigma, cond, **forced)
    if uncond is None:
        raise ValueError(f"guidance_scale {scale} needs the unconditional input, and the batch has none")
    twice = concat([forced, forced])
    both = model.velocity(torch.cat([x_t, x_t]), torch.cat([sigma, sigma]), concat([cond, uncond]), **twice)
    with_cond, without_cond = both.chunk(2)
    return guide(with_cond, without_cond, scale, rescale)

"""Classifier-free guidance (arXiv:2207.12598), in one convention: ``uncond + scale (cond - uncond)``; 1 is off."""

from __future__ import annotations

import torch

from fewstep.shapes import Latents


def guide(cond: Latents, uncond: Latents, scale: float, rescale: float = 0.0) -> Latents:
    """``uncond + scale (cond - uncond)``, in float32 at least; exactly cond at scale 1 and exactly uncond at scale 0.

    ``rescale`` in [0, 1] moves the standard deviation of every sample from the guided one (0) to that of ``cond`` (1)
    (Lin et al., arXiv:2305.08891, section 3.4). A sample whose guided prediction is constant is left as it is.
    """
    dtype = torch.promote_types(torch.promote_types(cond.dtype, uncond.dtype), torch.float32)
    cond, uncond = cond.to(dtype), uncond.to(dtype)
    guided = torch.lerp(uncond, cond, scale)
    if rescale == 0:
        return guided
    axes = tuple(range(1, cond.ndim))
    std_cond = cond.std(axes, correction=0, keepdim=True)
    std_guided = guided.std(axes, correction=0, keepdim=True)
    ratio = torch.where(std_guided > 0, std_cond / std_guided, 1.0)
    return guided * (1 + rescale * (ratio - 1))

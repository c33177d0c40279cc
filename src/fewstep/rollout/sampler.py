"""The sampler of a network: a clip as a whole, or block by block."""

from __future__ import annotations

import torch

from fewstep.errors import UserError
from fewstep.models.blocks import CausalSection
from fewstep.rollout.few_step import FewStep, SamplingSection
from fewstep.rollout.rolling import Rolling
from fewstep.rollout.self_forcing import SelfForcing

Sampler = FewStep | SelfForcing
OF_CAUSAL_NETWORKS = (
    "first_block_steps",
    "history_sigma",
    "given_frames",
    "stop",
    "rolling_blocks",
    "stream_chunks",
    "overlap_frames",
)
"""Keys of ``SamplingSection`` that mean something block by block alone."""


def sampler_of(
    section: SamplingSection,
    shape: tuple[int, int, int, int],
    causal: CausalSection | None,
    dtype: torch.dtype = torch.float32,
) -> Sampler:
    """The sampler that a recipe describes, for a network whose ``causal`` section is this (None: it is bidirectional).

    Raises UserError for a setting that the network cannot follow, and where frames and blocks do not fit.
    """
    if causal is not None and section.rolling_blocks > 1:
        return Rolling.of(section, shape, causal, dtype)
    if causal is not None:
        return SelfForcing.of(section, shape, causal, dtype)
    for name in OF_CAUSAL_NETWORKS:
        value, default = getattr(section, name), SamplingSection.model_fields[name].default
        if value != default:
            raise UserError(
                f"sampling.{name} = {value}: the network sees the whole clip at once, and only a causal one makes it "
                f"block by block; write {'null' if default is None else default}, or give the network a causal section"
            )
    return FewStep.of(section, shape, dtype)

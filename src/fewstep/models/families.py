"""The model families, written out, and the one place that builds a network from a recipe."""

from __future__ import annotations

import torch

from fewstep.models.wan.causal import CausalWan
from fewstep.models.wan.model import Wan
from fewstep.models.wan.sizes import WanSection

FAMILIES = (Wan,)
"""Every family; each is a class built from its section."""

ModelSection = WanSection
"""The ``model`` section of a recipe: the union of the families' sections, told apart by ``family``."""


def build(section: ModelSection, device: torch.device | str = "cpu") -> Wan:
    """The network of the section, causal or not, in float32 on ``device`` ("meta" for one without storage).

    Its weights are undefined memory, no random stream is touched: ``initialise`` it or load a state dict.
    """
    with torch.device("meta"):
        network = CausalWan(section) if section.causal else Wan(section)
    return network.to_empty(device=device)

"""A network that counts how often it is called."""

from __future__ import annotations

from typing import Any

from fewstep.models.api import Geometry
from fewstep.models.blocks import CausalSection
from fewstep.models.kv_cache import KVCache
from fewstep.shapes import Latents, Sigma, Tokens


class Counted:
    """The contract of ``model``, causal or not, and ``num_rows``: rows of all calls, those for the history among them.

    A call of a causal network runs one block; one of a bidirectional network runs the whole clip.
    """

    def __init__(self, model: Any):
        self.model, self.num_rows = model, 0

    @property
    def geometry(self) -> Geometry:
        return self.model.geometry

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def width(self) -> int:
        return self.model.width

    @property
    def causal(self) -> CausalSection | None:
        """None for a network that sees the whole clip."""
        return getattr(self.model, "causal", None)

    def velocity(self, x_t: Latents, sigma: Sigma, cond: Any, **forced: Any) -> Latents:
        self.num_rows += len(x_t)
        return self.model.velocity(x_t, sigma, cond, **forced)

    def features(self, x_t: Latents, sigma: Sigma, cond: Any, layers: tuple[int, ...]) -> tuple[Tokens, ...]:
        return self.model.features(x_t, sigma, cond, layers)

    def tell(self, cond: Any) -> Any:
        return self.model.tell(cond)

    def prefill(self, x0: Latents, cond: Any, sigma: Sigma | None = None, history: KVCache | None = None) -> KVCache:
        self.num_rows += len(x0)
        return self.model.prefill(x0, cond, sigma, history)

    def velocity_given(
        self, x_t: Latents, sigma: Sigma, cond: Any, history: KVCache | None, first_block: int, **how: Any
    ) -> Latents:
        self.num_rows += len(x_t)
        return self.model.velocity_given(x_t, sigma, cond, history, first_block, **how)

    def append(self, history: KVCache | None, x0: Latents, cond: Any, sigma: Sigma | None = None) -> KVCache:
        self.num_rows += len(x0)
        return self.model.append(history, x0, cond, sigma)

"""The contract of a model family.

Methods and rollouts see a network only through these names. The clean prediction follows from ``flow.path`` and is
never overridden. The conditioning record is the family's own and opaque to everybody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fewstep.models.blocks import CausalSection
from fewstep.models.kv_cache import KVCache
from fewstep.shapes import Latents, Sigma, Tokens


@dataclass(frozen=True)
class Geometry:
    """What a family's latents look like.

    channels: latent channels. patch: latent frames, rows and columns that one token covers. compression: pixels per
    latent frame, row and column (1, 1, 1 for the identity codec).
    """

    channels: int
    patch: tuple[int, int, int]
    compression: tuple[int, int, int] = (1, 1, 1)

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Tokens of one latent frame of ``height`` x ``width``. Raises ValueError where the patch does not fit."""
        _, rows, columns = self.patch
        if height % rows or width % columns:
            raise ValueError(f"latents of {height}x{width} cannot be cut into patches of {rows}x{columns}")
        return (height // rows) * (width // columns)


@runtime_checkable
class FlowModel(Protocol):
    """A network that predicts the velocity ``noise - x0`` of noised latents."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def num_layers(self) -> int:
        """Blocks whose features can be read."""
        ...

    @property
    def width(self) -> int:
        """Width of a feature token."""
        ...

    def velocity(self, x_t: Latents, sigma: Sigma, cond: Any) -> Latents:
        """The velocity at ``x_t``; float32 or wider, whatever the network computes in."""
        ...

    def features(self, x_t: Latents, sigma: Sigma, cond: Any, layers: tuple[int, ...]) -> tuple[Tokens, ...]:
        """The token features after each of the blocks ``layers`` (ascending, from 0); nothing runs after the last."""
        ...


@runtime_checkable
class CausalFlowModel(FlowModel, Protocol):
    """A video network whose blocks of frames see only the blocks before them.

    Training: ``velocity`` with ``clean=None`` is diffusion forcing (block i sees blocks <= i of the same sequence),
    with ``clean`` teacher forcing (noisy block i sees itself and the clean blocks < i). Sampling: ``prefill`` or
    ``append`` build the history, ``velocity_given`` denoises against it. A history is a value, None before the first
    block. Block numbers and positions count from the beginning of the clip.
    """

    @property
    def causal(self) -> CausalSection:
        """How clips are cut into blocks, and how far back a block sees."""
        ...

    def velocity(
        self, x_t: Latents, sigma: Sigma, cond: Any, *, clean: Latents | None = None, clean_sigma: Sigma | None = None
    ) -> Latents:
        """The velocity of every (noisy) frame; ``clean_sigma`` is the noise level of the history, 0 when left out."""
        ...

    def tell(self, cond: Any) -> Any:
        """The conditioning worked out for every layer, to be used in place of ``cond`` as long as it stays the same."""
        ...

    def prefill(self, x0: Latents, cond: Any, sigma: Sigma | None = None, history: KVCache | None = None) -> KVCache:
        """The history of all blocks of ``x0`` at once, after those of ``history``; keeps every frame."""
        ...

    def velocity_given(
        self,
        x_t: Latents,
        sigma: Sigma,
        cond: Any,
        history: KVCache | None,
        first_block: int,
        *,
        together: bool = False,
    ) -> Latents:
        """The velocity of one block, or of many blocks in parallel, each against the blocks before it alone (which
        needs a history of all of them but the last). together: all frames are one block, however many they are."""
        ...

    def append(self, history: KVCache | None, x0: Latents, cond: Any, sigma: Sigma | None = None) -> KVCache:
        """The history with one more finished block; evicts by window and sink."""
        ...

"""The causal Wan network: the weights of the bidirectional one, blocks of frames that see those before them.

Training: ``velocity`` is diffusion forcing (arXiv:2407.01392) and, with ``clean``, teacher forcing. Sampling and the
student's updates: a history of finished frames, and blocks that are denoised against it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fewstep.models.attention import Mask, Part, visibility
from fewstep.models.kv_cache import KeyValue, KVCache
from fewstep.models.rope import Rotation
from fewstep.models.wan.block import Sight
from fewstep.models.wan.model import Entered, Wan
from fewstep.models.wan.sizes import WanSection
from fewstep.shapes import Latents, Sigma, Tokens


class CausalWan(Wan):
    """The network of a ``WanSection`` with a ``causal`` part. Block numbers and positions count from the clip's start.

    A history is None before the first block. It is handed in and returned; the network keeps nothing.
    """

    def __init__(self, section: WanSection):
        super().__init__(section)
        assert section.causal is not None
        self.causal = section.causal

    def velocity(
        self, x_t: Latents, sigma: Sigma, cond: Any, *, clean: Latents | None = None, clean_sigma: Sigma | None = None
    ) -> Latents:
        """The velocity of every frame; block i sees the blocks before it in ``clean`` (teacher forcing) or, without,
        in ``x_t`` itself (diffusion forcing). clean_sigma: the noise level of ``clean``, 0 when left out."""
        if clean is None:
            return self._diffusion_forced(x_t, sigma, cond)
        clean_sigma = torch.zeros_like(sigma) if clean_sigma is None else clean_sigma
        if self._one_by_one:
            history = self._prefill(clean, cond, clean_sigma, None)
            return self._given(x_t, sigma, cond, history, 0)
        both = self._enter(torch.cat([clean, x_t], 1), torch.cat([clean_sigma, sigma], 1), cond)
        sizes = self.causal.partition(x_t.shape[1])
        parts = (Part("causal", 0, len(sizes)), Part("probe", 0, len(sizes)))
        half = self._turn((x_t.shape[1], *both.grid[1:]), 0, x_t.device)
        turn = Rotation(*(torch.cat([table, table]) for table in half))
        return self._velocity(both, Sight(turn, self._visible(both, sizes, parts, num_query_parts=2)), x_t.shape)

    def features(self, x_t: Latents, sigma: Sigma, cond: Any, layers: tuple[int, ...]) -> tuple[Tokens, ...]:
        """The tokens after each of the blocks ``layers`` under diffusion forcing; nothing runs after the last.

        Raises ValueError unless ``layers`` are ascending block numbers from 0.
        """
        if self._one_by_one:
            raise ValueError("features of a clip need absolute positions, or a window without a sink")
        entered = self._enter(x_t, sigma, cond)
        return self._features(entered, self._forced(entered), layers)

    def prefill(self, x0: Latents, cond: Any, sigma: Sigma | None = None, history: KVCache | None = None) -> KVCache:
        """The history of all blocks of ``x0`` at once (diffusion forcing at ``sigma``, 0 when left out), after those of
        ``history``; keeps every frame of both."""
        sigma = torch.zeros_like(x0[:, :, 0, 0, 0]) if sigma is None else sigma
        return self._prefill(x0, cond, sigma, history)

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
        """The velocity of one block, or of many in parallel, each against the blocks before it in ``history``.

        ``first_block`` is the number of the first. Many need a history that goes on to the beginning of the last one;
        where a frame that one of them sees was evicted from it, ValueError is raised.
        together: the frames of ``x_t`` see each other, as one block however many there are (rolling forcing).
        """
        return self._given(x_t, sigma, cond, history, first_block, together)

    def append(self, history: KVCache | None, x0: Latents, cond: Any, sigma: Sigma | None = None) -> KVCache:
        """The history with one more finished block; frames that no later block sees are evicted."""
        sigma = torch.zeros_like(x0[:, :, 0, 0, 0]) if sigma is None else sigma
        return self._evict(self._append(history, x0, cond, sigma))

    @property
    def _one_by_one(self) -> bool:
        """Whether the positions of what a block sees are its own, so that blocks cannot share a forward."""
        return self.causal.positions == "reindexed" and self.causal.sink > 0

    @property
    def _kept_unturned(self) -> bool:
        return self.causal.positions == "reindexed"

    def _diffusion_forced(self, x_t: Latents, sigma: Sigma, cond: Any) -> Latents:
        if not self._one_by_one:
            entered = self._enter(x_t, sigma, cond)
            return self._velocity(entered, self._forced(entered), x_t.shape)
        history, made = None, []
        for block, (part, level) in enumerate(self._cut(x_t, sigma)):
            made.append(self._given(part, level, cond, history, block))
            history = self._append(history, part, cond, level)
        return torch.cat(made, 1)

    def _forced(self, entered: Entered, past: KVCache | None = None, first: int = 0) -> Sight:
        """Blocks from number ``first`` on, which see those before them: in the past as far as it is kept, and here."""
        kept, device = 0 if past is None else past.kept, entered.tokens.device
        sizes = (*_frame_by_frame(kept), *self.causal.partition(entered.tokens.shape[1], first))
        parts = tuple(Part("causal", a, b) for a, b in ((0, kept), (kept, len(sizes))) if b > a)
        key_turn = self._turn((sum(sizes), *entered.grid[1:]), 0, device) if self._kept_unturned else None
        start = kept if self._kept_unturned else self.causal.start(first)
        return Sight(self._turn(entered.grid, start, device), self._visible(entered, sizes, parts), key_turn)

    def _visible(self, entered: Entered, sizes: tuple[int, ...], parts: tuple[Part, ...], num_query_parts: int = 1):
        causal = self.causal
        mask = Mask(sizes, entered.frame_tokens, parts, num_query_parts, causal.window, causal.sink)
        return visibility(mask, entered.tokens.device)

    def _prefill(self, x0: Latents, cond: Any, sigma: Sigma, history: KVCache | None) -> KVCache:
        if self._one_by_one:
            before = self._blocks_in(history)
            for part, level in self._cut(x0, sigma, before):
                history = self._append(history, part, cond, level)
            assert history is not None
            return history
        first, entered = self._blocks_in(history), self._enter(x0, sigma, cond)
        past = self._seen(history, self.causal.start(first), self.causal.partition(x0.shape[1], first)[0])
        made = self._made(entered, self._forced(entered, past, first), past and past.layers)
        return self._after(history, made, entered)

    def _given(
        self, x_t: Latents, sigma: Sigma, cond: Any, history: KVCache | None, first: int, together: bool = False
    ) -> Latents:
        sizes = (x_t.shape[1],) if together else self.causal.partition(x_t.shape[1], first)
        if len(sizes) == 1:
            entered = self._enter(x_t, sigma, cond)
            past = self._seen(history, self.causal.start(first), x_t.shape[1])
            sight = self._alone(entered, past, self.causal.start(first))
            return self._velocity(entered, sight, x_t.shape, past and past.layers)
        if self._one_by_one:
            cut = enumerate(self._cut(x_t, sigma, first), first)
            return torch.cat([self._given(part, level, cond, history, block) for block, (part, level) in cut], 1)
        return self._in_parallel(x_t, sigma, cond, history, first, sizes)

    def _in_parallel(
        self, x_t: Latents, sigma: Sigma, cond: Any, history: KVCache | None, first: int, sizes: tuple[int, ...]
    ) -> Latents:
        """Blocks that see the history alone, each as far as the block before it."""
        start, last = self.causal.start(first), self.causal.start(first + len(sizes) - 1)
        past = self._seen(history, last, sizes[0], since=start)
        if past is None:
            raise ValueError(f"{len(sizes)} blocks in parallel need a history of the blocks before them")
        entered, kept = self._enter(x_t, sigma, cond), past.kept - (last - start)
        blocks, num = (*_frame_by_frame(kept), *sizes), kept + len(sizes)
        visible = self._visible(entered, blocks, (Part("causal", 0, num - 1), Part("probe", kept, num)))
        turn, key_turn = self._turn(entered.grid, start, x_t.device), None
        if self._kept_unturned:
            turn = self._turn(entered.grid, kept, x_t.device)
            before = self._turn((past.kept, *entered.grid[1:]), 0, x_t.device)
            key_turn = Rotation(*(torch.cat(pair) for pair in zip(before, turn, strict=True)))
        return self._velocity(entered, Sight(turn, visible, key_turn), x_t.shape, past.layers)

    def _append(self, history: KVCache | None, x0: Latents, cond: Any, sigma: Sigma) -> KVCache:
        """One block more; nothing is evicted."""
        start = 0 if history is None else history.num_frames
        entered = self._enter(x0, sigma, cond)
        past = self._seen(history, start, x0.shape[1])
        made = self._made(entered, self._alone(entered, past, start), past and past.layers)
        return self._after(history, made, entered)

    def _made(self, entered: Entered, sight: Sight, past: tuple[KeyValue, ...] | None = None) -> tuple[KeyValue, ...]:
        """The keys and values of what entered, in every block of the network."""
        return tuple(made for _, made in self._through(entered, sight, past))

    def _alone(self, entered: Entered, past: KVCache | None, start: int) -> Sight:
        """One block that sees all that is kept."""
        device, kept = entered.tokens.device, 0 if past is None else past.kept
        if not self._kept_unturned:
            return Sight(self._turn(entered.grid, start, device))
        frames = kept + entered.tokens.shape[1]
        return Sight(self._turn(entered.grid, kept, device), None, self._turn((frames, *entered.grid[1:]), 0, device))

    def _seen(self, history: KVCache | None, start: int, frames: int, since: int | None = None) -> KVCache | None:
        """What a block of ``frames`` frames sees that begins at ``since``, and all from there to ``start``, where it
        begins when ``since`` is left out."""
        if history is None or start == 0:
            return None
        recent, since = self.causal.recent(frames), start if since is None else since
        return history.seen(start, self.causal.sink, None if recent is None else recent + start - since)

    def _evict(self, history: KVCache) -> KVCache:
        return history.seen(history.num_frames, self.causal.sink, self.causal.recent(self.causal.block_frames))

    def _after(self, history: KVCache | None, made: tuple[KeyValue, ...], entered: Entered) -> KVCache:
        if history is None:
            return KVCache(made, entered.grid[0], entered.frame_tokens)
        return history.then(made)

    def _blocks_in(self, history: KVCache | None) -> int:
        return 0 if history is None else self.causal.block_from(history.num_frames)

    def _cut(self, x_t: Latents, sigma: Sigma, first: int = 0) -> list[tuple[Tensor, Tensor]]:
        sizes = self.causal.partition(x_t.shape[1], first)
        return list(zip(x_t.split(sizes, 1), sigma.split(sizes, 1), strict=True))


def _frame_by_frame(num_frames: int) -> tuple[int, ...]:
    """A history in a mask, from which evicted frames are left out: how it was cut into blocks no longer matters, since
    all of it lies before the blocks that ask, and the distance to frames in sight is what it was."""
    return (1,) * num_frames

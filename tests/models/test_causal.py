"""The causal network against itself: masks, histories and blocks are three ways to compute one thing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.errors import UserError
from fewstep.models import attention as attention_module
from fewstep.models.attention import Mask, Part, dense
from fewstep.models.blocks import CausalSection, spread
from fewstep.models.kv_cache import KVCache
from fewstep.models.wan.causal import CausalWan
from fewstep.records import concat, rows
from tests.models.tiny import inputs, relative, tiny_section, tiny_wan

FORMS = [
    *({"block_frames": n} for n in (1, 2, 3)),
    {"block_frames": 2, "first_frame_alone": True},
    {"block_frames": 3, "first_frame_alone": True},
    {"block_frames": 1, "window": 3},
    {"block_frames": 1, "window": 3, "sink": 1},
    {"block_frames": 2, "window": 4, "sink": 1},
    {"block_frames": 3, "window": 6, "sink": 3},
    {"block_frames": 2, "window": 3, "first_frame_alone": True},
    {"block_frames": 2, "window": 5, "sink": 1, "first_frame_alone": True, "positions": "reindexed"},
    {"block_frames": 1, "window": 3, "positions": "reindexed"},
    {"block_frames": 2, "window": 4, "sink": 2, "positions": "reindexed"},
]


def causal(dtype: torch.dtype = torch.float64, seed: int = 0, **form: Any) -> CausalWan:
    network = tiny_wan(tiny_section(causal=CausalSection(**({"block_frames": 2} | form))), dtype, seed)
    assert isinstance(network, CausalWan)
    return network


def frames_of(form: dict[str, Any]) -> int:
    """Enough blocks that every window overflows at least three times."""
    n = form["block_frames"]
    return int(form.get("first_frame_alone", False)) + n * {1: 9, 2: 5, 3: 4}[n]


def clip(num_frames: int, seed: int = 1, b: int = 2, h: int = 4, w: int = 4) -> tuple[Tensor, Tensor, Any]:
    return inputs(b, num_frames, h, w, text=7, dtype=torch.float64, seed=seed)


def per_block(form: CausalSection, num_frames: int, seed: int = 5) -> Tensor:
    sizes = form.partition(num_frames)
    level = torch.rand(2, len(sizes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return spread(level, sizes)


def streamed(network: CausalWan, x_t: Tensor, sigma: Tensor, cond: Any, clean: Tensor, clean_sigma: Tensor) -> Tensor:
    """Block by block on a rolling history."""
    sizes = network.causal.partition(x_t.shape[1])
    history, found, start = None, [], 0
    for block, size in enumerate(sizes):
        span = slice(start, start + size)
        found.append(network.velocity_given(x_t[:, span], sigma[:, span], cond, history, block))
        history = network.append(history, clean[:, span], cond, clean_sigma[:, span])
        start += size
    return torch.cat(found, 1)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_teacher_forcing_equals_every_block_against_the_prefilled_history(form):
    """Invariants 9, 14, 16, 18, 23, 26: teacher forcing == a rolled cache == the parallel forward, at any sigma."""
    network, num_frames = causal(**form), frames_of(form)
    x_t, _, cond = clip(num_frames)
    clean = clip(num_frames, seed=2)[0]
    for clean_sigma in (torch.zeros(2, num_frames, dtype=torch.float64), per_block(network.causal, num_frames, 6)):
        sigma = per_block(network.causal, num_frames)
        forced = network.velocity(x_t, sigma, cond, clean=clean, clean_sigma=clean_sigma)
        assert relative(streamed(network, x_t, sigma, cond, clean, clean_sigma), forced) < 1e-10
        history = network.prefill(clean, cond, clean_sigma)
        assert history.num_frames == history.kept == num_frames
        assert relative(network.velocity_given(x_t, sigma, cond, history, 0), forced) < 1e-10
        later = network.causal.start(2)
        part = network.velocity_given(x_t[:, later:], sigma[:, later:], cond, history, 2)
        assert relative(part, forced[:, later:]) < 1e-10


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_diffusion_forcing_equals_a_cache_that_every_block_enters_with_its_own_sigma(form):
    """Invariants 13, 16."""
    network, num_frames = causal(**form), frames_of(form)
    x_t, _, cond = clip(num_frames)
    sigma = per_block(network.causal, num_frames)
    whole = network.velocity(x_t, sigma, cond)
    assert relative(streamed(network, x_t, sigma, cond, x_t, sigma), whole) < 1e-10


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_prefill_in_two_parts_equals_one(form):
    network, num_frames = causal(**form), frames_of(form)
    x0, _, cond = clip(num_frames)
    cut = network.causal.start(2)
    both = network.prefill(x0[:, cut:], cond, None, network.prefill(x0[:, :cut], cond))
    assert same(both, network.prefill(x0, cond))


def same(one: KVCache, other: KVCache, tolerance: float = 1e-11) -> bool:
    assert (one.num_frames, one.kept) == (other.num_frames, other.kept)
    pairs = zip(one.layers, other.layers, strict=True)
    return all(relative(a, b) < tolerance for x, y in pairs for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("form", [{"block_frames": 1}, {"block_frames": 2}], ids=str)
def test_a_noisy_block_depends_on_earlier_clean_blocks_and_on_itself_alone(form):
    """Invariant 10: the Jacobian is zero exactly where the mask says so, and nowhere else."""
    network = causal(**form)
    num_frames = 3 * form["block_frames"]
    x_t, sigma, cond = clip(num_frames)
    clean = clip(num_frames, seed=2)[0]
    sizes, n = network.causal.partition(num_frames), form["block_frames"]
    for block in range(len(sizes)):
        x_t.requires_grad_(), clean.requires_grad_()
        velocity = network.velocity(x_t, sigma, cond, clean=clean)
        to_noisy, to_clean = torch.autograd.grad(velocity[:, block * n : block * n + n].square().sum(), (x_t, clean))
        noisy = to_noisy.abs().flatten(2).amax((0, 2)).view(-1, n).amax(1)
        assert [bool(value > 0) for value in noisy] == [i == block for i in range(len(sizes))]
        given = to_clean.abs().flatten(2).amax((0, 2)).view(-1, n).amax(1)
        assert [bool(value > 0) for value in given] == [i < block for i in range(len(sizes))]


def test_the_clean_half_of_teacher_forcing_is_a_pass_of_diffusion_forcing_over_clean():
    """Invariants 11, 12: what the last layer sees of clean is the prefill's; a clean prefix and one noisy block under
    diffusion forcing give that block's teacher-forced velocity."""
    network = causal(block_frames=2)
    x_t, _, cond = clip(6)
    clean = clip(6, seed=2)[0]
    sigma = per_block(network.causal, 6)
    forced = network.velocity(x_t, sigma, cond, clean=clean)
    for block in range(3):
        mixed = torch.cat([clean[:, : 2 * block], x_t[:, 2 * block : 2 * block + 2]], 1)
        levels = torch.cat([torch.zeros_like(sigma[:, : 2 * block]), sigma[:, 2 * block : 2 * block + 2]], 1)
        found = network.velocity(mixed, levels, cond)[:, -2:]
        assert relative(found, forced[:, 2 * block : 2 * block + 2]) < 1e-10


def test_one_block_as_long_as_the_clip_is_the_bidirectional_network():
    """Invariant 15."""
    network = causal(block_frames=5)
    given = clip(5)
    assert relative(network.velocity(*given), tiny_wan(dtype=torch.float64).velocity(*given)) < 1e-12
    layers = network.features(*given, (0, 2)), tiny_wan(dtype=torch.float64).features(*given, (0, 2))
    assert all(relative(*pair) < 1e-12 for pair in zip(*layers, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "frames", [pytest.param(n, marks=[pytest.mark.thorough] * (n != 129)) for n in (127, 128, 129)]
)
def test_any_token_count_through_the_padded_kernel_equals_the_dense_mask(frames, monkeypatch, unchecked_shapes):
    """Invariant 17: 2x2 latents, one token a frame, through FlexAttention."""
    network = causal(torch.float32, block_frames=1, window=7, sink=2)
    x_t, sigma, cond = inputs(1, frames, 2, 2, text=3)
    clean = inputs(1, frames, 2, 2, text=3, seed=2)[0]
    with torch.no_grad():
        expected = network.velocity(x_t, sigma, cond, clean=clean)
        monkeypatch.setitem(attention_module.MASKED_KERNEL, "cpu", "flex")
        attention_module.visibility.cache_clear()
        found = network.velocity(x_t, sigma, cond, clean=clean)
    attention_module.visibility.cache_clear()
    assert relative(found, expected) < 2e-5


@pytest.mark.parametrize(("blocks", "n"), [(7, 3), (5, 2), (4, 1)])
def test_the_masks_hold_as_many_pairs_as_they_should(blocks, n):
    """Invariant 19: block_tokens^2 B (B + 1) for teacher forcing, half of it for diffusion forcing."""
    sizes, tokens = (n,) * blocks, 3 * n
    forced = Mask(sizes, 3, (Part("causal", 0, blocks), Part("probe", 0, blocks)), num_query_parts=2)
    assert dense(forced).sum() == tokens**2 * blocks * (blocks + 1)
    assert dense(Mask(sizes, 3, (Part("causal", 0, blocks),))).sum() == tokens**2 * blocks * (blocks + 1) // 2


def test_alternating_shapes_and_modes_equal_a_fresh_network_each_time():
    """Invariant 20."""
    network = causal(block_frames=1, window=3, sink=1)
    for num_frames, h in ((5, 4), (3, 8), (7, 4), (5, 8)):
        x_t, sigma, cond = clip(num_frames, h=h)
        for forced in ({}, {"clean": x_t.flip(0)}):
            fresh = causal(block_frames=1, window=3, sink=1).velocity(x_t, sigma, cond, **forced)
            assert torch.equal(network.velocity(x_t, sigma, cond, **forced), fresh)
        assert same(network.prefill(x_t, cond), causal(block_frames=1, window=3, sink=1).prefill(x_t, cond), 1e-15)


@pytest.mark.parametrize(
    "form", [{"block_frames": 2}, {"block_frames": 1, "window": 3, "sink": 1, "positions": "reindexed"}], ids=str
)
def test_rows_of_a_batch_do_not_know_each_other(form):
    """Invariant 22."""
    network = causal(**form)
    x_t, sigma, cond = clip(6)
    clean = clip(6, seed=2)[0]
    both = streamed(network, x_t, sigma, cond, clean, torch.zeros_like(sigma))
    for row in (slice(0, 1), slice(1, 2)):
        alone = [x_t[row], sigma[row], rows(cond, row), clean[row], torch.zeros_like(sigma[row])]
        assert relative(both[row], streamed(network, *alone)) < 1e-11


def test_a_denoising_step_leaves_no_trace_in_the_history():
    """Invariants 24, 25: repeating a step changes nothing, and what other clips did is not there."""
    network = causal(block_frames=2, window=4)
    x_t, sigma, cond = clip(4)
    history = network.append(None, x_t[:, :2], cond)
    before = [tensor.clone() for layer in history.layers for tensor in layer]
    once = network.velocity_given(x_t[:, 2:], sigma[:, 2:], cond, history, 1)
    for _ in range(3):
        assert torch.equal(network.velocity_given(x_t[:, 2:], sigma[:, 2:], cond, history, 1), once)
    garbage = network.append(network.append(None, 100 * x_t[:, :2], cond), x_t[:, 2:], cond)
    assert garbage.num_frames == 4
    after = [tensor for layer in history.layers for tensor in layer]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert same(history, network.append(None, x_t[:, :2], cond), 1e-15)


@pytest.mark.parametrize(("window", "block"), [(3, 1), (4, 2), (6, 3)])
@pytest.mark.parametrize("positions", ["absolute", "reindexed"])
def test_a_stream_of_many_windows_equals_the_windowed_mask(window, block, positions):
    """Invariant 26, over more than three windows."""
    network = causal(block_frames=block, window=window, positions=positions)
    num_frames = 4 * window - 4 * window % block
    x_t, _, cond = clip(num_frames, h=2, w=2)
    sigma = per_block(network.causal, num_frames)
    masked = causal(block_frames=block, window=window).velocity(x_t, sigma, cond, clean=x_t)
    assert relative(streamed(network, x_t, sigma, cond, x_t, torch.zeros_like(sigma)), masked) < 1e-10


def test_a_stream_that_reindexes_with_a_sink_equals_its_training_form_and_not_absolute_positions():
    """Invariant 26, last part: past eviction, with a sink."""
    form = {"block_frames": 1, "window": 4, "sink": 2}
    network = causal(**form, positions="reindexed")
    x_t, _, cond = clip(12, h=2, w=2)
    sigma = per_block(network.causal, 12)
    found = streamed(network, x_t, sigma, cond, x_t, torch.zeros_like(sigma))
    assert relative(network.velocity(x_t, sigma, cond, clean=x_t), found) < 1e-10
    absolute = causal(**form).velocity(x_t, sigma, cond, clean=x_t)
    assert relative(absolute[:, :4], found[:, :4]) < 1e-10
    assert relative(absolute[:, 6:], found[:, 6:]) > 1e-4


@pytest.mark.parametrize("positions", ["absolute", "reindexed"])
def test_sink_frames_stay_and_the_history_keeps_its_size(positions):
    """Invariants 27, 28: the sink's keys never change, memory is constant, no position comes to an end."""
    network = causal(block_frames=1, window=4, sink=2, positions=positions)
    x_t, _, cond = clip(1, h=2, w=2)
    history = network.append(network.append(None, x_t, cond), 0.5 * x_t, cond)
    first = [tensor[:, :2].clone() for layer in history.layers for tensor in layer]
    for step in range(30):
        history = network.append(history, x_t * (1 + step), cond)
        assert (history.num_frames, history.kept) == (3 + step, 3)
        now = [tensor[:, :2] for layer in history.layers for tensor in layer]
        assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True))


def test_what_was_evicted_cannot_be_asked_for():
    """Invariant 28: a clear error."""
    network = causal(block_frames=1, window=3)
    x_t, sigma, cond = clip(6, h=2, w=2)
    history = None
    for frame in range(6):
        history = network.append(history, x_t[:, frame : frame + 1], cond)
    with pytest.raises(ValueError, match=r"frame 3 sees frames from 1 on, .* of 6 frames the history keeps the last 2"):
        network.velocity_given(x_t[:, :1], sigma[:, :1], cond, history, 3)
    with pytest.raises(ValueError, match="keeps the last 2"):
        network.velocity_given(x_t[:, :4], sigma[:, :4], cond, history, 2)
    with pytest.raises(ValueError, match="frame 9 sees frames from 7 on"):
        network.velocity_given(x_t[:, :1], sigma[:, :1], cond, history, 9)


@pytest.mark.parametrize("num_before", [2, 3, 5])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_blocks_in_parallel_after_a_history_that_has_evicted_equal_them_one_by_one(form, num_before):
    """Invariant 23 past eviction: three blocks after 2, 3 or 5 that a rolling history has seen. A prefill of the first
    two goes on from what is kept, and all three in parallel see what each of them sees alone."""
    network = causal(**form)
    start = network.causal.start(num_before)
    num_frames = start + 3 * form["block_frames"]
    x_t, _, cond = clip(num_frames, h=2, w=2)
    clean = clip(num_frames, seed=2, h=2, w=2)[0]
    sigma, clean_sigma = per_block(network.causal, num_frames), per_block(network.causal, num_frames, 6)
    rolled, at = None, 0
    for size in network.causal.partition(start):
        rolled = network.append(rolled, clean[:, at : at + size], cond, clean_sigma[:, at : at + size])
        at += size
    between = slice(start, start + 2 * form["block_frames"])
    history = network.prefill(clean[:, between], cond, clean_sigma[:, between], rolled)
    assert history.num_frames == between.stop
    assert history.kept == rolled.kept + 2 * form["block_frames"]
    found = network.velocity_given(x_t[:, start:], sigma[:, start:], cond, history, num_before)
    expected = streamed(network, x_t, sigma, cond, clean, clean_sigma)[:, start:]
    assert relative(found, expected) < 1e-10
    last = network.velocity_given(x_t[:, between.stop :], sigma[:, between.stop :], cond, history, num_before + 2)
    assert relative(last, expected[:, 2 * form["block_frames"] :]) < 1e-10


def test_masks_past_eviction_do_not_know_how_far_a_stream_has_come():
    """So that a chunk late in a stream finds the masks, and the compiled kernels, of the one before it."""
    network = causal(block_frames=1, window=4, sink=1)
    x_t, sigma, cond = clip(3, h=2, w=2)
    history, misses = None, []
    attention_module.visibility.cache_clear()
    for block in range(9):
        network.velocity_given(x_t, sigma, cond, network.prefill(x_t[:, :2], cond, None, history), block)
        misses.append(attention_module.visibility.cache_info().misses)
        history = network.append(history, x_t[:, :1], cond)
    assert misses == [2, 4, 6, 8, 8, 8, 8, 8, 8], "a prefill and a forward for every length of the history, of 0 to 3"


@pytest.mark.parametrize("text", [7, 1])
def test_the_cache_of_the_conditioning_changes_nothing_and_a_prompt_switch_takes_effect_at_its_block(text):
    """Invariant 29."""
    network = causal(block_frames=2)
    x_t, sigma, _ = clip(6)
    one, two = (inputs(2, 1, 4, 4, text=text, dtype=torch.float64, seed=seed)[2] for seed in (1, 9))
    clean = clip(6, seed=2)[0]
    zeros = torch.zeros_like(sigma)
    for told in (lambda cond: cond, network.tell):
        found, history = [], None
        for block, cond in enumerate((one, two, two)):
            span = slice(2 * block, 2 * block + 2)
            found.append(network.velocity_given(x_t[:, span], sigma[:, span], told(cond), history, block))
            history = network.append(history, clean[:, span], told(cond))
        if told is network.tell:
            assert all(relative(a, b) < 1e-12 for a, b in zip(found, plain, strict=True))
        plain = found
    unswitched = streamed(network, x_t, sigma, one, clean, zeros)
    assert relative(plain[0], unswitched[:, :2]) < 1e-12
    assert relative(plain[1], unswitched[:, 2:4]) > 1e-3


def test_conditional_and_unconditional_rows_together_equal_two_passes():
    """Invariant 30, histories too."""
    network = causal(block_frames=2)
    x_t, sigma, cond = clip(4)
    uncond = clip(4, seed=9)[2]
    both = concat([network.tell(cond), network.tell(uncond)])
    twice = [torch.cat([x, x]) for x in (x_t, sigma)]
    history = network.append(None, twice[0][:, :2], both)
    found = network.velocity_given(twice[0][:, 2:], twice[1][:, 2:], both, history, 1)
    for half, told in zip(found.chunk(2), (cond, uncond), strict=True):
        alone = network.append(None, x_t[:, :2], told)
        assert relative(half, network.velocity_given(x_t[:, 2:], sigma[:, 2:], told, alone, 1)) < 1e-12


def test_blocks_that_go_together_see_each_other_and_the_history():
    """For rolling forcing: two frames of a frame-wise network together are one block of a chunk-wise one."""
    frames, chunks = causal(block_frames=1), causal(block_frames=2)
    x_t, sigma, cond = clip(4)
    found = frames.velocity_given(x_t[:, 2:], sigma[:, 2:], cond, frames.prefill(x_t[:, :2], cond), 2, together=True)
    first = frames.append(frames.append(None, x_t[:, :1], cond), x_t[:, 1:2], cond)
    entered = CausalWan._enter(chunks, x_t[:, 2:], sigma[:, 2:], cond)
    expected = CausalWan._velocity(
        chunks, entered, CausalWan._alone(chunks, entered, first, 2), x_t[:, 2:].shape, first.layers
    )
    assert relative(found, expected) < 1e-12
    assert relative(found[:, :1], frames.velocity_given(x_t[:, 2:3], sigma[:, 2:3], cond, first, 2)) > 1e-4


def test_two_interleaved_sessions_equal_each_alone():
    """Invariant 55."""
    network = causal(block_frames=1, window=3, sink=1, positions="reindexed")
    ones, others = clip(6, h=2, w=2), clip(6, seed=3, h=2, w=2)
    alone = [streamed(network, *given, given[0], torch.zeros_like(given[1])) for given in (ones, others)]
    histories, found = [None, None], [[], []]
    for frame in range(6):
        for session, (x_t, sigma, cond) in enumerate((ones, others)):
            span = slice(frame, frame + 1)
            found[session].append(network.velocity_given(x_t[:, span], sigma[:, span], cond, histories[session], frame))
            histories[session] = network.append(histories[session], x_t[:, span], cond)
    assert all(relative(torch.cat(mine, 1), expected) < 1e-12 for mine, expected in zip(found, alone, strict=True))


def test_frames_that_do_not_divide_are_refused_with_both_numbers():
    """Invariant 18."""
    form = CausalSection(block_frames=3)
    with pytest.raises(UserError, match=r"7 latent frames cannot be cut into blocks of 3 .* without a rest; 6 or 9"):
        form.partition(7)
    with pytest.raises(UserError, match=r"6 latent frames .* after the first, which is alone, .* 4 or 7 can"):
        CausalSection(block_frames=3, first_frame_alone=True).partition(6)
    with pytest.raises(UserError, match="0 latent frames"):
        form.partition(0)
    assert CausalSection(block_frames=3, first_frame_alone=True).partition(7) == (1, 3, 3)
    assert CausalSection(block_frames=3, first_frame_alone=True).partition(6, first_block=1) == (3, 3)
    assert [CausalSection(block_frames=3, first_frame_alone=True).start(i) for i in range(4)] == [0, 1, 4, 7]
    for alone in (False, True):
        form = CausalSection(block_frames=3, first_frame_alone=alone)
        for frame in range(12):
            assert form.block_from(frame) == next(i for i in range(20) if form.start(i) >= frame)


def test_a_window_that_cannot_hold_a_block_is_refused():
    with pytest.raises(ValueError, match=r"window 4 less sink 2 .* a block has 3: write a window of 5"):
        CausalSection(block_frames=3, window=4, sink=2)
    with pytest.raises(ValueError, match="sink 2 means nothing without a window"):
        CausalSection(block_frames=3, sink=2)


def test_a_value_a_block_becomes_a_value_a_frame():
    values = torch.tensor([[0.1, 0.2, 0.3]])
    assert torch.equal(spread(values, (1, 2, 3)), values[:, [0, 1, 1, 2, 2, 2]])


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Of every tensor that is kept for the backward pass."""
    count: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        count.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield count


@pytest.mark.parametrize("form", [FORMS[1], FORMS[4], FORMS[7], FORMS[10], FORMS[12]], ids=str)
def test_recomputing_the_blocks_changes_no_gradient_and_keeps_less(form):
    """Invariant 34: teacher forcing, and blocks in parallel against a history, for every form of cache."""
    plain, again = causal(**form), causal(**form)
    again.recompute = True
    x_t, sigma, cond = clip(2 * form["block_frames"] + form.get("first_frame_alone", False))
    clean = 0.5 * x_t.flip(1)
    kept = []
    for network in (plain, again):
        with torch.no_grad():
            history = network.prefill(clean, cond)
        with saved_bytes() as count:
            velocity = network.velocity(x_t, sigma, cond, clean=clean)
            velocity = velocity + network.velocity_given(x_t, sigma, cond, history, 0)
        velocity.square().sum().backward()
        kept.append(sum(count))
    pairs = zip(plain.named_parameters(), again.named_parameters(), strict=True)
    for (name, one), (_, other) in pairs:
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or relative(other.grad, one.grad) < 1e-10, name
    assert kept[1] < 0.4 * kept[0]

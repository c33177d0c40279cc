"""Streams: blocks as they are made, prompts that change, and no end."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from fewstep.errors import UserError
from fewstep.models.wan.conditioner import LabelCond
from fewstep.rng import Draw
from fewstep.rollout import stream as stream_module
from fewstep.rollout.self_forcing import SelfForcing
from fewstep.rollout.stream import Stream
from tests.models.tiny import relative
from tests.rollout.clips import CHW, COND, FORMS, SIGMAS, UNCOND, data, draw, frames_of, full, network, sampler

pytestmark = pytest.mark.usefixtures("unchecked_shapes")
OTHER = LabelCond(torch.tensor([1, 4]))


def whole(stream: Stream) -> torch.Tensor:
    return torch.cat(list(stream), 1)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("settings", [{}, {"history_sigma": 0.2, "first_block_sigmas": (1.0,)}], ids=str)
@torch.no_grad()
def test_a_stream_is_the_sample_of_the_same_seed_and_length_block_by_block(form, settings):
    model, made = network(form), sampler(form, **settings)
    blocks = list(Stream(made, model, COND, draw(), num_blocks=4))
    assert [block.shape[1] for block in blocks] == list(model.causal.partition(frames_of(form)))
    assert torch.equal(torch.cat(blocks, 1), made.sample(model, COND, None, draw()).x0)


@torch.no_grad()
def test_a_guided_stream_that_goes_on_from_given_frames_is_the_sample_too():
    form = {"block_frames": 2, "window": 4, "sink": 1, "first_frame_alone": True}
    model, made = network(form), sampler(form, solver="ode", guidance_scale=2.5)
    given = data(3)
    found = whole(Stream(made, model, COND, draw(), uncond=UNCOND, num_blocks=4, given=given))
    expected = made.sample(model, COND, UNCOND, draw(), given=given).x0
    assert torch.equal(torch.cat([given, found], 1), expected)


@torch.no_grad()
def test_a_stream_makes_a_block_when_it_is_asked_for_one_and_no_pass_too_many():
    model, made = network({"block_frames": 1}), sampler({"block_frames": 1})
    stream = Stream(made, model, COND, draw())
    assert model.calls == []
    next(stream)
    assert [call[0] for call in model.calls] == ["tell", "velocity", "velocity", "velocity"]
    next(stream)
    assert [call[0] for call in model.calls[4:]] == ["append", "velocity", "velocity", "velocity"]
    assert (stream.block, stream.num_frames) == (2, 2)


@torch.no_grad()
def test_two_interleaved_streams_equal_each_alone():
    """Invariant 55."""
    form = {"block_frames": 1, "window": 3, "sink": 1, "positions": "reindexed"}
    model, made = network(form), sampler(form)
    ones, others = Draw(1, "sample", 0, torch.arange(2)), Draw(2, "sample", 0, torch.arange(2))
    alone = [whole(Stream(made, model, cond, at, num_blocks=6)) for cond, at in ((COND, ones), (OTHER, others))]
    pair = zip(
        Stream(made, model, COND, ones, num_blocks=6), Stream(made, model, OTHER, others, num_blocks=6), strict=True
    )
    for side, blocks in enumerate(zip(*pair, strict=True)):
        assert torch.equal(torch.cat(blocks, 1), alone[side])


# --- without end ------------------------------------------------------------------------------------------------------


ENDLESS = [
    {"block_frames": 20, "window": 40},
    {"block_frames": 20, "window": 40, "positions": "reindexed"},
    {"block_frames": 20, "window": 41, "sink": 1},
    {"block_frames": 20, "window": 41, "sink": 1, "positions": "reindexed"},
]


@torch.no_grad()
def test_a_stream_of_2000_frames_has_constant_memory_and_no_last_position():
    """Invariants 26, 28: what is kept never grows; without a sink, positions near 2000 are as exact as re-indexed ones,
    with one they are another function."""
    made = SelfForcing((1.0,), "renoise", (20, 4, 2, 2), dtype=torch.float64)
    streams = [Stream(made, network(form, layers=1), COND, Draw(0, "sample", 0, torch.arange(2))) for form in ENDLESS]
    sizes: list[set[tuple[int, int]]] = [set() for _ in streams]
    for blocks in itertools.islice(zip(*streams, strict=True), 100):
        assert relative(blocks[0], blocks[1]) < 1e-9
        for seen, stream in zip(sizes, streams, strict=True):
            if stream.block > 2:
                seen.add(size_of(stream))
    assert [stream.num_frames for stream in streams] == [2000] * 4
    assert [[kept for kept, _ in seen] for seen in sizes] == [[20], [20], [21], [21]]
    assert relative(blocks[2], blocks[3]) > 1e-3
    assert all(0.01 < block.std() < 100 for block in blocks)


def size_of(stream: Stream) -> tuple[int, int]:
    """Frames and bytes of the history."""
    assert stream._clip is not None
    history = stream._clip._history
    assert history is not None
    return history.kept, sum(x.untyped_storage().nbytes() for layer in history.layers for x in layer)


@pytest.mark.parametrize(
    "form",
    [
        {"block_frames": 1, "window": 3},
        {"block_frames": 2, "window": 5, "sink": 1},
        {"block_frames": 1, "window": 3, "positions": "reindexed"},
        {"block_frames": 2, "window": 4, "sink": 2, "positions": "reindexed"},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_long_stream_equals_the_windowed_mask(form):
    """Invariant 26: the velocity at every block's last state, by teacher forcing on the streamed frames."""
    blocks = 14 // form["block_frames"]
    model, made = network(form), sampler(form, blocks)
    rollout = made.sample(model, COND, None, draw())
    found = whole(Stream(made, model, COND, draw(), num_blocks=blocks))
    forced = model.velocity(rollout.x_stop, rollout.sigma_stop, COND, clean=found)
    assert relative(found, rollout.x_stop - SIGMAS[-1] * forced) < 1e-10


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [FORMS[1], FORMS[5], FORMS[6]], ids=str)
@torch.no_grad()
def test_a_prompt_switch_takes_effect_at_its_block_and_not_before(form):
    """Invariant 29, which public references break: the pass that enters a block into the history is made with the
    prompt that the block was made with."""
    model, made = network(form), sampler(form)
    conds = [COND, COND, OTHER, OTHER]
    found = list(Stream(made, model, lambda block: conds[block], draw(), num_blocks=4))
    assert model.count("tell") == 2
    by_iterator = list(Stream(made, model, iter(conds), draw()))
    assert all(torch.equal(a, b) for a, b in zip(found, by_iterator, strict=True))
    plain = list(Stream(made, model, COND, draw(), num_blocks=4))
    assert all(torch.equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True))
    assert relative(found[2], plain[2]) > 1e-3
    history = None
    for block, cond in enumerate(conds[:2]):
        history = model.append(history, found[block], cond)
    assert relative(found[2], last_call(model, history, 2, OTHER)) < 1e-10


def last_call(model: Any, history: Any, block: int, cond: Any) -> torch.Tensor:
    """The block, down the ladder against the history."""
    size = model.causal.start(block + 1) - model.causal.start(block)
    x = draw().normal(f"block.{block}.noise", (size, *CHW), dtype=torch.float64)
    for step, (here, below) in enumerate(itertools.pairwise((*SIGMAS, 0.0))):
        x = x - here * model.velocity_given(x, full(here, size), cond, history, block)
        if below:
            noise = draw().normal(f"block.{block}.renoise.{step}", (size, *CHW), dtype=torch.float64)
            x = (1 - below) * x + below * noise
    return x


@pytest.mark.parametrize("form", [{"block_frames": 1}, {"block_frames": 2, "first_frame_alone": True}], ids=str)
@torch.no_grad()
def test_a_switch_that_recaches_sees_all_that_was_made_as_if_made_under_the_new_prompt(form):
    model, made = network(form), sampler(form)
    conds = [COND, COND, OTHER, OTHER]
    found = list(Stream(made, model, iter(conds), draw(), history="recache"))
    history = model.prefill(torch.cat(found[:2], 1), OTHER)
    assert relative(found[2], last_call(model, history, 2, OTHER)) < 1e-10
    history = model.append(history, found[2], OTHER)
    assert relative(found[3], last_call(model, history, 3, OTHER)) < 1e-10
    kept = list(Stream(made, model, iter(conds), draw()))
    assert relative(kept[2], found[2]) > 1e-4


@pytest.mark.parametrize(
    ("form", "in_sight"),
    [
        ({"block_frames": 1, "window": 4, "sink": 1, "positions": "reindexed"}, [0, 5, 6]),
        ({"block_frames": 2, "window": 5, "sink": 1, "positions": "reindexed"}, [0, 6]),
        ({"block_frames": 2, "window": 5, "first_frame_alone": True, "positions": "reindexed"}, [5, 6]),
        ({"block_frames": 2, "window": 2, "positions": "reindexed"}, [6]),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", [0, 2])
@torch.no_grad()
def test_a_switch_past_the_window_recaches_what_is_in_sight(form, in_sight, given):
    """Constant memory: what has been evicted is not asked for, and what is kept is the sink and the last frames."""
    model = network(form)
    made, conds = sampler(form, 9), [COND] * 7 + [OTHER] * 2
    start = data(model.causal.start(given)) if given else None
    stream = Stream(made, model, iter(conds[given:]), draw(), given=start, history="recache")
    found = ([] if start is None else list(start.split(model.causal.partition(start.shape[1]), 1))) + list(stream)
    history = None
    for block in in_sight:
        history = model.append(history, found[block], OTHER)
    assert history is not None
    after = type(history)(history.layers, model.causal.start(7), history.frame_tokens)
    assert relative(found[7], last_call(model, after, 7, OTHER)) < 1e-10
    after = model.append(after, found[7], OTHER)
    assert relative(found[8], last_call(model, after, 8, OTHER)) < 1e-10
    assert len(stream._in_sight) <= len(in_sight) + 1


@torch.no_grad()
def test_a_switch_that_recaches_keeps_the_noise_of_the_history():
    form = {"block_frames": 1}
    model, made = network(form), sampler(form, history_sigma=0.2)
    found = list(Stream(made, model, iter([COND, COND, OTHER]), draw(), history="recache"))
    seen = [0.8 * found[i] + 0.2 * draw().normal(f"block.{i}.history", (1, *CHW), dtype=torch.float64) for i in (0, 1)]
    history = model.prefill(torch.cat(seen, 1), OTHER, full(0.2, 2))
    assert relative(found[2], last_call(model, history, 2, OTHER)) < 1e-10


# --- what is refused, and the clock -----------------------------------------------------------------------------------


def test_what_cannot_be_streamed_is_refused_before_it_starts():
    model, made = network({"block_frames": 2, "window": 4}), sampler({"block_frames": 2})
    with pytest.raises(UserError, match="a window at absolute positions; write positions: reindexed"):
        Stream(made, model, COND, draw(), history="recache")
    with pytest.raises(UserError, match="3 given frames are not whole blocks of 2 frames; give 2 or 4"):
        Stream(made, model, COND, draw(), given=data(3))
    with pytest.raises(UserError, match="2 given blocks leave nothing to make of a stream of 2"):
        Stream(made, model, COND, draw(), given=data(4), num_blocks=2)


@torch.no_grad()
def test_the_clock_counts_what_the_stream_does_and_not_what_its_reader_does(monkeypatch):
    ticks = iter([10.0, 14.0, 100.0, 101.0, 500.0, 501.0])
    monkeypatch.setattr(stream_module, "perf_counter", lambda: next(ticks))
    stream = Stream(sampler(FORMS[1]), network(FORMS[1]), COND, draw(), timed=True)
    assert stream.first_frame_s is None
    assert math.isnan(stream.frames_per_s)
    for _ in range(3):
        next(stream)
    assert stream.first_frame_s == 4.0
    assert (stream.num_frames, stream.busy_s, stream.frames_per_s) == (9, 6.0, 1.5)


@torch.no_grad()
def test_a_stream_records_no_gradient():
    with torch.enable_grad():
        assert not next(Stream(sampler(FORMS[0]), network(FORMS[0]), COND, draw())).requires_grad

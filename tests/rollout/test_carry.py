"""Rollouts that go on across iterations: chunks of one stream, each from what the one before it carries."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.errors import UserError
from fewstep.models.blocks import CausalSection
from fewstep.models.wan.causal import CausalWan
from fewstep.records import assert_detached, concat, leaves, rows
from fewstep.rng import Draw
from fewstep.rollout.carry import Carry, refuse_cut
from fewstep.rollout.few_step import SamplingSection
from fewstep.rollout.rolling import Rolling
from fewstep.rollout.sampler import sampler_of
from fewstep.rollout.self_forcing import SelfForcing
from fewstep.rollout.stream import Stream
from tests.models.tiny import relative
from tests.rollout.clips import CHW, COND, SIGMAS, StreamDraw, batch, data, draw, full, gradients, network

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

FORMS: list[tuple[dict[str, Any], int, int]] = [
    ({"block_frames": 1}, 4, 2),
    ({"block_frames": 1, "window": 3}, 4, 0),
    ({"block_frames": 1, "window": 3, "sink": 1}, 4, 1),
    ({"block_frames": 1, "window": 3, "positions": "reindexed"}, 4, 1),
    ({"block_frames": 1, "window": 3, "sink": 1, "positions": "reindexed"}, 3, 2),
    ({"block_frames": 3, "window": 6}, 9, 3),
    ({"block_frames": 3, "window": 7, "sink": 2}, 6, 3),
    ({"block_frames": 3, "window": 6, "positions": "reindexed"}, 6, 0),
    ({"block_frames": 3, "window": 6, "sink": 3, "positions": "reindexed"}, 6, 3),
    ({"block_frames": 2, "window": 5, "first_frame_alone": True}, 5, 3),
]
"""How a network sees; the frames of a clip, and those of them that overlap."""
every_form = pytest.mark.parametrize(("form", "frames", "overlap"), FORMS, ids=str)
CHUNKS = 4
"""Chunks of a stream: more than a window, in every form."""


def streaming(frames: int, overlap: int, **settings: Any) -> SelfForcing:
    given = {"sigmas": SIGMAS, "solver": "renoise", "dtype": torch.float64} | settings
    return SelfForcing(shape=(frames, *CHW), stream_chunks=CHUNKS, overlap_frames=overlap, **given)


def at(iteration: int, rows: int = 2) -> Draw:
    return draw(iteration, rows)


@torch.no_grad()
def chunks(made: SelfForcing, model: CausalWan, first: int = 0, x0: Tensor | None = None) -> list[tuple[Any, Any, Any]]:
    """The iterations of one stream, which begins at iteration ``first``: the carry, the rollout, the next carry."""
    found, carry = [], None
    for iteration in range(first, first + made.stream_chunks):
        rollout, after = made.chunk(model, batch(x0), at(iteration), carry)
        found.append((carry, rollout, after))
        carry = after
    return found


def one_draw(made: SelfForcing, causal: CausalSection) -> StreamDraw:
    return StreamDraw.of(at(0), made, causal)


def whole_of(made: SelfForcing) -> tuple[int, ...]:
    """The shape of all chunks together."""
    return (made.shape[0] + (made.stream_chunks - 1) * (made.shape[0] - made.overlap_frames), *made.shape[1:])


# --- the chunks of a stream are one long clip -------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("settings", [{}, {"solver": "ode", "history_sigma": 0.2}], ids=str)
@torch.no_grad()
def test_chunks_of_one_step_are_one_long_rollout_past_eviction(form, frames, overlap, settings):
    """With a ladder of one step all stops are 0; the weights stand still, so that history is what it would be."""
    model, made = network(form), streaming(frames, overlap, **settings, sigmas=(1.0,))
    found = chunks(made, model)
    long = dataclasses.replace(made, shape=whole_of(made), stream_chunks=1, overlap_frames=0)
    expected = long(model, batch(), one_draw(made, model.causal))
    new = [rollout.x0[:, rollout.given :] for _, rollout, _ in found]
    assert relative(torch.cat(new, 1), expected.x0) < 1e-10
    assert [rollout.given for _, rollout, _ in found] == [0] + [overlap] * (CHUNKS - 1)
    start = 0
    for _, rollout, _ in found:
        assert rollout.x0.shape[1] == frames
        assert relative(rollout.x0, expected.x0[:, start : start + frames]) < 1e-10
        start += frames - overlap


@pytest.mark.parametrize(("form", "frames", "overlap"), [FORMS[2], FORMS[7], FORMS[8]], ids=str)
@torch.no_grad()
def test_chunks_that_stop_at_the_last_step_are_the_stream(form, frames, overlap, monkeypatch):
    """Whole ladders: what training makes, chunk by chunk, is what ``Stream`` hands out, block by block."""
    model, made = network(form), streaming(frames, overlap)
    monkeypatch.setattr(SelfForcing, "_drawn", lambda *_: lambda block: len(SIGMAS) - 1)
    new = torch.cat([rollout.x0[:, rollout.given :] for _, rollout, _ in chunks(made, model)], 1)
    stream = Stream(made, model, COND, one_draw(made, model.causal))
    expected = [next(stream) for _ in model.causal.partition(whole_of(made)[0])]
    assert relative(new, torch.cat(expected, 1)) < 1e-10


@torch.no_grad()
def test_every_iteration_draws_a_stop_and_noise_of_its_own():
    form, frames, overlap = FORMS[2]
    made = streaming(frames, overlap)
    stops = {rollout.stop for first in range(0, 20, CHUNKS) for _, rollout, _ in chunks(made, network(form), first)}
    assert stops == {0, 1, 2}
    one, other = (chunks(made, network(form), first)[0][1] for first in (0, CHUNKS))
    assert relative(one.x_stop, other.x_stop) > 0.1


@torch.no_grad()
def test_a_stream_is_a_function_of_its_rows_alone():
    """Invariant 22: rows, and the micro-batches that records are cut into, change nothing."""
    form, frames, overlap = FORMS[6]
    model, made = network(form), streaming(frames, overlap, history_sigma=0.1)
    carry, rollout, after = chunks(made, model)[1]
    parts = []
    for index in (slice(0, 1), slice(1, 2)):
        alone = made.chunk(model, rows(batch(), index), at(1).rows(index), rows(carry, index))
        parts.append(alone)
    for one, other in zip(leaves(concat(parts)), leaves((rollout, after)), strict=True):
        assert one.dtype == torch.int64 or relative(one, other) < 1e-11
    assert concat(parts)[1].history.num_frames == after.history.num_frames


# --- the student's update ---------------------------------------------------------------------------------------------


def by_definition(model: CausalWan, made: SelfForcing, carry: Carry, rollout: Any, iteration: int) -> Tensor:
    """x0 of the new frames, block after block on the rolling history, each with a gradient of its last call alone."""
    history, found, frame = carry.history, [rollout.x0[:, : rollout.given]], rollout.given
    block = model.causal.block_from(history.num_frames)
    while frame < rollout.x0.shape[1]:
        size = model.causal.partition(model.causal.block_frames, block)[0]
        span = slice(frame, frame + size)
        x, sigma = rollout.x_stop[:, span], rollout.sigma_stop[:, span]
        found.append(x - sigma[..., None, None, None] * model.velocity_given(x, sigma, COND, history, block))
        with torch.no_grad():
            noise = at(iteration).normal(f"block.{block}.history", (size, *CHW), dtype=torch.float64)
            level = made.history_sigma
            seen = (1 - level) * found[-1] + level * noise
            history = model.append(history, seen, COND, full(level, size))
        frame, block = frame + size, block + 1
    return torch.cat(found, 1)


@every_form
@pytest.mark.parametrize("history_sigma", [0.0, 0.2])
def test_the_update_of_a_later_chunk_is_that_of_blocks_one_by_one_on_a_detached_history(
    form, frames, overlap, history_sigma
):
    """Invariant 33 from a carried history; the overlap is no function of the weights."""
    model, made = network(form), streaming(frames, overlap, history_sigma=history_sigma, stop="block")
    weights = data(frames)
    for iteration, (carry, rollout, _) in list(enumerate(chunks(made, model)))[1::2]:
        again = made.again(model, rollout, batch(), carry)
        assert relative(again, rollout.x0) < 1e-10
        expected = by_definition(model, made, carry, rollout, iteration)
        assert relative(again, expected) < 1e-10
        found = gradients(model, (again * weights).sum())
        for name, gradient in gradients(model, (expected * weights).sum()).items():
            assert relative(found[name], gradient) < 1e-10, name
        assert torch.equal(again[:, :overlap], rollout.x0[:, :overlap])
        if overlap:
            clean = gradients(model, made.again(model, rollout, batch(), carry)[:, :overlap].sum())
            assert not any(gradient.any() for gradient in clean.values())


@torch.no_grad()
def test_a_later_chunk_costs_its_new_blocks_and_a_history_pass_for_each_and_the_last_chunk_one_less():
    form, frames, overlap = FORMS[5]
    model, made = network(form), streaming(frames, overlap, sigmas=(1.0,))
    counts = []
    carry = None
    for iteration in range(CHUNKS):
        model.calls.clear()
        rollout, after = made.chunk(model, batch(), at(iteration), carry)
        counts.append((model.count("velocity"), model.count("append"), model.count("tell")))
        model.calls.clear()
        made.again(model, rollout, batch(), carry)
        new = 2 if iteration else 3
        assert model.calls == [("prefill", 2, 3 * (new - 1)), ("velocity", 2, 3 * new)]
        carry = after
    assert counts == [(3, 3, 1), (2, 2, 1), (2, 2, 1), (2, 1, 1)]


# --- what is carried --------------------------------------------------------------------------------------------------


@every_form
@torch.no_grad()
def test_a_carry_holds_what_the_next_block_sees_and_no_more_however_long_the_stream(form, frames, overlap):
    made = dataclasses.replace(streaming(frames, overlap, sigmas=(1.0,)), stream_chunks=7)
    model = network(form)
    carries = [after for _, _, after in chunks(made, model)]
    assert carries[-1] is None
    for number, carry in enumerate(carries[:-1]):
        assert_detached(carry, "carry")
        assert carry.history.num_frames == frames + number * (frames - overlap)
        assert carry.x0.shape == (2, overlap, *CHW)
        seen = form.get("window", carry.history.num_frames + form["block_frames"]) - form["block_frames"]
        assert carry.history.kept == min(seen, carry.history.num_frames)
    sizes = [sum(tensor.nbytes for tensor in leaves(carry)) for carry in carries[:-1]]
    assert "window" not in form or len(set(sizes[2:])) == 1


@every_form
@torch.no_grad()
def test_a_carry_becomes_named_tensors_and_comes_back(form, frames, overlap):
    made, model = streaming(frames, overlap), network(form)
    carry = chunks(made, model)[1][2]
    tensors = carry.tensors()
    assert all(isinstance(tensor, Tensor) for tensor in tensors.values())
    back = Carry.of(dict(sorted(tensors.items())))
    for one, other in zip(leaves(back), leaves(carry), strict=True):
        assert torch.equal(one, other)
    assert (back.history.num_frames, back.history.frame_tokens) == (carry.history.num_frames, 4)
    for missing in ("key", "x0", "history", "history.1.values"):
        with pytest.raises(KeyError, match=missing):
            Carry.of({name: tensor for name, tensor in tensors.items() if name != missing})


@torch.no_grad()
def test_a_later_chunk_without_its_carry_is_refused_and_so_is_a_first_one_with_one():
    form, frames, overlap = FORMS[2]
    made, model = streaming(frames, overlap), network(form)
    carry = chunks(made, model)[0][2]
    with pytest.raises(ValueError, match=r"iteration 6 makes chunk 2 of 4: .* it got none"):
        made.chunk(model, batch(), at(6), None)
    with pytest.raises(ValueError, match=r"iteration 8 makes chunk 0 of 4: .* it got one"):
        made.chunk(model, batch(), at(8), carry)


# --- with the other keys ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_first_chunk_alone_continues_frames_that_are_given():
    """Invariant 39."""
    form, frames, overlap = FORMS[5]
    made, model, x0 = streaming(frames, overlap, given_frames=3), network(form), data(9)
    found = chunks(made, model, x0=x0)
    first, second = (rollout for _, rollout, _ in found[:2])
    assert first.given == second.given == 3
    assert torch.equal(first.x0[:, :3], x0[:, :3])
    assert torch.equal(second.x0[:, :3], first.x0[:, -3:])
    assert torch.equal(second.sigma_stop[:, :3], torch.zeros(2, 3, dtype=torch.float64))
    with torch.enable_grad():
        for carry, rollout, _ in found[:2]:
            assert relative(made.again(model, rollout, batch(x0), carry), rollout.x0) < 1e-10


@torch.no_grad()
def test_the_first_block_of_a_stream_alone_has_steps_of_its_own():
    form, frames, overlap = FORMS[1]
    made, model = streaming(frames, overlap, first_block_sigmas=(1.0, 0.97), sigmas=(1.0,)), network(form)
    levels = [{float(sigma) for sigma in rollout.sigma_stop[0, 0:1]} for _, rollout, _ in chunks(made, model, 4)]
    stops = [chunks(made, model, first)[0][1].sigma_stop[0, 0].item() for first in range(0, 40, CHUNKS)]
    assert set(stops) == {1.0, 0.97}
    assert levels[1:] == [{1.0}] * 3


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"overlap_frames": 2}, "overlap_frames 2 means nothing where no rollout goes on"),
        ({"stream_chunks": 3, "rolling_blocks": 2}, "stream_chunks 3: .* rolling_blocks 2"),
        ({"stream_chunks": 0}, "greater than or equal to 1"),
        ({"overlap_frames": -1, "stream_chunks": 2}, "greater than or equal to 0"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(values, words):
    with pytest.raises(ValueError, match=words):
        SamplingSection(steps=4, **values)


@pytest.mark.parametrize(
    ("form", "frames", "overlap", "words"),
    [
        ({"block_frames": 3}, 9, 4, r"overlap_frames 4 .* 9 leave 5 new .* blocks of 3; write 3 or 6"),
        ({"block_frames": 3}, 9, 9, r"leave 0 new .* write 3 or 6"),
        ({"block_frames": 3}, 9, 20, r"leave 0 new .* write 3 or 6"),
        ({"block_frames": 3}, 3, 1, r"leave 2 new .* write 0$"),
        ({"block_frames": 2, "first_frame_alone": True}, 5, 2, r"leave 3 new .* write 1 or 3"),
        ({"block_frames": 2, "first_frame_alone": True}, 5, 0, r"leave 5 new .* write 1 or 3"),
    ],
)
def test_new_frames_that_are_not_whole_blocks_are_refused_with_both_numbers(form, frames, overlap, words):
    with pytest.raises(UserError, match=words):
        refuse_cut(frames, overlap, CausalSection(**form))


def test_chunks_are_cut_in_training_and_a_sample_may_have_any_whole_blocks():
    section = SamplingSection(steps=4, stream_chunks=2, overlap_frames=6)
    assert sampler_of(section, (3, *CHW), CausalSection(block_frames=3)).shape[0] == 3
    refuse_cut(9, 6, CausalSection(block_frames=3))
    refuse_cut(9, 0, CausalSection(block_frames=3))
    refuse_cut(7, 1, CausalSection(block_frames=3, first_frame_alone=True))


def test_a_recipe_that_streams_makes_a_sampler_that_does_and_a_bidirectional_network_refuses():
    section = SamplingSection(steps=4, stream_chunks=5, overlap_frames=3)
    made = sampler_of(section, (9, *CHW), CausalSection(block_frames=3))
    assert (made.stream_chunks, made.overlap_frames) == (5, 3)
    assert sampler_of(section.with_steps(2), (9, *CHW), CausalSection(block_frames=3)).stream_chunks == 5
    with pytest.raises(UserError, match="stream_chunks = 5: the network sees the whole clip at once"):
        sampler_of(section, (9, *CHW), None)
    assert sampler_of(SamplingSection(steps=4), (9, *CHW), None).stream_chunks == 1
    assert Rolling((1.0,), "renoise", (9, *CHW)).stream_chunks == 1

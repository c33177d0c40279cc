"""Rolling forcing: blocks on different rungs of the ladder, denoised together."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.errors import UserError
from fewstep.models.blocks import CausalSection
from fewstep.models.wan.causal import CausalWan
from fewstep.models.wan.conditioner import LabelCond
from fewstep.rollout.few_step import SamplingSection
from fewstep.rollout.rolling import Rolling
from fewstep.rollout.sampler import sampler_of
from fewstep.rollout.stream import Stream
from tests.models.tiny import relative
from tests.rollout.clips import (
    CHW,
    COND,
    FORMS,
    UNCOND,
    batch,
    data,
    draw,
    frames_of,
    gradients,
    network,
    sampler,
)

pytestmark = pytest.mark.usefixtures("unchecked_shapes")
LADDER = (1.0, 0.9, 0.75, 0.5)
ROLLED: list[dict[str, Any]] = [
    {"block_frames": 1},
    {"block_frames": 2, "first_frame_alone": True},
    {"block_frames": 1, "window": 6, "sink": 1},
    {"block_frames": 1, "window": 6, "sink": 1, "positions": "reindexed"},
]


def rolling(form: dict[str, Any], rolling_blocks: int, blocks: int = 6, **settings: Any) -> Rolling:
    given = {"sigmas": LADDER, "solver": "renoise", "dtype": torch.float64} | settings
    return Rolling(shape=(frames_of(form, blocks), *CHW), rolling_blocks=rolling_blocks, **given)


def iteration_of(made: Rolling, stop: int) -> int:
    """One that rolls, and stops there."""
    steps = len(made.sigmas)
    return next(
        i
        for i in itertools.count()
        if draw(i).shared_index("rolling", 2) == 1 and draw(i).shared_index("stop", steps) == stop
    )


def written_out(
    model: CausalWan, blocks: int, width: int, *, stop: int | None = None, given: Tensor | None = None, at: Any = None
) -> tuple[Tensor, Tensor]:
    """Rolling forcing by its definition: at forward g block n stands at step g - n m, m rungs below the next one. The
    final frames; and, with a gradient, the predictions of the forwards whose number is ``stop`` modulo the steps."""
    at, causal, steps = at or draw(), model.causal, len(LADDER)
    before = 0 if given is None else given.shape[1]
    first = len(causal.partition(before)) if before else 0
    size = [causal.start(n + 1) - causal.start(n) for n in range(blocks)]
    x = {n: at.normal(f"block.{n}.noise", (size[n], *CHW), dtype=torch.float64) for n in range(first, blocks)}
    rungs, final, chosen = steps // width, {}, {}
    with torch.no_grad():
        history = CausalWan.prefill(model, given, COND) if given is not None else None
    for g in itertools.count():
        step = {n: g - (n - first) * rungs for n in range(first, blocks) if 0 <= g - (n - first) * rungs < steps}
        if not step:
            return torch.cat(list(final.values()), 1), torch.cat(list(chosen.values()), 1) if chosen else torch.empty(0)
        levels = torch.cat([torch.full((2, size[n]), LADDER[s], dtype=torch.float64) for n, s in step.items()], 1)
        states = torch.cat([x[n] for n in step], 1)
        grad = stop is not None and g % steps == stop
        with torch.set_grad_enabled(grad):
            velocity = CausalWan.velocity_given(model, states, levels, COND, history, min(step), together=True)
        parts = dict(
            zip(
                step, (states - levels[..., None, None, None] * velocity).split([size[n] for n in step], 1), strict=True
            )
        )
        for n, s in step.items():
            if grad:
                chosen[n] = parts[n]
            x0 = parts[n].detach()
            if s + 1 < steps:
                fresh = at.normal(f"block.{n}.renoise.{s}", (size[n], *CHW), dtype=torch.float64)
                x[n] = (1 - LADDER[s + 1]) * x0 + LADDER[s + 1] * fresh
            else:
                final[n] = x0
                with torch.no_grad():
                    history = CausalWan.append(model, history, x0, COND)


@pytest.mark.parametrize("form", ROLLED, ids=str)
@pytest.mark.parametrize("width", [2, 4])
@torch.no_grad()
def test_every_forward_brings_all_blocks_of_the_window_one_rung_down(form, width):
    model, made = network(form), rolling(form, width)
    found = made.sample(model, COND, None, draw())
    assert relative(found.x0, written_out(model, 6, width)[0]) < 1e-10
    sizes = model.causal.partition(frames_of(form, 6))
    calls = [call for call in model.calls if call[0] == "velocity"]
    assert len(calls) == (6 + width - 1) * 4 // width
    rungs = 4 // width
    assert [call[2] for call in calls] == [
        sum(sizes[max(g // rungs - width + 1, 0) : g // rungs + 1]) for g in range(len(calls))
    ]
    assert model.count("append") == 5


@pytest.mark.parametrize("form", [FORMS[1], FORMS[5], FORMS[6]], ids=str)
@pytest.mark.parametrize("settings", [{}, {"solver": "ode"}, {"history_sigma": 0.2}], ids=str)
@torch.no_grad()
def test_a_window_of_one_block_is_plain_streaming(form, settings):
    """Invariant 31."""
    model, made = network(form), rolling(form, 1, blocks=4, **settings)
    plain = sampler(form, sigmas=LADDER, **settings)
    assert torch.equal(made.sample(model, COND, None, draw()).x0, plain.sample(model, COND, None, draw()).x0)
    streams = [Stream(one, model, COND, draw(), num_blocks=4) for one in (made, plain)]
    assert all(torch.equal(*pair) for pair in zip(*streams, strict=True))
    pair = [one(model, batch(), draw(2)).x0 for one in (made, plain)]
    assert torch.equal(*pair)


@torch.no_grad()
def test_a_wider_window_is_another_sampler():
    model = network({"block_frames": 1})
    one, two = (rolling({"block_frames": 1}, k).sample(model, COND, None, draw()).x0 for k in (1, 2))
    assert relative(one, two) > 1e-3


@torch.no_grad()
def test_a_rolling_stream_is_the_sample_block_by_block_with_guidance_and_given_frames_too():
    form = {"block_frames": 1, "window": 6, "sink": 1}
    model = network(form)
    made, given = rolling(form, 2, guidance_scale=2.0, history_sigma=0.1), data(2)
    found = list(Stream(made, model, COND, draw(), uncond=UNCOND, num_blocks=6, given=given))
    assert torch.equal(torch.cat([given, *found], 1), made.sample(model, COND, UNCOND, draw(), given=given).x0)
    short = Stream(made, model, COND, draw(), uncond=UNCOND, given=given)
    assert torch.equal(next(short), found[0])


@torch.no_grad()
def test_a_rolling_stream_keeps_its_size_and_follows_its_prompts():
    form = {"block_frames": 1, "window": 6, "sink": 1, "positions": "reindexed"}
    model, made = network(form), rolling(form, 4)
    other = LabelCond(torch.tensor([1, 4]))
    streams = [
        Stream(made, model, (lambda block, last=last: COND if block < last else other), draw(), history=history)
        for last, history in ((99, "keep"), (10, "keep"), (10, "recache"))
    ]
    found = [[next(stream) for _ in range(14)] for stream in streams]
    for block in range(14):
        plain, kept, recached = (blocks[block] for blocks in found)
        assert torch.equal(plain, kept) == torch.equal(plain, recached) == (block < 10)
    assert relative(found[1][12], found[2][12]) > 1e-4
    history = streams[0]._clip._history  # type: ignore[union-attr]
    assert history is not None
    assert (history.num_frames, history.kept) == (13, 5)


@torch.no_grad()
def test_a_sample_can_stop_early_at_a_step_of_the_ladder():
    form = {"block_frames": 1}
    model, made = network(form), rolling(form, 4)
    found = made.sample(model, COND, None, draw(), 1)
    assert (found.stop, found.sigma_stop.unique().tolist()) == (1, [0.9])
    assert relative(found.x0, made.sample(model, COND, None, draw()).x0) > 1e-3
    behind = draw().normal("block.1.noise", (1, *CHW), dtype=torch.float64)
    window, sigma = torch.cat([found.x_stop[:, :1], behind], 1), torch.tensor([[0.9, 1.0]] * 2, dtype=torch.float64)
    velocity = model.velocity_given(window, sigma, COND, None, 0, together=True)
    assert relative(found.x0[:, :1], window[:, :1] - 0.9 * velocity[:, :1]) < 1e-11


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ROLLED, ids=str)
@pytest.mark.parametrize(("width", "stop", "windows"), [(4, 0, (1, 4, 1)), (4, 2, (3, 3)), (2, 1, (1, 2, 2, 1))])
def test_the_windows_of_a_training_rollout_and_their_gradient_are_those_of_the_definition(form, width, stop, windows):
    """Invariants 32, 33 for windows: every block is in one of them, the history is detached."""
    model, made = network(form), rolling(form, width)
    at = draw(iteration_of(made, stop))
    with torch.no_grad():
        rollout = made(model, batch(), at)
    final, expected = written_out(model, 6, width, stop=stop, at=at)
    assert rollout.stop == stop
    assert rollout.windows == windows
    assert relative(rollout.x0, expected) < 1e-10
    assert rollout.history is not None
    finished = model.causal.start(6 - rollout.windows[-1])
    assert relative(rollout.history[:, :finished], final[:, :finished]) < 1e-10
    again = made.again(model, rollout, batch())
    assert relative(again, expected) < 1e-10
    direction = data(frames_of(form, 6))
    found = gradients(model, (again * direction).sum())
    for name, gradient in gradients(model, (expected * direction).sum()).items():
        assert relative(found[name], gradient) < 1e-10, name


def test_given_frames_stay_out_of_the_windows():
    form = {"block_frames": 1}
    model, made = network(form), rolling(form, 2, given_frames=2)
    x0, at = data(6), draw(iteration_of(made, 1))
    with torch.no_grad():
        rollout = made(model, batch(x0), at)
    assert sum(rollout.windows) == 4
    again = made.again(model, rollout, batch(x0))
    assert torch.equal(again[:, :2], x0[:, :2])
    expected = written_out(model, 6, 2, stop=1, given=x0[:, :2], at=at)[1]
    assert relative(again[:, 2:], expected) < 1e-10


@torch.no_grad()
def test_half_of_the_iterations_are_plain_self_forcing():
    form = {"block_frames": 2}
    made, plain = rolling(form, 2, blocks=2), sampler(form, 2, sigmas=LADDER)
    model, rolled = network(form, torch.float32, layers=1), 0
    for iteration in range(20):
        found = made(model, batch(), draw(iteration))
        rolled += bool(found.windows)
        if not found.windows:
            assert torch.equal(found.x0, plain(model, batch(), draw(iteration)).x0)
    assert 5 < rolled < 15


@pytest.mark.usefixtures("checked_shapes")
@pytest.mark.parametrize(
    "made", [sampler(FORMS[5], 6), rolling(FORMS[5], 1), rolling(ROLLED[1], 2)], ids=["plain", "one", "two"]
)
def test_what_samplers_take_and_give_has_the_shapes_of_their_annotations(made):
    form = ROLLED[1] if isinstance(made, Rolling) and made.rolling_blocks == 2 else FORMS[5]
    model, given = network(form, layers=1), data(3)
    made = dataclasses.replace(made, given_frames=3, history_sigma=0.1, guidance_scale=2.0)
    with torch.no_grad():
        rollouts = [made(model, batch(data(11)), draw(iteration)) for iteration in range(4)]
        whole = made.sample(model, COND, UNCOND, draw(), given=given)
        blocks = list(Stream(made, model, COND, draw(), uncond=UNCOND, num_blocks=6, given=given))
    assert [block.shape[1] for block in blocks] == [2] * 4
    for rollout in (whole, *rollouts):
        assert rollout.x0.shape == rollout.x_stop.shape == (2, 11, *CHW)
        assert rollout.sigma_stop.shape == (2, 11)
    for rollout in rollouts:
        assert relative(made.again(model, rollout, batch()), rollout.x0) < 1e-10


# --- from a recipe ----------------------------------------------------------------------------------------------------


def test_a_recipe_rolls_where_it_says_so():
    section = SamplingSection(steps=4, rolling_blocks=2)
    made = sampler_of(section, (6, *CHW), CausalSection(block_frames=2))
    assert isinstance(made, Rolling)
    assert made.rolling_blocks == 2
    assert section.with_steps(2).rolling_blocks == 2
    with pytest.raises(UserError, match=r"3 steps cannot be shared by the 2 blocks .* take a multiple of 2"):
        section.with_steps(3)
    with pytest.raises(ValueError, match="4 steps cannot be shared by 3 rolling_blocks"):
        SamplingSection(steps=4, rolling_blocks=3)
    with pytest.raises(ValueError, match="leave out first_block_steps and stop"):
        SamplingSection(steps=4, rolling_blocks=2, stop="block")


@pytest.mark.parametrize(("block_frames", "sink", "blocks"), [(2, 1, 2), (1, 0, 4), (3, 3, 2)])
def test_a_window_without_room_for_a_finished_block_is_refused(block_frames, sink, blocks):
    """With room for one, the last blocks of a long clip see all of it; a frame less, and they would see the sink alone.
    Block by block, the room for one block is enough."""
    section, shape = SamplingSection(steps=4, rolling_blocks=blocks), (12 * block_frames, *CHW)
    needed = sink + (blocks + 1) * block_frames
    fits = CausalSection(block_frames=block_frames, window=needed, sink=sink)
    assert isinstance(sampler_of(section, shape, fits), Rolling)
    assert fits.recent(blocks * block_frames) == block_frames
    narrow = fits.model_copy(update={"window": needed - 1})
    with pytest.raises(UserError) as error:
        sampler_of(section, shape, narrow)
    message = str(error.value)
    assert f"student.causal.window = {needed - 1}: less sink {sink} it leaves {needed - 1 - sink} frames" in message
    assert f"{blocks} rolling_blocks of {block_frames} and one finished block that they go on from" in message
    assert message.endswith(f"write a window of {needed} or more")
    plain, least = SamplingSection(steps=4), fits.model_copy(update={"window": sink + block_frames})
    assert not isinstance(sampler_of(plain, shape, least), Rolling)
    assert Rolling.of(plain, shape, least).rolling_blocks == 1

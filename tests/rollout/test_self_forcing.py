"""Self-forcing: the sampler of causal networks, their training rollout, and the student's update in one forward."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fewstep.errors import UserError
from fewstep.flow.sigmas import ladder
from fewstep.models.blocks import CausalSection
from fewstep.records import assert_detached, concat, leaves, rows
from fewstep.rollout.few_step import FewStep, SamplingSection
from fewstep.rollout.sampler import sampler_of
from fewstep.rollout.self_forcing import SelfForcing
from tests.models.tiny import relative
from tests.rollout.clips import (
    CHW,
    COND,
    FORMS,
    SIGMAS,
    UNCOND,
    batch,
    data,
    draw,
    frames_of,
    full,
    gradients,
    network,
    sampler,
    written_out,
)

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def iteration_of(made: SelfForcing, stops: list[int]) -> int:
    return next(i for i in itertools.count() if [made._drawn(draw(i))(b) for b in range(len(stops))] == stops)


# --- the sampler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("settings", [{}, {"solver": "ode"}, {"history_sigma": 0.2}], ids=str)
@torch.no_grad()
def test_a_sample_walks_every_block_down_the_ladder_against_the_finished_ones(form, settings):
    model = network(form)
    found = sampler(form, **settings).sample(model, COND, None, draw())
    assert relative(found.x0, written_out(model, frames_of(form), [2] * 4, **settings)) < 1e-11
    assert found.stop == 2
    assert torch.equal(found.sigma_stop, full(0.6, frames_of(form)))


@torch.no_grad()
def test_history_sigma_0_is_truly_no_noise_and_another_changes_what_comes_after_the_first_block():
    form = {"block_frames": 2}
    model = network(form)
    clean, noised = (sampler(form, history_sigma=s).sample(model, COND, None, draw()) for s in (0.0, 0.3))
    assert clean.history is None
    assert noised.history is not None
    assert torch.equal(clean.x0[:, :2], noised.x0[:, :2])
    assert relative(clean.x0[:, 2:], noised.x0[:, 2:]) > 1e-3
    noise = draw().normal("block.1.history", (2, *CHW), dtype=torch.float64)
    torch.testing.assert_close(noised.history[:, 2:4], 0.7 * noised.x0[:, 2:4] + 0.3 * noise, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stop", [0, 1, 2])
@torch.no_grad()
def test_a_rollout_costs_stop_plus_one_calls_a_block_and_a_history_pass_for_all_but_the_last(stop):
    """Invariant 35."""
    form = {"block_frames": 2, "first_frame_alone": True}
    model, made = network(form), sampler(form)
    found = made(model, batch(), draw(iteration_of(made, [stop] * 4)))
    sizes, calls = [1, 2, 2, 2], [call for call in model.calls if call[0] != "tell"]
    expected = [[("velocity", 2, n)] * (stop + 1) + [("append", 2, n)] for n in sizes]
    assert calls == list(itertools.chain(*expected))[:-1]
    assert model.count("tell") == 1
    assert found.stop == stop
    assert torch.equal(found.sigma_stop, full(SIGMAS[stop], 7))


@pytest.mark.parametrize(
    ("block_frames", "steps", "first", "calls"),
    [(1, 4, None, 104), (1, 2, None, 62), (1, 1, None, 41), (1, 2, 4, 64), (1, 1, 4, 44), (3, 4, None, 34)],
)
@torch.no_grad()
def test_the_calls_of_a_clip_of_21_frames_are_those_published_less_the_last_history_pass(
    block_frames, steps, first, calls
):
    """METHODS section 3: 105, 63, 42, 65, 45 and 35, of which the last is not needed."""
    section = SamplingSection(steps=steps, shift=5.0, first_block_steps=first)
    model = network({"block_frames": block_frames}, torch.float32, layers=1)
    made = SelfForcing.of(section, (21, 4, 2, 2), model.causal)
    made.sample(model, COND, None, draw())
    assert model.count("velocity") + model.count("append") == calls


@torch.no_grad()
def test_a_training_rollout_that_stops_at_the_last_rung_is_the_sampler_to_the_last_bit():
    """Invariant 37, which public references break: one loop, one ladder, one noise."""
    form = {"block_frames": 1, "window": 3, "sink": 1}
    model = network(form, torch.float32)
    made = sampler(form, dtype=torch.float32)
    at = draw(iteration_of(made, [2] * 4))
    trained, sampled = made(model, batch(), at), made.sample(model, COND, UNCOND, at)
    assert trained.stop == sampled.stop == 2
    for one, other in zip(leaves(trained), leaves(sampled), strict=True):
        assert torch.equal(one, other)


@torch.no_grad()
def test_a_longer_clip_begins_like_a_shorter_one():
    form = {"block_frames": 2, "window": 4}
    model = network(form)
    short, long = (sampler(form, blocks).sample(model, COND, None, draw()).x0 for blocks in (3, 5))
    assert torch.equal(long[:, :6], short)


@torch.no_grad()
def test_a_clip_is_a_function_of_its_key_alone():
    """Invariant 22 for rollouts: rows, their order and their batch mates change nothing."""
    form = {"block_frames": 1, "window": 3, "positions": "reindexed"}
    model, made = network(form), sampler(form, history_sigma=0.1)
    whole = made(model, batch(), draw())
    index = torch.tensor([1])
    alone = made(model, rows(batch(), index), draw().rows(index))
    for one, other in zip(leaves(alone), leaves(rows(whole, index)), strict=True):
        assert one.dtype == torch.int64 or relative(one, other) < 1e-11
    assert relative(whole.x0[:1], whole.x0[1:]) > 0.1
    assert_detached(whole, "rollout")
    assert torch.equal(concat([rows(whole, slice(0, 1)), rows(whole, slice(1, 2))]).x0, whole.x0)


@pytest.mark.parametrize("form", [FORMS[1], FORMS[5], FORMS[6]], ids=str)
@torch.no_grad()
def test_a_guided_clip_equals_conditional_and_unconditional_histories_apart(form):
    """Invariant 30: teachers are sampled with guidance, the histories of both halves in one batch."""
    model, made = network(form), sampler(form, solver="ode", guidance_scale=3.0)
    found = made.sample(model, COND, UNCOND, draw())
    assert {call[1] for call in model.calls if call[0] != "tell"} == {4}
    x0, pasts, start = [], [None, None], 0
    for block, size in enumerate(model.causal.partition(frames_of(form))):
        x = draw().normal(f"block.{block}.noise", (size, *CHW), dtype=torch.float64)
        for here, below in itertools.pairwise((*SIGMAS, 0.0)):
            cond, uncond = (
                model.velocity_given(x, full(here, size), told, past, block)
                for told, past in zip((COND, UNCOND), pasts, strict=True)
            )
            x = x + (below - here) * (uncond + 3.0 * (cond - uncond))
        pasts = [model.append(past, x, told) for told, past in zip((COND, UNCOND), pasts, strict=True)]
        x0.append(x)
        start += size
    assert relative(found.x0, torch.cat(x0, 1)) < 1e-10


def test_guidance_without_an_unconditional_input_is_refused():
    with pytest.raises(ValueError, match=r"guidance_scale 2\.0 needs the unconditional input"):
        sampler(FORMS[0], guidance_scale=2.0).sample(network(FORMS[0]), COND, None, draw())


@torch.no_grad()
def test_the_training_rollout_is_unguided_whatever_the_samplers_guidance():
    form = FORMS[0]
    model = network(form)
    found = sampler(form, guidance_scale=3.0)(model, batch(), draw())
    assert torch.equal(found.x0, sampler(form)(model, batch(), draw()).x0)


# --- stops and ladders ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_stops_are_shared_by_all_blocks_or_each_blocks_own():
    form = {"block_frames": 1}
    shared, own = sampler(form), sampler(form, stop="block")
    drawn = {tuple(shared._drawn(draw(i))(b) for b in range(3)) for i in range(40)}
    assert drawn == {(0, 0, 0), (1, 1, 1), (2, 2, 2)}
    drawn = {tuple(own._drawn(draw(i))(b) for b in range(2)) for i in range(120)}
    assert drawn == set(itertools.product(range(3), repeat=2))
    model = network(form)
    at = draw(iteration_of(own, [0, 2, 1, 0]))
    found = own(model, batch(), at)
    levels = torch.tensor([[1.0, 0.6, 0.9, 1.0]] * 2, dtype=torch.float64)
    assert torch.equal(found.sigma_stop, levels)
    assert relative(found.x0, written_out(model, 4, [0, 2, 1, 0], at=at)) < 1e-11
    assert found.stop == 0


def test_stops_do_not_depend_on_the_rows():
    """Invariant 36: ranks and micro-batches agree."""
    for made in (sampler(FORMS[0]), sampler(FORMS[0], stop="block"), sampler(FORMS[0], first_block_sigmas=(1.0,))):
        for iteration in range(10):
            whole = draw(iteration)
            pieces = (whole, whole.rows(slice(1, 2)), dataclasses.replace(whole, key=torch.tensor([77])))
            assert len({tuple(made._drawn(piece)(b) for b in range(4)) for piece in pieces}) == 1


@torch.no_grad()
def test_the_first_blocks_own_ladder_set_to_the_default_one_changes_nothing():
    """Invariant 38, in the sampler and in training."""
    form = {"block_frames": 2}
    model = network(form)
    plain, own = sampler(form), sampler(form, first_block_sigmas=SIGMAS)
    assert torch.equal(plain.sample(model, COND, None, draw()).x0, own.sample(model, COND, None, draw()).x0)
    for iteration in range(4):
        pair = [made(model, batch(), draw(iteration)) for made in (plain, own)]
        assert all(torch.equal(a, b) for a, b in zip(*(leaves(one) for one in pair), strict=True))


@torch.no_grad()
def test_the_first_block_has_its_own_ladder_and_its_own_stop():
    """Causal-Forcing++: 4 steps for the first block, 2 for the rest."""
    form = {"block_frames": 2, "first_frame_alone": True}
    section = SamplingSection(steps=2, shift=5.0, first_block_steps=4)
    model = network(form)
    made = SelfForcing.of(section, (7, *CHW), model.causal, torch.float64)
    assert (made.ladder(0), made.ladder(1)) == (ladder(4, 5.0), ladder(2, 5.0))
    expected = written_out(model, 7, [3, 1, 1, 1], sigmas=ladder(2, 5.0), first=ladder(4, 5.0))
    assert relative(made.sample(model, COND, None, draw()).x0, expected) < 1e-11
    drawn = {tuple(made._drawn(draw(i))(b) for b in range(4)) for i in range(100)}
    assert drawn == {(own, rest, rest, rest) for own in range(4) for rest in range(2)}
    at = draw(iteration_of(made, [2, 0, 0, 0]))
    found = made(model, batch(), at)
    assert found.stop == 0
    assert found.sigma_stop[0].unique().tolist() == pytest.approx(sorted((ladder(4, 5.0)[2], 1.0)))
    expected = written_out(model, 7, [2, 0, 0, 0], sigmas=ladder(2, 5.0), first=ladder(4, 5.0), at=at)
    assert relative(found.x0, expected) < 1e-11


@torch.no_grad()
def test_a_sample_can_stop_early_at_a_step_of_the_ladder():
    form = {"block_frames": 2}
    model = network(form)
    found = sampler(form, first_block_sigmas=(1.0,)).sample(model, COND, None, draw(), 1)
    expected = written_out(model, 8, [0, 1, 1, 1], first=(1.0,))
    assert relative(found.x0, expected) < 1e-11


# --- the student's update ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("settings", [{}, {"history_sigma": 0.2, "stop": "block"}], ids=str)
def test_x0_again_and_its_gradient_equal_the_sequential_rollout_with_detached_history(form, settings):
    """Invariants 33, 14: the parallel forward is the definition, for every cache policy."""
    model, made = network(form), sampler(form, **settings)
    stops = [1, 2, 0, 1] if "stop" in settings else [1] * 4
    at = draw(iteration_of(made, stops))
    with torch.no_grad():
        rollout = made(model, batch(), at)
    model.calls.clear()
    again = made.again(model, rollout, batch())
    assert [call[0] for call in model.calls] == ["prefill", "velocity"]
    noise = {"history_sigma": settings["history_sigma"]} if settings else {}
    expected = written_out(model, frames_of(form), stops, at=at, **noise)
    assert relative(again, rollout.x0) < 1e-10
    assert relative(again, expected) < 1e-10
    direction = data(frames_of(form))
    found = gradients(model, (again * direction).sum())
    for name, gradient in gradients(model, (expected * direction).sum()).items():
        assert relative(found[name], gradient) < 1e-10, name


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_no_gradient_passes_from_a_block_to_those_before_it(form):
    """Invariant 32, which in-place caches break: what block i did moves no weight through a later block's loss."""
    model, made = network(form), sampler(form)
    with torch.no_grad():
        rollout = made(model, batch(), draw(iteration_of(made, [1] * 4)))
    x_stop = rollout.x_stop.clone().requires_grad_()
    x0 = rollout.x0.clone().requires_grad_()
    again = made.again(model, dataclasses.replace(rollout, x_stop=x_stop, x0=x0), batch())
    start = 0
    for size in model.causal.partition(frames_of(form)):
        span, start = slice(start, start + size), start + size
        loss = again[:, span].square().sum()
        to_state, to_x0 = torch.autograd.grad(loss, (x_stop, x0), retain_graph=True, allow_unused=True)
        assert to_x0 is None
        touched = to_state.abs().amax((0, 2, 3, 4)) > 0
        assert touched.nonzero().flatten().tolist() == list(range(span.start, span.stop))


def test_the_gradient_reaches_every_weight_and_the_first_block():
    """Invariant 43, for the student."""
    form = {"block_frames": 2}
    model, made = network(form), sampler(form)
    with torch.no_grad():
        rollout = made(model, batch(), draw())
    for name, gradient in gradients(model, made.again(model, rollout, batch())[:, :2].square().mean()).items():
        assert gradient.abs().max() > 1e-9, name


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_activation_checkpointing_changes_no_gradient(form):
    """Invariant 34, which public references break: the history is a value, so a second run sees the same."""
    model, made = network(form), sampler(form)
    with torch.no_grad():
        rollout = made(model, batch(), draw(iteration_of(made, [1] * 4)))

    def loss() -> torch.Tensor:
        return (made.again(model, rollout, batch()) * data(frames_of(form))).sum()

    plain = gradients(model, loss())
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *given, run=forward: checkpoint(run, *given, use_reentrant=False)
    for name, gradient in gradients(model, loss()).items():
        assert relative(gradient, plain[name]) < 1e-12, name


def saved_bytes(run: Any) -> int:
    """Of what autograd keeps for the backward pass, weights aside; every storage once."""
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = run()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert made.requires_grad
    return total


def test_the_update_of_many_blocks_keeps_no_more_than_one_forward_and_the_cache():
    """Memory of the student's update: by saved bytes, against one forward of the same frames without a history."""
    form = {"block_frames": 1}
    model = network(form, torch.float32)
    for blocks in (4, 8, 16):
        made = sampler(form, blocks, dtype=torch.float32)
        with torch.no_grad():
            rollout = made(model, batch(), draw())
            history = made.history(model, rollout, COND)
        assert history is not None
        cache = sum(tensor.untyped_storage().nbytes() for layer in history.layers for tensor in layer)
        forward = saved_bytes(lambda: model.velocity(rollout.x_stop, rollout.sigma_stop, COND))  # noqa: B023
        update = saved_bytes(lambda: made.again(model, rollout, batch()))  # noqa: B023
        mask = 8 * (4 * blocks) * (8 * blocks)
        assert update <= forward + 1.05 * cache + mask
        if blocks == 8:
            sequential = saved_bytes(lambda: written_out(model.float(), 8, [2] * 8))
            assert sequential > update


# --- given frames -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "given"),
    [
        ({"block_frames": 2, "first_frame_alone": True}, 1),
        ({"block_frames": 1}, 1),
        ({"block_frames": 2, "window": 4, "sink": 1, "first_frame_alone": True}, 5),
        ({"block_frames": 2, "window": 4, "sink": 2, "positions": "reindexed"}, 6),
        ({"block_frames": 1, "window": 3}, 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("history_sigma", [0.0, 0.2])
def test_given_frames_come_back_bitwise_and_enter_the_history_clean(form, given, history_sigma):
    """Invariant 39: image to video, and continuation of k frames; 33 for the blocks after them."""
    frames = frames_of(form)
    model, made = network(form), sampler(form, given_frames=given, history_sigma=history_sigma)
    x0, stops = data(frames), [1] * 4
    at = draw(iteration_of(made, stops))
    with torch.no_grad():
        rollout = made(model, batch(x0), at)
    assert rollout.given == given
    assert torch.equal(rollout.x0[:, :given], x0[:, :given])
    assert torch.equal(rollout.x_stop[:, :given], x0[:, :given])
    assert torch.equal(rollout.sigma_stop[:, :given], full(0.0, given))
    again = made.again(model, rollout, batch(x0))
    assert torch.equal(again[:, :given], x0[:, :given])
    expected = written_out(model, frames, stops, at=at, given=x0[:, :given], history_sigma=history_sigma)
    assert relative(again, expected) < 1e-10
    found = gradients(model, (again * data(frames)).sum())
    for name, gradient in gradients(model, (expected * data(frames)).sum()).items():
        assert relative(found[name], gradient) < 1e-10, name


@torch.no_grad()
def test_frames_can_be_given_to_a_sampler_that_was_not_made_for_them():
    form = {"block_frames": 2}
    model = network(form)
    found = sampler(form).sample(model, COND, None, draw(), given=data(4))
    assert found.given == 4
    assert relative(found.x0, written_out(model, 8, [2] * 4, given=data(4))) < 1e-11


@torch.no_grad()
def test_a_guided_clip_goes_on_from_given_frames():
    form = {"block_frames": 2}
    model = network(form)
    one = sampler(form, guidance_scale=1.0).sample(model, COND, None, draw(), given=data(2)).x0
    two = sampler(form, guidance_scale=2.0).sample(model, COND, COND, draw(), given=data(2)).x0
    assert relative(two, one) < 1e-11


def test_given_frames_that_do_not_fit_are_refused_with_both_numbers():
    model = network({"block_frames": 3})
    made = sampler({"block_frames": 3})
    with pytest.raises(UserError, match="4 given frames are not whole blocks of 3 frames; give 3 or 6"):
        made.sample(model, COND, None, draw(), given=data(4))
    with pytest.raises(UserError, match="12 given frames leave nothing to make of a clip of 12"):
        made.sample(model, COND, None, draw(), given=data(12))
    with pytest.raises(UserError, match="continues 3 given frames, and got 0"):
        sampler({"block_frames": 3}, given_frames=3).sample(model, COND, None, draw())
    with pytest.raises(UserError, match="given_frames 3: the data hold no latents"):
        sampler({"block_frames": 3}, given_frames=3)(model, batch(), draw())
    alone = CausalSection(block_frames=3, first_frame_alone=True)
    with pytest.raises(UserError, match=r"3 given frames .* 3 frames, the first frame alone; give 1 or 4"):
        SelfForcing.of(SamplingSection(steps=2, given_frames=3), (7, *CHW), alone)
    with pytest.raises(UserError, match="7 given frames leave nothing to make of a clip of 7"):
        SelfForcing.of(SamplingSection(steps=2, given_frames=7), (7, *CHW), alone)


# --- from a recipe ----------------------------------------------------------------------------------------------------


def test_a_causal_network_gets_a_sampler_of_blocks_and_another_one_of_whole_clips():
    section = SamplingSection(steps=4, shift=5.0, solver="ode", guidance_scale=2.0)
    whole = sampler_of(section, (4, *CHW), None, torch.float64)
    assert whole == FewStep(ladder(4, 5.0), "ode", (4, *CHW), 2.0, torch.float64)
    section = section.model_copy(update={"history_sigma": 0.1, "given_frames": 2, "stop": "block"})
    blocks = sampler_of(section, (4, *CHW), CausalSection(block_frames=2), torch.float64)
    assert blocks == SelfForcing(
        ladder(4, 5.0), "ode", (4, *CHW), 2.0, torch.float64, None, history_sigma=0.1, given_frames=2, stop="block"
    )


@pytest.mark.parametrize(
    "setting", [{"first_block_steps": 4}, {"history_sigma": 0.1}, {"given_frames": 1}, {"stop": "block"}], ids=str
)
def test_settings_of_blocks_are_refused_for_a_network_that_sees_the_whole_clip(setting):
    (name,) = setting
    with pytest.raises(UserError, match=rf"sampling\.{name} = {setting[name]}: .* write (null|0|0\.0|shared), or"):
        sampler_of(SamplingSection(steps=2, **setting), (4, *CHW), None)


def test_a_clip_that_blocks_do_not_fill_is_refused_with_both_numbers():
    with pytest.raises(UserError, match=r"7 latent frames cannot be cut into blocks of 3 .* 6 or 9"):
        sampler_of(SamplingSection(steps=2), (7, *CHW), CausalSection(block_frames=3))


def test_a_ladder_for_a_first_block_that_is_given_is_refused():
    with pytest.raises(ValueError, match="first_block_steps 4 means nothing where the first block is given"):
        SamplingSection(steps=2, first_block_steps=4, given_frames=1)


def test_another_number_of_steps_keeps_what_belongs_to_blocks():
    section = SamplingSection(sigmas=SIGMAS, shift=2.0, first_block_steps=5, history_sigma=0.1, stop="block")
    other = section.with_steps(2)
    assert other.resolved() == ladder(2, 2.0)
    assert (other.first_block_steps, other.history_sigma, other.stop) == (5, 0.1, "block")

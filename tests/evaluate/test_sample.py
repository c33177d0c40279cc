"""Samples are a function of the seed and their number alone, and sampling leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.evaluate.sample import balanced_labels, departures, generate
from fewstep.models.blocks import CausalSection
from fewstep.models.wan.model import Wan
from fewstep.rng import Draw
from fewstep.rollout.few_step import FewStep, SamplingSection
from fewstep.rollout.self_forcing import SelfForcing
from tests.evaluate.small import SHAPE, STD, StripesConditioner, StripesModel, means
from tests.models.tiny import LABELS, tiny_section, tiny_wan

SIGMAS = (1.0, 0.9, 0.5)
LATENT = (1, 4, 6, 8)
FIVE = torch.tensor([3, 0, 4, 1, 2])


def wan(dtype: torch.dtype = torch.float64) -> Wan:
    return tiny_wan(tiny_section(LABELS, layers=2), dtype)


def sampler(guidance_scale: float = 1.0, solver: Any = "renoise", dtype: torch.dtype = torch.float64) -> FewStep:
    return FewStep(SIGMAS, solver, LATENT, guidance_scale, dtype)


def samples(model: Wan, labels: Tensor = FIVE, **settings: Any) -> Tensor:
    return generate(model, sampler(), model.conditioner, labels, 7, **settings).x0


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 100])
def test_samples_do_not_depend_on_the_batch_size(batch: int):
    model = wan()
    torch.testing.assert_close(samples(model, batch=batch), samples(model, batch=4), rtol=1e-12, atol=1e-12)


def test_a_sample_is_the_same_when_it_is_made_alone():
    model = wan()
    alone = samples(model, FIVE[3:4], first_key=3)
    torch.testing.assert_close(alone, samples(model)[3:4], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(alone, samples(model, FIVE[3:4], first_key=2), atol=0.01)


def test_samples_are_those_of_the_training_sampler_for_the_same_seed():
    """PITFALLS, sampling differs from training; invariant 37."""
    model, guided = wan(), sampler(guidance_scale=2.5)
    draw = Draw(7, "sample", 0, torch.arange(5))
    with torch.no_grad():
        cond, uncond = model.conditioner.condition(FIVE), model.conditioner.null(5)
        expected = guided.sample(model, cond, uncond, draw).x0
        at_stop = guided.sample(model, cond, uncond, draw, stop=1).x0
    torch.testing.assert_close(generate(model, guided, model.conditioner, FIVE, 7).x0, expected)
    torch.testing.assert_close(generate(model, guided, model.conditioner, FIVE, 7, stop=1).x0, at_stop)
    assert not torch.allclose(expected, at_stop, atol=0.01)


@pytest.mark.parametrize(
    ("guidance_scale", "stop", "calls"), [(1.0, None, 3), (2.5, None, 6), (0.0, None, 6), (1.0, 1, 2), (2.5, 0, 2)]
)
def test_network_calls_are_counted_for_one_sample(guidance_scale: float, stop: int | None, calls: int):
    model = wan(torch.float32)
    made = generate(model, sampler(guidance_scale), model.conditioner, FIVE, 7, batch=2, stop=stop)
    assert made.network_calls == calls
    assert len(made.batch_s) == 3
    assert min(made.batch_s) > 0


def test_many_steps_of_the_exact_velocity_reach_the_data():
    """The data are Gaussian, so mean and standard deviation say it all; with 1 step only the mean is reached."""
    labels = torch.arange(3).repeat_interleave(200)
    fine = FewStep.of(SamplingSection(steps=60, solver="ode"), SHAPE)
    made = generate(StripesModel(), fine, StripesConditioner(), labels, 1, batch=77).x0.view(3, 200, *SHAPE)
    torch.testing.assert_close(made.mean(1), means(), rtol=0, atol=0.07)
    assert made.std(1).mean().item() == pytest.approx(STD, rel=0.06)
    coarse = generate(
        StripesModel(), FewStep.of(SamplingSection(steps=1), SHAPE), StripesConditioner(), labels, 1
    ).x0.view(3, 200, *SHAPE)
    torch.testing.assert_close(coarse, means()[:, None].expand_as(coarse), rtol=0, atol=1e-5)


def test_two_models_start_from_the_same_noise():
    class Still(StripesModel):
        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            return torch.zeros_like(x_t)

    one = FewStep((1.0,), "ode", SHAPE)
    labels = balanced_labels(4, 3)
    noise = generate(Still(), one, StripesConditioner(), labels, 9).x0
    made = generate(StripesModel(), one, StripesConditioner(), labels, 9).x0
    again = noise - StripesModel().velocity(noise, torch.ones(4, 1), StripesConditioner().condition(labels))
    torch.testing.assert_close(made, again)
    assert not torch.equal(noise, generate(Still(), one, StripesConditioner(), labels, 10).x0)


def test_every_module_gets_its_own_mode_back_and_no_generator_moves():
    """PITFALLS, validation: it raises and leaves something in place."""
    model = wan(torch.float32)
    model.train()
    model.blocks[0].eval()
    before, state = [module.training for module in model.modules()], torch.get_rng_state()
    seen: list[bool] = []
    hook = model.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    inner = model.blocks[1].register_forward_pre_hook(lambda module, _: seen.append(module.training))
    made = samples(model)
    assert seen
    assert not any(seen)
    assert not made.requires_grad
    assert [module.training for module in model.modules()] == before
    hook.remove()
    inner.remove()
    with pytest.raises(ValueError, match="labels"):
        samples(model, torch.tensor([0, 99]))
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_role_is_sampled_in_evaluation_mode_too():
    class Role:
        def __init__(self, network: Wan):
            self.network = network
            self.geometry, self.num_layers, self.width = network.geometry, network.num_layers, network.width
            self.modes: list[bool] = []

        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            self.modes.append(self.network.training)
            return self.network.velocity(x_t, sigma, cond)

        def features(self, x_t: Tensor, sigma: Tensor, cond: Any, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
            return self.network.features(x_t, sigma, cond, layers)

    role = Role(wan().train())
    generate(role, sampler(), role.network.conditioner, FIVE, 7)
    assert role.modes == [False] * 3
    assert role.network.training


def test_balanced_labels_take_every_class_in_turn():
    assert balanced_labels(7, 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_departure_from_the_trained_sampler_names_the_trained_value():
    """PITFALLS, sampling knobs."""
    trained = SamplingSection(steps=4, shift=5.0)
    assert departures(trained, SamplingSection(sigmas=trained.resolved())) == []
    (steps,) = departures(trained, trained.with_steps(20))
    assert "20 steps" in steps
    assert "trained for 4 (1, 0.9375, 0.83333, 0.625)" in steps
    found = departures(trained, SamplingSection(steps=4, shift=5.0, solver="ode", guidance_scale=5.0))
    assert found == [
        "sampled with solver ode; the network was trained for renoise",
        "sampled with guidance_scale 5.0; the network was trained for 1.0",
    ]


def test_clips_are_sampled_like_images_frame_count_and_all():
    """A shape with f > 1: many steps of the exact velocity reach the data in every frame."""
    shape = (3, *SHAPE[1:])

    class Clips(StripesModel):
        def velocity(self, x_t: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            return torch.cat(
                [super(Clips, self).velocity(x_t[:, f : f + 1], sigma[:, f : f + 1], cond) for f in range(3)], 1
            )

    labels = torch.arange(3).repeat_interleave(100)
    fine = FewStep.of(SamplingSection(steps=30, solver="ode"), shape)
    made = generate(Clips(), fine, StripesConditioner(), labels, 1, batch=77)
    assert made.x0.shape == (300, *shape)
    assert made.network_calls == 30
    clips = made.x0.view(3, 100, *shape)
    torch.testing.assert_close(clips.mean(1), means().expand(-1, 3, -1, -1, -1), rtol=0, atol=0.1)
    assert clips.std(1).mean().item() == pytest.approx(STD, rel=0.1)


CAUSAL = CausalSection(block_frames=2)


def causal_wan() -> Any:
    section = tiny_section(LABELS, layers=2, causal=CAUSAL)
    return tiny_wan(section, torch.float64)


@pytest.mark.parametrize(("guidance_scale", "rows"), [(1.0, 1), (2.5, 2)])
def test_a_clip_made_block_by_block_counts_a_call_for_each_block_and_step_and_one_for_each_block_of_the_past(
    guidance_scale: float, rows: int
):
    """3 blocks at 3 steps, and 2 that enter the history: METHODS, network calls."""
    model = causal_wan()
    blocks = SelfForcing(SIGMAS, "renoise", (6, *LATENT[1:]), guidance_scale, torch.float64)
    made = generate(model, blocks, model.conditioner, FIVE, 7, batch=2)
    assert made.network_calls == rows * (3 * 3 + 2)
    with torch.no_grad():
        uncond = model.conditioner.null(5)
        expected = blocks.sample(
            model, model.conditioner.condition(FIVE), uncond, Draw(7, "sample", 0, torch.arange(5))
        )
    torch.testing.assert_close(made.x0, expected.x0, rtol=1e-9, atol=1e-9)


def test_given_frames_come_back_and_each_clip_continues_its_own():
    model = causal_wan()
    blocks = SelfForcing(SIGMAS, "renoise", (4, *LATENT[1:]), dtype=torch.float64, given_frames=2)
    given = torch.randn(5, 2, *LATENT[1:], dtype=torch.float64)
    made = generate(model, blocks, model.conditioner, FIVE, 7, batch=2, given=given).x0
    assert torch.equal(made[:, :2], given)
    other = given.clone()
    other[3] += 1
    changed = generate(model, blocks, model.conditioner, FIVE, 7, batch=3, given=other).x0[:, 2:] - made[:, 2:]
    assert (changed.flatten(1).abs().amax(1) > 1e-6).tolist() == [False, False, False, True, False]

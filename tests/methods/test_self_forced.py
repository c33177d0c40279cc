"""Distribution matching and SiD of a causal student: the bidirectional teacher and critic see whole clips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.sid import SiD, SiDSection
from fewstep.models.blocks import CausalSection
from fewstep.rollout.few_step import SamplingSection
from fewstep.rollout.self_forcing import SelfForcing
from tests.engines.worlds import network
from tests.methods.clips import DOUBLE, Watched, causal, clips, draw, gradients

SHAPE = (5, 4, 4, 2)
FORM = CausalSection(block_frames=2, first_frame_alone=True)


def method(kind: Any, given: int) -> Any:
    section = SiDSection if kind is SiD else DMD2Section
    sampling = SamplingSection(steps=3, shift=5.0, given_frames=given)
    return kind(section(guidance_scale=3.0), SelfForcing.of(sampling, SHAPE, FORM, dtype=DOUBLE))


@pytest.mark.parametrize("given", [0, 1])
@pytest.mark.parametrize("kind", [DMD2, SiD])
def test_an_iteration_of_self_forcing_sees_given_frames_clean_and_reaches_every_weight(kind, given):
    """Invariants 39, 43, 45: d loss / d weights is that of sum(x0 g) / numel, and g is 0 on given frames."""
    student, teacher, critic, batch = causal(0, **FORM.model_dump()), network(1).double(), network(2).double(), clips()
    made, watched = method(kind, given), [Watched(teacher), Watched(critic)]
    with torch.no_grad():
        rollout = made.rollout(student, batch, draw("rollout"))
        scores = made.scores(*watched, None, rollout, batch, draw("scores"))
    assert rollout.given == given
    assert torch.equal(rollout.x0[:, :given], batch.x0[:, :given])
    for x_t, sigma, _, forced in (asked for model in watched for asked in model.asked):
        assert torch.equal(x_t[:3, :given], batch.x0[:, :given])
        assert torch.equal(sigma[:, :given], torch.zeros_like(sigma[:, :given]))
        assert forced == {}
    assert torch.equal(scores.gradient[:, :given], torch.zeros_like(scores.gradient[:, :given]))
    assert scores.gradient[:, given:].abs().min() > 0

    made.student_losses(student, rollout, scores, batch)["student/loss"].mean().backward()
    found = gradients(student)
    assert len(found) == len(list(student.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in found)
    assert gradients(teacher) == gradients(critic) == []
    x0 = made.rollout_of.again(student, rollout, batch)
    expected = torch.autograd.grad(x0, list(student.parameters()), grad_outputs=scores.gradient / x0.numel())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("kind", [DMD2, SiD])
def test_the_critic_learns_the_clips_of_a_causal_student_and_nobody_else_does(kind):
    """Invariant 43."""
    student, teacher, critic, batch = causal(0, **FORM.model_dump()), network(1).double(), network(2).double(), clips()
    made = method(kind, 1)
    with torch.no_grad():
        rollout = made.rollout(student, batch, draw("rollout.0"))
    made.critic_losses(critic, teacher, None, rollout, batch, draw("critic.0"))["critic/loss"].mean().backward()
    assert len(gradients(critic)) == len(list(critic.parameters()))
    assert gradients(student) == gradients(teacher) == []


@pytest.mark.parametrize("kind", [DMD2, SiD])
def test_the_overlap_of_a_later_chunk_is_noised_with_it_and_is_out_of_every_loss(kind):
    """Rollouts that go on: teacher and critic, which know one noise level a clip, see the last frames of the chunk
    before at that of the new ones, and the gradient of the student is that of the new frames alone. (The loss of the
    critic: test_given_frames.)"""
    student, teacher, critic, batch = causal(0, **FORM.model_dump()), network(1).double(), network(2).double(), clips()
    sampling = SamplingSection(steps=3, shift=5.0, stream_chunks=3, overlap_frames=3)
    section = SiDSection if kind is SiD else DMD2Section
    made = kind(section(guidance_scale=3.0), SelfForcing.of(sampling, SHAPE, FORM, dtype=DOUBLE))
    watched = [Watched(teacher), Watched(critic)]
    first, second = (replace(draw("rollout"), iteration=iteration) for iteration in (6, 7))
    with torch.no_grad():
        before, carry = made.chunk(student, batch, first, None)
        rollout, _ = made.chunk(student, batch, second, carry)
        scores = made.scores(*watched, None, rollout, batch, draw("scores"))
    assert (before.given, rollout.given, rollout.clean) == (0, 3, 0)
    noise = draw("scores").normal("noise", tuple(rollout.x0.shape[1:]), dtype=DOUBLE)
    for x_t, sigma, _, _ in (asked for model in watched for asked in model.asked):
        level = sigma[:3, :1, None, None, None]
        assert torch.equal(sigma, sigma[:, :1].expand_as(sigma))
        assert level.min() > 0
        torch.testing.assert_close(x_t[:3, :3], (1 - level) * before.x0[:, 2:] + level * noise[:, :3])
    assert not scores.gradient[:, :3].any()
    assert scores.gradient[:, 3:].abs().min() > 0

    made.student_losses(student, rollout, scores, batch, carry)["student/loss"].mean().backward()
    found = gradients(student)
    x0 = made.rollout_of.again(student, rollout, batch, carry)
    weights = scores.gradient[:, 3:] / x0.numel()
    expected = torch.autograd.grad(x0[:, 3:], list(student.parameters()), grad_outputs=weights)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-14)
        assert one.abs().max() > 0

"""The engine of one process: it binds phases, steps the right roles, and cuts batches without a trace."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.engines.api import Engine
from fewstep.engines.process import ProcessEngine, parameters_of
from fewstep.methods.api import Phase
from fewstep.methods.gan import GANSection
from fewstep.optim.ema import EMASection
from fewstep.records import Rollout, Scores
from tests.engines.worlds import LADDER, assert_same_bits, copied, dmd2, engine, run, sft, updates_of

DOUBLE = torch.float64


def weights(made: ProcessEngine, role: str) -> dict[str, Tensor]:
    return copied({role: dict(made.roles[role].network.state_dict())})[role]


def moved(made: ProcessEngine, role: str, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in weights(made, role).items() if not torch.equal(tensor, before[name])}


# --- what is trained --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", ["critic", "teacher"])
def test_the_teacher_stays_as_it_is_and_every_weight_of_the_others_moves(features):
    """Invariant 43."""
    made = engine(dmd2(gan=GANSection(features=features, student_weight=0.3, discriminator_weight=0.7)))
    before = {role: weights(made, role) for role in made.roles}
    run(made, range(3))
    assert moved(made, "teacher", before["teacher"]) == set()
    for role in ("student", "critic", "discriminator"):
        assert moved(made, role, before[role]) == set(before[role]), role
    assert all(p.grad is None and not p.requires_grad for p in made.roles["teacher"].network.parameters())


def test_a_phase_leaves_gradients_on_the_roles_that_it_trains_and_on_no_other(monkeypatch):
    """Invariant 43: the critic phase leaves the student's grads None and vice versa; the first block is reached."""
    made, found = engine(dmd2()), {}
    for role, optimizer in made.optimizers.items():

        def norm(role: str = role, plain: Any = optimizer.norm) -> Tensor:
            found[role] = {
                other: {name: p.grad.abs().max().item() for name, p in view.parameters().items() if p.grad is not None}
                for other, view in made.roles.items()
            }
            return plain()

        monkeypatch.setattr(optimizer, "norm", norm)
    made.run(0)
    names = {role: set(view.parameters()) for role, view in made.roles.items()}
    student, critic = found["student"], found["critic"]
    assert set(student["student"]) == names["student"]
    assert not any(student[role] for role in ("critic", "discriminator", "teacher"))
    assert set(critic["critic"]) == names["critic"]
    assert set(critic["discriminator"]) == names["discriminator"]
    assert not any(critic[role] for role in ("student", "teacher"))
    assert student["student"]["blocks.0.self_attention.q.weight"] > 1e-8
    assert all(value > 0 for held in (student["student"], critic["critic"]) for value in held.values())
    assert all(p.grad is None for view in made.roles.values() for p in view.network.parameters())


def test_no_record_carries_a_graph():
    class Careless(type(dmd2())):  # type: ignore[misc]
        def rollout(self, student: Any, batch: Any, draw: Any) -> Rollout:
            with torch.enable_grad():
                return super().rollout(student, batch, draw)

    sound = dmd2(gan=None)
    made = engine(Careless(sound.section, sound.rollout_of))
    with pytest.raises(RuntimeError, match="the record 'rollout' carries a gradient graph"):
        made.run(0)


def test_the_average_ticks_on_the_students_updates_alone():
    """Invariant 49; PITFALLS, EMA: not on the K critic updates."""
    method = dmd2(gan=None, critic_warmup_updates=2)
    made = engine(method, ema=EMASection(decay=0.8, start=1))
    start = copied({"ema": made.ema.state()})["ema"]
    made.run(0)
    assert all(torch.equal(made.ema.shadows[name], tensor) for name, tensor in start.items()), "warm-up"
    history = []
    for iteration in (1, 2, 3):
        made.run(iteration)
        history.append(weights(made, "student"))
    for name, shadow in made.ema.shadows.items():
        expected = 0.8 * (0.8 * history[0][name] + 0.2 * history[1][name]) + 0.2 * history[2][name]
        torch.testing.assert_close(shadow, expected, rtol=1e-5, atol=1e-7)


def test_every_role_counts_its_own_updates_and_follows_its_own_schedule():
    """PITFALLS, LR: counted in the optimizer steps of the role."""
    method = dmd2(critic_updates=2, critic_warmup_updates=3)
    made = engine(method, iterations=4)
    metrics = run(made, range(4))
    assert [int(row.get("student/updates", -1)) for row in metrics] == [-1, -1, 1, 2]
    assert [float(row["student/lr"]) for row in metrics[2:]] == pytest.approx([0.5e-3, 1e-3]), "its warm-up of two"
    for role in ("critic", "discriminator"):
        assert [int(row[f"{role}/updates"]) for row in metrics] == [2, 3, 5, 7]
        last = 0.1 + 0.9 * (1 + math.cos(math.pi * (6 - 2) / 4)) / 2
        assert float(metrics[-1][f"{role}/lr"]) == pytest.approx(1e-3 * last), "of the iteration's last update"
    assert updates_of(method, 4) == {"student": 2, "critic": 7, "discriminator": 7}


# --- binding ----------------------------------------------------------------------------------------------------------


def test_the_engine_keeps_the_contract():
    assert isinstance(engine(sft()), Engine)


def test_a_phase_is_bound_by_the_names_of_its_parameters():
    def phase(student, rollout, draw, nobody): ...

    assert parameters_of(phase) == ("student", "rollout", "draw", "nobody")


@pytest.mark.parametrize("mode", ["fresh", "separate", "shared"])
def test_each_phase_gets_the_rows_the_record_and_the_draw_that_belong_to_it(mode):
    """Which rows each part sees; the batch, the rollout and the draw of one phase name the same rows."""
    seen: list[tuple[str, list[int], list[int]]] = []

    class Watched(type(dmd2())):  # type: ignore[misc]
        def critic_losses(self, critic, teacher, discriminator, rollout, batch, draw):
            assert draw.iteration == 4
            assert torch.equal(draw.key, batch.key)
            seen.append((draw.phase, batch.key.tolist(), rollout.key.tolist()))
            return super().critic_losses(critic, teacher, discriminator, rollout, batch, draw)

        def scores(self, teacher, critic, discriminator, rollout, batch, draw):
            seen.append((draw.phase, batch.key.tolist(), rollout.key.tolist()))
            return super().scores(teacher, critic, discriminator, rollout, batch, draw)

        def student_losses(self, student, rollout, scores, batch):
            seen.append(("student", batch.key.tolist(), scores.key.tolist()))
            return super().student_losses(student, rollout, scores, batch)

    plain = dmd2(gan=None, critic_updates=2, critic_batches=mode)
    engine(Watched(plain.section, plain.rollout_of), batch=6).run(4)
    batches = {"fresh": [0, 1, 1], "separate": [0, 1, 2], "shared": [0, 0, 0]}[mode]
    rows = [list(range(6 * number, 6 * number + 6)) for number in batches]
    critic = [rows[0][:3], rows[0][3:]] if mode == "shared" else rows[:2]
    expected = [("critic.0", critic[0]), ("critic.1", critic[1]), ("scores", rows[2]), ("student", rows[2])]
    assert seen == [(name, keys, keys) for name, keys in expected]


def test_the_scored_rollout_is_the_last_one_that_the_critic_saw():
    """`fresh`: of K rollouts the last is also scored."""
    rollouts: dict[str, Rollout] = {}

    class Watched(type(dmd2())):  # type: ignore[misc]
        def critic_losses(self, critic, teacher, discriminator, rollout, batch, draw):
            rollouts[draw.phase] = rollout
            return super().critic_losses(critic, teacher, discriminator, rollout, batch, draw)

        def scores(self, teacher, critic, discriminator, rollout, batch, draw) -> Scores:
            rollouts["scores"] = rollout
            return super().scores(teacher, critic, discriminator, rollout, batch, draw)

    plain = dmd2(gan=None)
    engine(Watched(plain.section, plain.rollout_of)).run(0)
    assert torch.equal(rollouts["scores"].x0, rollouts["critic.1"].x0)
    assert not torch.equal(rollouts["critic.0"].x0, rollouts["critic.1"].x0)
    assert rollouts["scores"].stop in range(len(LADDER))


# --- micro-batches ----------------------------------------------------------------------------------------------------


def the_same_up_to_rounding(one: ProcessEngine, other: ProcessEngine, iterations: int) -> None:
    for iteration in range(iterations):
        found, expected = one.run(iteration), other.run(iteration)
        assert found.keys() == expected.keys()
        assert [float(found[name]) for name in expected] == pytest.approx(list(map(float, expected.values())), rel=1e-8)
    state = one.state()
    for group, named in other.state().items():
        for name, tensor in named.items():
            assert torch.allclose(state[group][name], tensor, rtol=1e-6, atol=1e-9), f"{group}: {name}"


def test_a_batch_is_its_micro_batches_for_flow_matching():
    """Invariant 50, with pieces of 2, 2 and 1 rows."""
    cut, whole = (engine(sft(), dtype=DOUBLE, micro_batch=size) for size in (2, None))
    the_same_up_to_rounding(cut, whole, 2)


@pytest.mark.parametrize(("mode", "features"), [("fresh", "critic"), ("separate", "teacher"), ("shared", "critic")])
def test_a_batch_is_its_micro_batches_for_distillation(mode, features):
    """Invariant 50: an uneven last piece, in parts of the batch too."""
    gan = GANSection(features=features, student_weight=0.3, discriminator_weight=0.7, r1_weight=0.2)
    method = dmd2(DOUBLE, gan=gan, critic_batches=mode)
    cut, whole = (
        engine(method, dtype=DOUBLE, micro_batch=size, batch=6) for size in (4 if mode != "shared" else 2, None)
    )
    the_same_up_to_rounding(cut, whole, 1)


def test_a_micro_batch_larger_than_the_batch_changes_nothing():
    cut, whole = (engine(sft(), micro_batch=size) for size in (99, None))
    run(cut, range(2))
    run(whole, range(2))
    assert_same_bits(cut.state(), whole.state())


# --- updates that are not finite --------------------------------------------------------------------------------------


def break_once(monkeypatch: pytest.MonkeyPatch, made: ProcessEngine, role: str, how: str) -> None:
    """The next training phase of ``role`` gets a loss, or a gradient alone, that is not finite."""
    network = made.roles[role].network
    weight = network.head.projection.bias if role != "discriminator" else network.heads[0].output.bias
    left = [1]

    def spoil(gradient: Tensor) -> Tensor:
        left[0] -= 1
        return gradient * torch.nan if left[0] >= 0 else gradient

    if how == "gradient":
        weight.register_hook(spoil)
        return
    name = "student_losses" if role == "student" else "critic_losses"
    plain = getattr(made.method, name)

    @functools.wraps(plain)  # with its parameters, by which it is bound
    def spoiled(**arguments: Any) -> dict[str, Tensor]:
        losses = plain(**arguments)
        left[0] -= 1
        return losses | ({f"{role}/loss": losses[f"{role}/loss"] + torch.inf} if left[0] >= 0 else {})

    monkeypatch.setattr(made.method, name, spoiled)


@pytest.mark.parametrize(
    ("role", "how"), [("critic", "loss"), ("discriminator", "gradient"), ("student", "loss"), ("student", "gradient")]
)
def test_an_update_that_is_not_finite_is_skipped_by_every_role_of_its_phase(monkeypatch, role, how):
    """Weights, moments, the progress of the learning rate and the average stay bit for bit, and it is counted."""
    made = engine(dmd2(critic_updates=1))
    made.run(0)
    before = copied(made.state())
    break_once(monkeypatch, made, role, how)
    metrics = made.run(1)
    stood, went = (("student",), ("critic", "discriminator"))[:: 1 if role == "student" else -1]
    after = copied(made.state())
    for name in stood:
        expected = before[f"{name}.optimizer"] | {"skipped": torch.tensor(1)}
        assert_same_bits({"o": after[f"{name}.optimizer"], "w": after[name]}, {"o": expected, "w": before[name]})
        assert (int(metrics[f"{name}/updates"]), int(metrics[f"{name}/skipped"])) == (1, 1)
    for name in went:
        assert (int(metrics[f"{name}/updates"]), int(metrics[f"{name}/skipped"])) == (2, 0)
        assert any(not torch.equal(after[name][key], tensor) for key, tensor in before[name].items())
    same = all(torch.equal(after["ema"][key], tensor) for key, tensor in before["ema"].items())
    assert same == (role == "student")
    made.run(2)
    assert int(made.optimizers[stood[0]].updates) == 2
    assert all(tensor.isfinite().all() for named in made.state().values() for tensor in named.values())


def test_a_broken_row_spoils_the_update_in_whichever_micro_batch_it_stands(monkeypatch):
    made = engine(sft(), micro_batch=2)
    before = weights(made, "student")
    break_once(monkeypatch, made, "student", "loss")
    metrics = made.run(0)
    assert int(metrics["student/skipped"]) == 1
    assert moved(made, "student", before) == set()


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_every_role_logs_its_loss_norm_rate_and_counters():
    """PITFALLS, curves; each value a number on the device, not yet fetched."""
    metrics = engine(dmd2()).run(0)
    expected = {
        "critic/loss",
        "student/loss",
        "discriminator/loss",
        "discriminator/r1",
        "student/gan",
        "student/dmd_rms",
    }
    expected |= {
        f"{role}/{name}"
        for role in ("student", "critic", "discriminator")
        for name in ("grad_norm", "lr", "updates", "skipped")
    }
    assert {name for name in metrics if not name.startswith("latents/")} == expected
    assert all(isinstance(value, Tensor) and value.ndim == 0 and not value.requires_grad for value in metrics.values())


def test_the_metrics_of_an_iteration_are_means_over_its_critic_updates(monkeypatch):
    made, values = engine(dmd2(gan=None)), []
    plain = made._train

    def kept(phase: Phase, *arguments: Any) -> dict[str, Tensor]:
        report = plain(phase, *arguments)
        values.append((phase.name, report))
        return report

    monkeypatch.setattr(made, "_train", kept)
    metrics = made.run(0)
    losses = [report["critic/loss"] for name, report in values if name.startswith("critic")]
    torch.testing.assert_close(metrics["critic/loss"], torch.stack(losses).mean())
    assert int(metrics["critic/updates"]) == 2

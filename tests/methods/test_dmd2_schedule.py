"""The schedule of DMD2: which phases an iteration has, which batch and rows each sees, and how many there are."""

from __future__ import annotations

import pytest

from fewstep.methods.api import Phase
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.gan import GANSection
from fewstep.rollout.few_step import FewStep

ROLLOUT = FewStep((1.0, 0.5), "renoise", (1, 1, 2, 2))


def method(**settings: object) -> DMD2:
    return DMD2(DMD2Section(**settings), ROLLOUT)  # type: ignore[arg-type]


def outline(phases: list[Phase]) -> list[tuple[str, int]]:
    return [(phase.name, phase.batch) for phase in phases]


def updates(made: DMD2, iterations: int) -> list[tuple[int, int]]:
    """The updates of critic and student in every iteration."""
    found = []
    for iteration in range(iterations):
        trains = [phase.trains for phase in made.phases(iteration)]
        found.append((sum("critic" in names for names in trains), sum("student" in names for names in trains)))
    return found


def test_fresh_makes_one_rollout_a_critic_update_and_scores_the_last_one():
    made = method(critic_updates=3, critic_batches="fresh")
    assert outline(list(made.phases(0))) == [
        ("rollout.0", 0),
        ("critic.0", 0),
        ("rollout.1", 1),
        ("critic.1", 1),
        ("rollout.2", 2),
        ("critic.2", 2),
        ("scores", 2),
        ("student", 2),
    ]
    assert (made.num_batches, made.row_parts) == (3, 1)
    assert {phase.part for phase in made.phases(0)} == {(0, 1)}


def test_separate_makes_one_more_rollout_for_the_student():
    made = method(critic_updates=2, critic_batches="separate")
    assert outline(list(made.phases(0))) == [
        ("rollout.0", 0),
        ("critic.0", 0),
        ("rollout.1", 1),
        ("critic.1", 1),
        ("rollout.2", 2),
        ("scores", 2),
        ("student", 2),
    ]
    assert (made.num_batches, made.row_parts) == (3, 1)


def test_shared_makes_one_rollout_and_each_critic_update_sees_its_own_part_of_the_rows():
    made = method(critic_updates=3, critic_batches="shared")
    phases = list(made.phases(0))
    assert outline(phases) == [
        ("rollout", 0),
        ("critic.0", 0),
        ("critic.1", 0),
        ("critic.2", 0),
        ("scores", 0),
        ("student", 0),
    ]
    assert [phase.part for phase in phases] == [(0, 1), (0, 3), (1, 3), (2, 3), (0, 1), (0, 1)]
    assert (made.num_batches, made.row_parts) == (1, 3)


@pytest.mark.parametrize("mode", ["fresh", "separate", "shared"])
def test_an_iteration_is_k_critic_updates_and_one_student_update(mode):
    assert updates(method(critic_updates=5, critic_batches=mode), 4) == [(5, 1)] * 4


@pytest.mark.parametrize("mode", ["fresh", "separate", "shared"])
@pytest.mark.parametrize(
    ("warm_up", "expected"),
    [
        (0, [(3, 1), (3, 1), (3, 1), (3, 1)]),
        (1, [(1, 0), (3, 1), (3, 1), (3, 1)]),
        (3, [(3, 0), (3, 1), (3, 1), (3, 1)]),
        (7, [(3, 0), (3, 0), (1, 0), (3, 1)]),
    ],
)
def test_the_warm_up_has_exactly_its_critic_updates_and_no_student_update(mode, warm_up, expected):
    """Also where K does not divide it."""
    made = method(critic_updates=3, critic_batches=mode, critic_warmup_updates=warm_up)
    assert updates(made, 4) == expected


@pytest.mark.parametrize("mode", ["fresh", "separate", "shared"])
def test_a_warm_up_iteration_scores_nothing(mode):
    made = method(critic_updates=3, critic_batches=mode, critic_warmup_updates=4)
    for iteration in (0, 1):
        names = [phase.name for phase in made.phases(iteration)]
        assert not {"scores", "student"} & set(names)
    assert "scores" in [phase.name for phase in made.phases(2)]


@pytest.mark.parametrize("mode", ["fresh", "separate", "shared"])
def test_no_phase_reads_a_batch_that_the_iteration_has_not(mode):
    made = method(critic_updates=4, critic_batches=mode)
    assert {phase.batch for phase in made.phases(0)} == set(range(made.num_batches))


def test_every_trained_role_of_the_critic_phase_steps_together():
    plain, adversarial = method(), method(gan=GANSection())
    assert plain.roles == ("student", "teacher", "critic")
    assert plain.trained == ("student", "critic")
    assert adversarial.roles == ("student", "teacher", "critic", "discriminator")
    assert adversarial.trained == ("student", "critic", "discriminator")
    for made, trained in ((plain, ("critic",)), (adversarial, ("critic", "discriminator"))):
        assert {phase.trains for phase in made.phases(0) if phase.name.startswith("critic")} == {trained}


def test_the_schedule_of_an_iteration_does_not_depend_on_those_before_it():
    """PITFALLS, resume: nothing is counted up inside the method."""
    made = method(critic_updates=3, critic_warmup_updates=4)
    later = outline(list(made.phases(1)))
    list(made.phases(5))
    assert outline(list(method(critic_updates=3, critic_warmup_updates=4).phases(1))) == later
    assert outline(list(made.phases(1))) == later

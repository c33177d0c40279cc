"""What every method owes every engine: a schedule that can be run, and a run that can be cut anywhere.

A new method is added to ``CASES`` and inherits all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fewstep.engines.process import parameters_of
from fewstep.methods import METHODS
from fewstep.methods.api import Method
from fewstep.methods.consistency import Consistency, ConsistencySection
from fewstep.methods.diffusion_forcing import DiffusionForcing, DiffusionForcingSection
from fewstep.methods.gan import GANSection
from fewstep.methods.ode_init import OdeInit, OdeInitSection
from fewstep.methods.sid import SiD, SiDSection
from fewstep.methods.teacher_forcing import TeacherForcing, TeacherForcingSection
from fewstep.models.api import FlowModel
from fewstep.rollout.few_step import FewStep
from tests.engines.worlds import LADDER, SHAPE, assert_same_bits, chunks_of, copied, dmd2, engine, sft, streams

GIVEN = ("batch", "draw", "carry")

CASES: dict[str, Callable[[], Method]] = {
    "sft": sft,
    "diffusion forcing": lambda: DiffusionForcing(DiffusionForcingSection(cond_dropout=0.5, given_frames=1)),
    "teacher forcing, noised history": lambda: TeacherForcing(TeacherForcingSection(history_sigma_max=0.4)),
    "ode init": lambda: OdeInit(OdeInitSection(nodes=10, shift=1.0), LADDER),
    "consistency": lambda: Consistency(ConsistencySection(nodes=7)),
    "dmd2, fresh, gan on the critic": dmd2,
    "dmd2, separate, gan on the teacher": lambda: dmd2(
        gan=GANSection(features="teacher", share_noise=True), critic_batches="separate"
    ),
    "dmd2, shared, warm-up": lambda: dmd2(gan=None, critic_batches="shared", critic_updates=3, critic_warmup_updates=4),
    "sid, gan on the critic": lambda: SiD(
        SiDSection(critic_updates=2, guidance_scale=3.0, gan=GANSection(student_weight=0.3)),
        FewStep(LADDER, "renoise", SHAPE),
    ),
    "dmd2, streams, fresh": streams,
    "dmd2, streams, separate, warm-up": lambda: streams(critic_batches="separate", critic_warmup_updates=3),
    "sid, streams, shared": lambda: streams(SiD, critic_batches="shared", critic_updates=3),
}
LONG = ("sft", "dmd2, fresh, gan on the critic")
"""Restarted after three iterations of six; the others, for the sake of time, after two of four."""

every_method = pytest.mark.parametrize("case", CASES)


def test_every_method_has_a_case():
    assert {type(make()) for make in CASES.values()} == set(METHODS)


def test_the_methods_names_differ():
    names = [method.Section.model_fields["name"].default for method in METHODS]
    assert len(set(names)) == len(names)
    assert names == [method.Section().name for method in METHODS]


@every_method
def test_a_method_keeps_the_contract_and_can_be_made_from_its_section(case):
    made = CASES[case]()
    assert isinstance(made, Method)
    again = type(made).of(made.section, FewStep(LADDER, "renoise", SHAPE))
    assert [phase.name for phase in again.phases(3)] == [phase.name for phase in made.phases(3)]
    assert (again.roles, again.trained, again.num_batches) == (made.roles, made.trained, made.num_batches)


@every_method
def test_the_phases_of_an_iteration_have_names_of_their_own(case):
    names = [phase.name for phase in CASES[case]().phases(3)]
    assert len(set(names)) == len(names), "two phases of one name would draw the same random numbers"


@every_method
def test_a_phase_trains_or_gives_a_record(case):
    for phase in CASES[case]().phases(3):
        assert bool(phase.trains) != bool(phase.gives), phase.name


@every_method
def test_a_phase_asks_only_for_what_is_there(case):
    """A name that nobody gives would be bound to None in silence."""
    made = CASES[case]()
    for iteration in range(4):
        records: set[str] = set()
        for phase in made.phases(iteration):
            optional = {"discriminator"}  # bound to None where a method does without it
            unknown = set(parameters_of(phase.run)) - {*made.roles, *GIVEN, *records, *optional}
            assert not unknown, (phase.name, unknown)
            records |= {phase.gives} if phase.gives else set()


@every_method
def test_every_trained_role_is_trained_and_none_but_those(case):
    made = CASES[case]()
    assert set(made.trained) <= set(made.roles)
    assert made.roles[0] == "student"
    assert {name for phase in made.phases(5) for name in phase.trains} == set(made.trained)
    last = [phase.trains for phase in made.phases(5) if "student" in phase.trains]
    assert len(last) == 1, "an iteration is one update of the student"


@every_method
def test_batches_and_parts_are_those_that_the_method_announces(case):
    made = CASES[case]()
    phases = list(made.phases(5))
    assert {phase.batch for phase in phases} == set(range(made.num_batches))
    assert {phase.part[1] for phase in phases} <= {1, made.row_parts}
    cut = [phase.part[0] for phase in phases if phase.part[1] > 1]
    assert cut == (list(range(made.row_parts)) if made.row_parts > 1 else []), "every row once"


@every_method
def test_losses_are_named_by_role_and_have_one_value_a_row(case):
    made = CASES[case]()
    running = engine(made, batch=6)
    plain, seen = type(running)._train, set()

    def checked(self: Any, phase: Any, iteration: int, batch: Any, records: Any) -> Any:
        for arguments, _ in self._pieces(phase, iteration, batch, records):
            rows = arguments["batch"].key.shape
            for name, losses in phase.run(**arguments).items():
                assert losses.shape == rows
                assert losses.dtype == torch.float32
                seen.add(name.split("/")[0])
        return plain(self, phase, iteration, batch, records)

    running._train = checked.__get__(running)  # type: ignore[method-assign]
    running.run(3)
    assert seen == set(made.trained)


@pytest.mark.parametrize(("case", "half"), [(case, 3 if case in LONG else 2) for case in CASES])
def test_a_run_is_its_two_halves_with_a_restart_between_them(case, half):
    """PITFALLS, resume: weights, optimizers, average and metrics, bit for bit; the second engine is another one, whose
    own weights are different ones."""
    whole, first, second = (engine(CASES[case](), batch=6) for _ in range(3))
    expected = [whole.run(iteration) for iteration in range(2 * half)]
    for iteration in range(half):
        first.run(iteration)
    scramble(second)
    second.load(copied(first.state()))
    del first
    found = [second.run(iteration) for iteration in range(half, 2 * half)]
    for row, other in zip(found, expected[half:], strict=True):
        assert_same_bits({"metrics": row}, {"metrics": other})
    assert_same_bits(second.state(), whole.state())


@torch.no_grad()
def scramble(made: Any) -> None:
    """Every trained weight becomes another one, so that what is not loaded shows."""
    for name in made.optimizers:
        for parameter in made.roles[name].parameters().values():
            parameter.mul_(1.5)
    for shadow in made.ema.shadows.values():
        shadow.mul_(1.5)


@every_method
def test_a_state_names_every_trained_role_its_optimizer_and_the_average(case):
    made = CASES[case]()
    running = engine(made, batch=6)
    running.run(0)
    state = running.state()
    carries = {f"carry.{slot}" for slot in range(made.num_batches)} if chunks_of(made) > 1 else set()
    assert set(state) == {*made.trained, *(f"{name}.optimizer" for name in made.trained), "ema", *carries}
    for name in made.trained:
        weights = set(running.roles[name].network.state_dict())
        assert set(state[name]) == weights
        moments = {f"{key}/{weight}" for key in ("exp_avg", "exp_avg_sq", "step") for weight in weights}
        started = moments if int(state[f"{name}.optimizer"]["updates"]) else set()
        assert set(state[f"{name}.optimizer"]) == {"updates", "skipped", *started}
    assert set(state["ema"]) == set(state["student"])


@every_method
def test_a_state_that_lacks_a_group_or_a_tensor_is_an_error(case):
    """PITFALLS, resume: nothing is left at its start in silence."""
    running = engine(CASES[case](), batch=6)
    state = copied(running.state())
    for group in state:
        with pytest.raises(KeyError):
            running.load({name: named for name, named in state.items() if name != group})
    for group in (name for name in state if not name.endswith(".optimizer")):
        some = next(iter(state[group]))
        with pytest.raises((KeyError, RuntimeError), match=some.replace(".", r"\.")):
            running.load(state | {group: {name: t for name, t in state[group].items() if name != some}})


@every_method
def test_every_role_of_a_method_is_a_flow_model_but_the_discriminator(case):
    running = engine(CASES[case](), batch=6)
    for name, role in running.roles.items():
        if name != "discriminator":
            assert isinstance(role, FlowModel)
            assert (role.num_layers, role.width, role.geometry.channels) == (2, 48, 4)


def test_different_seeds_are_different_runs():
    one, other = (engine(sft(), seed=seed) for seed in (1, 2))
    one.run(0), other.run(0)
    pairs = itertools.zip_longest(one.state()["student"].values(), other.state()["student"].values())
    assert not all(torch.equal(a, b) for a, b in pairs)

"""What of the Ray engine needs no Ray: records on their way, the order of phases, which role lives where, refusals."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fewstep.config import load_recipe
from fewstep.describe import describe
from fewstep.engines.mesh import Ranks
from fewstep.engines.ray.placement import Group, GroupSection, RaySection, groups_of, split
from fewstep.engines.ray.schedule import Step, early, in_turns, leading, steps
from fewstep.engines.ray.transport import Parcel, joined, meets, packed, unpacked
from fewstep.errors import UserError, UserErrors
from fewstep.member import member
from fewstep.methods.api import Phase
from fewstep.methods.consistency import Consistency, ConsistencySection
from fewstep.methods.sft import SFT, SFTSection
from fewstep.models.wan.conditioner import LabelCond
from fewstep.prepare import prepare
from fewstep.records import Batch, Rollout, Scores, leaves, rows
from tests.engines.worlds import dmd2, engine, streams
from tests.recipes.tiny_runs import World

CPU, ROWS = torch.device("cpu"), 12


def rollout(num: int = ROWS) -> Rollout:
    """Of rows 12 to 23, in three kinds of numbers."""
    draw = torch.Generator().manual_seed(1)
    shape = (num, 1, 2, 3, 5)
    x_stop, x0 = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    return Rollout(
        12 + torch.arange(num), 2, x_stop, torch.rand(num, 1, generator=draw), x0.bfloat16().float(), given=0
    )


def sent(record: Any, senders: int, takers: int) -> list[list[Parcel]]:
    """By taker, what each sender has for it, having passed between processes."""
    parts = [rows(record, torch.arange(sender, ROWS, senders)) for sender in range(senders)]
    return [
        [
            pickle.loads(pickle.dumps(packed(parts[sender], sender, senders, taker, takers)))
            for sender in range(senders)
            if meets(sender, senders, taker, takers)
        ]
        for taker in range(takers)
    ]


@pytest.mark.parametrize(("senders", "takers"), list(itertools.product((1, 2, 3, 4), (1, 2, 3, 6))))
def test_every_taker_gets_its_rows_in_their_order_and_no_others(senders: int, takers: int):
    whole = rollout()
    for taker, parcels in enumerate(sent(whole, senders, takers)):
        assert sum(parcel.values[0].shape[0] // 8 for parcel in parcels) == ROWS // takers
        found, expected = joined(parcels, CPU), rows(whole, torch.arange(taker, ROWS, takers))
        assert (found.stop, found.given, found.windows) == (2, 0, ())
        for one, other in zip(leaves(found), leaves(expected), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_what_is_sent_to_all_takers_is_every_row_once():
    parcels = [parcel for taker in sent(rollout(), 3, 2) for parcel in taker]
    assert len(parcels) == 6
    assert sorted(key for parcel in parcels for key in unpacked(parcel).key.tolist()) == list(range(12, 24))


def test_records_of_any_form_travel_and_keep_bfloat16():
    cond = LabelCond(torch.arange(ROWS))
    x0 = torch.randn(ROWS, 1, 2, 3, 4)
    scores = Scores(torch.arange(ROWS), x0, {"student/a": torch.rand(ROWS), "student/b": torch.rand(ROWS).bfloat16()})
    for record in (Batch(torch.arange(ROWS), None, cond, None), scores):
        found = joined(sent(record, 2, 1)[0], CPU)
        for one, other in zip(leaves(found), leaves(record), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_a_record_with_a_graph_is_refused():
    with pytest.raises(RuntimeError, match="carries a gradient graph"):
        packed(Scores(torch.arange(2), torch.ones(2, 1, 1, 1, 1, requires_grad=True), {}), 0, 1, 0, 1)


def test_a_record_of_other_rows_is_refused():
    made = engine(dmd2(gan=None), batch=4)
    phases = list(made.method.phases(0))
    record = made.perform(phases[0], 0)
    with pytest.raises(RuntimeError, match=r"'rollout' for phase 'critic\.0' is not of the rows of its batch"):
        made.perform(phases[1], 0, {"rollout": replace(record, key=record.key + 1)})


def test_shared_memory_is_seen_and_not_written():
    parcel = packed(rollout(), 0, 1, 0, 1)
    for values in parcel.values:
        values.flags.writeable = False
    before = [values.copy() for values in parcel.values]
    assert unpacked(parcel).x0.data_ptr() == parcel.values[-1].ctypes.data
    joined([parcel], CPU).x0.zero_()
    assert all((values == old).all() for values, old in zip(parcel.values, before, strict=True))


def groups(method: Any, layout: str = "split") -> Any:
    sizes = {"all": {"workers": 2}} if layout == "shared" else {"critic": {"workers": 2}, "student": {"workers": 1}}
    return groups_of(RaySection(layout=layout, groups=sizes), method, 6, CPU)  # type: ignore[arg-type]


def named(found: Sequence[Step]) -> list[str]:
    return [step.phase for step in found]


def test_teacher_critic_and_head_live_together_and_the_average_with_the_student():
    assert split(dmd2(), 6) == {"critic": ("teacher", "critic", "discriminator"), "student": ("student",)}
    method = Consistency(ConsistencySection(nodes=7))
    assert split(method, 6) == {"critic": ("teacher",), "student": ("student", "ema")}
    assert [group.roles for group in groups(dmd2(), "shared")] == [dmd2().roles]


def test_records_that_another_group_takes_are_those_of_the_phase_before():
    """The fourth rollout is also scored; what the student made itself, it does not send for."""
    found = steps(dmd2(gan=None), groups(dmd2(gan=None)), 0)
    assert named(found) == ["rollout.0", "critic.0", "rollout.1", "critic.1", "scores", "student"]
    assert [step.group for step in found] == ["student", "critic", "student", "critic", "critic", "student"]
    assert [step.takes for step in found] == [{}, {"rollout": 0}, {}, {"rollout": 2}, {"rollout": 2}, {"scores": 4}]
    assert [step.sends for step in found] == [("critic",), (), ("critic",), (), ("student",), ()]


def test_the_critic_group_runs_ahead_of_the_update_of_the_student_as_far_as_it_has_samples():
    found = steps(dmd2(gan=None), groups(dmd2(gan=None)), 0)
    assert named(early(found, {0, 2})) == ["critic.0", "critic.1", "scores"]
    assert named(early(found, {0})) == ["critic.0"]
    assert named(early(found, {0, 1, 2})) == ["critic.1", "scores"]
    assert early(found, set()) == []
    together = steps(dmd2(gan=None), groups(dmd2(gan=None), "shared"), 0)
    assert early(together, {0}) == [], "where the student lives nothing runs ahead of it"


def test_groups_that_take_turns_change_as_rarely_as_records_allow():
    ordered = in_turns(steps(dmd2(gan=None), groups(dmd2(gan=None)), 0))
    assert named(ordered) == ["rollout.0", "rollout.1", "critic.0", "critic.1", "scores", "student"]


def test_rollouts_lead_and_what_takes_or_trains_does_not():
    assert named(leading(steps(dmd2(gan=None), groups(dmd2(gan=None)), 0))) == ["rollout.0", "rollout.1"]
    method = Consistency(ConsistencySection(nodes=7))
    assert named(leading(steps(method, groups(method), 0))) == ["pair"], "the target waits for the pair"


class Together(SFT):
    """A phase in which student and teacher compute."""

    roles = ("student", "teacher")

    def phases(self, iteration: int) -> Any:
        yield Phase("student", lambda student, teacher, batch: {}, trains=("student",))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (SFT(SFTSection()), ["'sft' computes with the student alone", "engine.layout=shared"]),
        (Together(SFTSection()), ["phase 'student'", "student and teacher together", "engine.layout=shared"]),
    ],
)
def test_a_method_that_cannot_be_split_is_refused_with_the_reason(method: Any, words: list[str]):
    with pytest.raises(UserError) as caught:
        groups(method)
    assert all(word in str(caught.value) for word in words)


def test_streams_are_split_since_their_carry_stays_and_do_not_overlap():
    assert len(groups(streams())) == 2
    sizes: Any = {"critic": {"workers": 1}, "student": {"workers": 1}}
    with pytest.raises(UserError, match="stream_chunks"):
        groups_of(RaySection(layout="split", groups=sizes, overlap=True), streams(), 6, CPU)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"groups": {"critic": {"gpus": 1}}}, "leave out 'groups.critic'"),
        ({"layout": "split"}, "needs the size of both groups"),
        ({"layout": "split", "groups": {"critic": {"gpus": 1}}}, "needs the size of both groups"),
        ({"overlap": True}, "'overlap' is for 'layout: split'"),
        ({"groups": {"all": {"gpus": 1, "workers": 1}}}, "one of them"),
    ],
)
def test_groups_that_do_not_suit_the_layout_are_refused(settings: dict[str, Any], words: str):
    with pytest.raises(ValidationError, match=words):
        RaySection(**settings)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["engine.groups.all={gpus: 2}"], ["engine.groups.all.gpus = 2", "write engine.groups.all='{workers: 2}'"]),
        (["engine.groups.all={workers: 3}", "data.batch=4"], ["data.batch = 4", "multiple of 3", "group 'all'"]),
    ],
)
def test_groups_that_do_not_suit_the_machine_or_the_batch_are_refused_before_ray_starts(tmp_path, more, words):
    world = World.make(tmp_path / "world")
    with pytest.raises(UserError) as caught:
        prepare(world.recipe("wan_nano/sft", "engine.name=ray", "engine.device=cpu", *more))
    assert all(word in str(caught.value) for word in words)


def test_a_worker_goes_to_the_folder_where_the_run_was_started_and_misses_it_by_name(tmp_path, monkeypatch):
    """Those of a joined cluster begin where Ray was started; recipes hold paths from the folder of the run."""
    world = World.make(tmp_path / "world")
    values = world.recipe("wan_nano/sft", "engine.device=cpu", "validation=null").model_dump(mode="json")
    run, group = tmp_path / "run", Group("all", ("student",), GroupSection(workers=1))
    (tmp_path / "started").mkdir()
    monkeypatch.chdir(tmp_path / "started")
    with pytest.raises(UserError, match=f"{run} is not there on .*: share them"), ExitStack() as stack:
        stack.enter_context(member(values, run, tmp_path, group, Ranks(0, 1), None))
    run.mkdir()
    with member(values, run, tmp_path, group, Ranks(0, 1), None):
        assert Path.cwd() == tmp_path


def test_ray_under_torchrun_is_refused(tmp_path, monkeypatch):
    world = World.make(tmp_path / "world")
    for key, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="torchrun started 2 processes"):
        prepare(world.recipe("wan_nano/sft", "engine.name=ray"))


def test_a_dry_run_names_the_groups(tmp_path):
    world = World.make(tmp_path / "world")
    plan = prepare(world.recipe("wan_nano/sft", "engine.name=ray", "engine.groups.all={workers: 2}", "data.batch=4"))
    assert "group all: 2 workers, each with 1/2 of student" in describe(plan)


def test_an_engine_without_a_name_is_that_of_one_process_and_unknown_keys_are_told(tmp_path):
    world = World.make(tmp_path / "world")
    assert world.recipe("wan_nano/sft", "engine={device: cpu}").engine.name == "process"
    with pytest.raises(UserErrors, match=r"engine\.layout"):
        world.recipe("wan_nano/sft", "engine.layout=split")


def test_several_errors_stay_several_between_processes():
    found = pickle.loads(pickle.dumps(UserErrors(["one thing", "another"])))
    assert isinstance(found, UserErrors)
    assert found.errors == ("one thing", "another")


def test_the_recipe_of_a_run_on_ray_is_read_again(tmp_path):
    from fewstep.config import dump_recipe

    world = World.make(tmp_path / "world")
    recipe = world.recipe("wan_nano/sft", "engine.name=ray", "engine.groups.all={workers: 2}", "data.batch=4")
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml") == recipe

"""Workers that only roll out, as far as it needs no Ray: which phases are theirs, and how weights come to them."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fewstep.assemble import assemble
from fewstep.describe import describe
from fewstep.engines.ray import weights
from fewstep.engines.ray.placement import RaySection, groups_of
from fewstep.engines.ray.schedule import leading, steps
from fewstep.engines.ray.weights import Rows, Taking, WeightError, digest, pieces, sent
from fewstep.engines.roles import Role, freeze, span
from fewstep.errors import UserError
from fewstep.methods.api import Method, Phase
from fewstep.methods.consistency import Consistency, ConsistencySection
from fewstep.methods.dmd2 import DMD2
from fewstep.methods.sft import SFT, SFTSection
from fewstep.prepare import prepare
from fewstep.rng import Draw
from tests.engines.worlds import dmd2, network, streams
from tests.models.tiny import randomise
from tests.recipes.tiny_runs import World

CPU, ROOT = torch.device("cpu"), Path(__file__).parents[2]
SIZES = {
    "shared": {"all": {"workers": 2}, "rollout": {"workers": 1}},
    "split": {"critic": {"workers": 2}, "student": {"workers": 1}, "rollout": {"workers": 2}},
}


def groups(method: Method, layout: str = "split") -> Any:
    return groups_of(RaySection(layout=layout, groups=SIZES[layout]), method, 6, CPU)  # type: ignore[arg-type]


def of_kind(kind: type[DMD2]) -> DMD2:
    plain = dmd2(gan=None)
    return kind(plain.section, plain.rollout_of)


def role(seed: int, layers: int = 2, dtype: torch.dtype = torch.float64) -> Role:
    return Role("student", network(seed, layers=layers).to(dtype), dtype)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(weights, "PIECE", 20_000)
    return 20_000


# --- which phases are theirs


def test_rollouts_go_to_their_workers_and_all_else_stays():
    found = steps(dmd2(gan=None), groups(dmd2(gan=None)), 0)
    assert [step.group for step in found] == ["rollout", "critic", "rollout", "critic", "critic", "student"]
    assert [step.takes for step in found] == [
        {},
        {"rollout": 0},
        {},
        {"rollout": 2},
        {"rollout": 2},
        {"rollout": 2, "scores": 4},
    ]
    assert [step.sends for step in found] == [("critic",), (), ("critic", "student"), (), ("student",), ()]
    shared = steps(dmd2(gan=None), groups(dmd2(gan=None), "shared"), 0)
    assert [step.group for step in shared] == ["rollout", "all", "rollout", "all", "all", "all"]
    assert [step.sends for step in shared] == [("all",), (), ("all",), (), (), ()]


def test_the_averaged_student_is_not_rolled_out_elsewhere():
    """What computes with the average, or trains, stays with the student, whoever makes the samples."""

    class Averaging(DMD2):
        def phases(self, iteration: int) -> Iterator[Phase]:
            yield Phase("rollout", self.rollout, gives="rollout")
            yield Phase("averaged", lambda ema, rollout: rollout, gives="averaged")
            yield Phase("student", lambda student, averaged: {}, trains=("student",))

    method = of_kind(Averaging)
    method.roles = ("student", "ema", "critic")
    assert [step.group for step in steps(method, groups(method), 0)] == ["rollout", "student", "student"]


def test_what_is_rolled_out_after_an_update_does_not_run_ahead_of_it():
    class Twice(DMD2):
        def phases(self, iteration: int) -> Iterator[Phase]:
            yield from super().phases(iteration)
            yield self._rolls("again")

    method = of_kind(Twice)
    found = leading(steps(method, groups(method), 0))
    assert [step.phase for step in found] == ["rollout.0", "rollout.1"]


@pytest.mark.parametrize(
    ("method", "layout", "words"),
    [
        (SFT(SFTSection()), "shared", "method 'sft' makes no samples with the student alone"),
        (Consistency(ConsistencySection(nodes=7)), "split", "method 'consistency' makes no samples"),
        (streams(), "split", r"sampling\.stream_chunks"),
    ],
)
def test_methods_whose_samples_cannot_be_made_elsewhere_are_refused(method: Any, layout: str, words: str):
    with pytest.raises(UserError, match=rf"engine\.groups\.rollout: .*{words}.*leave it out"):
        groups(method, layout)


def test_groups_that_take_turns_have_no_such_workers_and_overlap_needs_them_or_a_split():
    with pytest.raises(ValidationError, match="write 'layout: split'"):
        RaySection(layout="colocated", groups=SIZES["split"])  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"size of 'groups\.rollout'"):
        RaySection(overlap=True)
    assert RaySection(groups=SIZES["shared"], overlap=True).overlap  # type: ignore[arg-type]


def test_without_a_size_the_other_workers_have_the_gpus_that_are_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    section = RaySection(groups={"rollout": {"gpus": 3}})  # type: ignore[arg-type]
    found = groups_of(section, dmd2(), 6, torch.device("cuda"))
    assert [(group.name, group.size, group.rolls) for group in found] == [("all", 5, False), ("rollout", 3, True)]


# --- how weights come to them


@pytest.mark.parametrize(("num", "parts"), list(itertools.product((0, 1, 2, 5, 8, 9), (1, 2, 3, 4))))
def test_rows_are_cut_as_fsdp_cuts_them(num: int, parts: int):
    chunks = list(torch.arange(num).chunk(parts)) if num else []
    for index in range(parts):
        expected = chunks[index].tolist() if index < len(chunks) else []
        assert list(range(*span(num, parts, index))) == expected


def test_pieces_are_bounded_and_hold_every_row_once(small_pieces: int):
    parts = role(1).parts()
    found = pieces(parts)
    assert len(found) > 5
    assert any(name == pieces_next[0][0] for (*_, (name, _, _)), pieces_next in itertools.pairwise(found)), "one is cut"
    for piece in found:
        assert 0 < sum(parts[name].rows[first:end].nbytes for name, first, end in piece) <= small_pieces
    rows = [(name, row) for piece in found for name, first, end in piece for row in range(first, end)]
    assert rows == [(name, row) for name, part in parts.items() for row in range(len(part.rows))]


def test_a_row_that_is_larger_than_a_piece_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "PIECE", 100)
    parts = {name: part for name, part in role(1).parts().items() if name == "blocks.0.self_attention.q.weight"}
    assert pieces(parts) == [[("blocks.0.self_attention.q.weight", row, row + 1)] for row in range(48)]


def on_their_way(sender: Role, takers: int = 1, taker: int = 0) -> Iterator[tuple[Rows, ...]]:
    """Piece by piece, what one of the takers gets, having passed between processes."""
    for cuts in pieces(sender.parts()):
        yield pickle.loads(pickle.dumps(sent(sender, cuts, takers, (0, 1))[taker]))


def hand_over(sender: Role, taker: Role) -> None:
    taking = Taking(taker)
    for rows in on_their_way(sender):
        taking.take(rows)
    taking.end()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_was_taken_is_the_students_to_the_last_bit(small_pieces: int, dtype: torch.dtype):
    sender, taker = role(1, dtype=dtype), role(2, dtype=dtype)
    taker.network.requires_grad_(False)
    hand_over(sender, taker)
    for (name, found), expected in zip(taker.network.named_parameters(), sender.network.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_weights_of_a_student_that_sleeps_are_sent_from_where_they_wait():
    sender, taker = role(1), role(2)
    expected = copy.deepcopy(sender.network.state_dict())
    sender.weights.sleep()
    hand_over(sender, taker)
    assert sender.weights.asleep
    assert all(torch.equal(tensor, expected[name]) for name, tensor in taker.network.state_dict().items())


@pytest.mark.parametrize("takers", [2, 3, 5])
def test_each_of_several_takers_gets_its_part_and_no_more(small_pieces: int, takers: int):
    sender = role(1)
    whole = dict(sender.network.named_parameters())
    for taker in range(takers):
        found: dict[str, list[torch.Tensor]] = {}
        for piece in on_their_way(sender, takers, taker):
            for rows in piece:
                found.setdefault(rows.name, []).append(torch.from_numpy(rows.values).view(rows.dtype))
        for name, weight in whole.items():
            chunks = weight.detach().chunk(takers)
            if taker < len(chunks):
                assert torch.equal(torch.cat(found[name]), chunks[taker])
            else:
                assert name not in found


def test_of_workers_that_hold_copies_each_set_sends_to_its_own():
    """``engine.replicas``: four takers are two sets of two."""
    sender = role(1)
    cuts = pieces(sender.parts())[0]
    first, second = (sent(sender, cuts, 4, (mine, 2)) for mine in (0, 1))
    assert [bool(rows) for rows in first] == [True, True, False, False]
    assert [bool(rows) for rows in second] == [False, False, True, True]
    assert [rows.end for rows in first[1]] == [rows.end for rows in second[3]]


def test_a_bit_that_changed_on_its_way_is_found_and_its_weight_named():
    broken, taking = "blocks.1.cross_attention.k.weight", Taking(role(2))
    sent_rows = [one for rows in on_their_way(role(1)) for one in rows]
    taking.take(one for one in sent_rows if one.name != broken)
    changed = next(one for one in sent_rows if one.name == broken)
    changed.values.flat[11] ^= 4
    with pytest.raises(WeightError, match=r"'blocks\.1\.cross_attention\.k\.weight', rows 0 to 47, is not"):
        taking.take((changed,))


def test_the_hash_is_of_dtype_shape_place_and_bytes():
    values = torch.arange(6, dtype=torch.float32).view(2, 3)
    found = {
        digest(values, (2, 3), 0),
        digest(values.view(torch.int32), (2, 3), 0),
        digest(values, (4, 3), 0),
        digest(values, (4, 3), 2),
        digest(values + 1, (2, 3), 0),
    }
    assert len(found) == 5
    assert digest(values.clone(), (2, 3), 0) in found


@pytest.mark.parametrize(
    ("sender", "taker", "words"),
    [
        (role(1, layers=3), role(2), r"the student's weight 'blocks\.2\..*is not in the network that rolls out"),
        (role(1), role(2, layers=3), r"has sent no weight 'blocks\.2\..*\(\d\d such\)"),
        (role(1), role(2, dtype=torch.float32), r"is torch\.float32 of .* here, the student's is torch\.float64"),
    ],
)
def test_a_weight_too_many_or_too_few_or_of_another_form_is_named(sender: Role, taker: Role, words: str):
    with pytest.raises(WeightError, match=words):
        hand_over(sender, taker)


def test_samples_are_rounded_as_the_students_own(tmp_path: Path):
    """Autocast rounds the copy as it rounds the student; a network that is kept in bfloat16 makes other samples."""
    world = World.make(tmp_path / "world")
    teacher = f"teacher.init={ROOT / 'recipes/wan_nano/teacher'}"
    plan = prepare(world.recipe("wan_nano/dmd2", teacher, "engine.precision=bfloat16", "engine.device=cpu"))
    student = assemble(plan, only=("student",))
    rolling = assemble(plan, only=("student",), rolls=True)
    assert (rolling.optimizers, rolling.ema, rolling.state()) == ({}, None, {})
    assert not any(weight.requires_grad for weight in rolling.roles["student"].network.parameters())
    randomise(student.roles["student"].network, 5)
    hand_over(student.roles["student"], rolling.roles["student"])
    phase = next(plan.method.phases(0))
    assert phase.gives == "rollout"
    made = student.perform(phase, 0).x0
    assert torch.equal(rolling.perform(phase, 0).x0, made)
    batch = student.batches.batch(0, 0)
    narrow = freeze(copy.deepcopy(student.roles["student"].network), CPU, torch.bfloat16)
    rounded = phase.run(Role("student", narrow, torch.bfloat16), batch, Draw(student.seed, phase.name, 0, batch.key))
    assert not torch.equal(rounded.x0, made)


@pytest.mark.parametrize("layout", ["shared", "split"])
def test_a_dry_run_names_the_workers_that_roll_out(tmp_path: Path, layout: str):
    world = World.make(tmp_path / "world")
    teacher = f"teacher.init={ROOT / 'recipes/wan_nano/teacher'}"
    sizes = str(SIZES[layout]).replace("'", "")
    ray = ("engine.name=ray", f"engine.layout={layout}", f"engine.groups={sizes}", "data.batch=4", "engine.device=cpu")
    said = describe(prepare(world.recipe("wan_nano/dmd2", teacher, *ray)))
    part = {"shared": "1 workers, each with", "split": "2 workers, each with 1/2 of"}[layout]
    assert f"group rollout: {part} the student's weights, for rollouts alone" in said
    assert "copy of student" in said

"""The engine with rollouts that go on across iterations: whose rows, whose carry, and what of it is trained."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.engines.process import ProcessEngine
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.sid import SiD
from fewstep.optim.optimizer import OptimizerSection
from fewstep.records import Batch, Rollout, Scores, leaves
from fewstep.rng import Draw
from fewstep.rollout.carry import Carry
from fewstep.rollout.self_forcing import SelfForcing
from tests.engines.worlds import SHAPE, STREAMING, assert_same_bits, copied, engine, run, streams
from tests.models.tiny import relative
from tests.rollout.clips import StreamDraw

DOUBLE = torch.float64
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@dataclasses.dataclass
class Seen:
    """One call of a phase's function."""

    draw: Draw | None
    batch: Batch
    carry: Carry | None
    rollout: Rollout
    after: Carry | None = None


class Recorded(DMD2):
    """Keeps what its rollouts and its student's updates saw."""

    def __init__(self, section: DMD2Section, rollout: Any):
        super().__init__(section, rollout)
        self.rolled: list[Seen] = []
        self.updated: list[Seen] = []

    def chunk(self, student: Any, batch: Batch, draw: Draw, carry: Carry | None) -> Any:
        rollout, after = super().chunk(student, batch, draw, carry)
        self.rolled.append(Seen(draw, batch, carry, rollout, after))
        return rollout, after

    def student_losses(
        self, student: Any, rollout: Rollout, scores: Scores, batch: Batch, carry: Carry | None = None
    ) -> dict[str, Tensor]:
        self.updated.append(Seen(None, batch, carry, rollout))
        return super().student_losses(student, rollout, scores, batch, carry)


def recorded(dtype: torch.dtype = torch.float32, lr: float = 1e-3, **settings: Any) -> tuple[Recorded, ProcessEngine]:
    made = streams(Recorded, dtype=dtype, **settings)
    assert isinstance(made, Recorded)
    return made, engine(made, dtype=dtype, batch=6, optimizer=OptimizerSection(lr=lr))


def frames_before(seen: Seen) -> int:
    return 0 if seen.carry is None else seen.carry.history.num_frames


def test_streams_keep_their_rows_and_draw_anew_and_the_next_ones_have_others():
    made, running = recorded()
    run(running, range(4))
    for slot in (0, 1):
        seen = [call for call in made.rolled if call.draw is not None and call.draw.phase == f"rollout.{slot}"]
        labels = [call.batch.cond.label.tolist() for call in seen]
        assert labels[0] == labels[1] == labels[2] != labels[3]
        assert torch.equal(seen[0].batch.x0, seen[2].batch.x0)
        assert [call.draw.iteration for call in seen] == list(range(4))
        assert [frames_before(call) for call in seen] == [0, 3, 5, 0]
        for one, other in pairwise(seen[:3]):
            for left, right in zip(leaves(one.after), leaves(other.carry), strict=True):
                assert torch.equal(left, right)
        assert [call.after is None for call in seen] == [False, False, True, False]


@pytest.mark.parametrize("mode", ["fresh", "separate", "shared"])
def test_every_chunk_of_a_stream_trains_the_student(mode):
    """Two fresh rollouts an iteration: the one that is scored has a stream of its own, at the position of its
    iteration, and not the one that the other rollout left behind."""
    made, running = recorded(critic_batches=mode)
    run(running, range(4))
    assert [frames_before(call) for call in made.updated] == [0, 3, 5, 0]
    last = {"fresh": "rollout.1", "separate": "rollout.2", "shared": "rollout"}[mode]
    scored = [call for call in made.rolled if call.draw is not None and call.draw.phase == last]
    for update, rolled in zip(made.updated, scored, strict=True):
        assert torch.equal(update.rollout.x0, rolled.rollout.x0)
        for one, other in zip(leaves(update.carry), leaves(rolled.carry), strict=True):
            assert torch.equal(one, other)


def test_warm_up_of_the_critic_lets_the_streams_of_all_batches_go_on():
    """One critic update in the second iteration, and no student: the other rollouts are made all the same."""
    made, running = recorded(critic_batches="separate", critic_warmup_updates=3)
    run(running, range(4))
    assert len(made.rolled) == 4 * 3
    assert [frames_before(call) for call in made.rolled] == [0] * 3 + [3] * 3 + [5] * 3 + [0] * 3
    assert [frames_before(call) for call in made.updated] == [5, 0]
    assert running.optimizers["critic"].updates == 3 + 2 * 2


def test_with_a_learning_rate_of_0_the_iterations_of_a_stream_are_one_long_rollout():
    """A ladder of one step, so that all stops are 0; past the window of 3 frames."""
    made, running = recorded(DOUBLE, lr=1e-30, sigmas=(1.0,))
    run(running, range(3))
    one, student = made.rollout_of, running.roles["student"]
    assert isinstance(one, SelfForcing)
    long: Any = dataclasses.replace(one, shape=(7, *SHAPE[1:]), stream_chunks=1, overlap_frames=0)
    for seen in (made.rolled[0::2], made.rolled[1::2]):
        assert seen[0].draw is not None
        with torch.no_grad():
            expected = long(student, seen[0].batch, StreamDraw.of(seen[0].draw, one, STREAMING)).x0
        for number, call in enumerate(seen):
            assert relative(call.rollout.x0, expected[:, 2 * number : 2 * number + 3]) < 1e-10


@pytest.mark.parametrize("kind", [DMD2, SiD])
def test_micro_batches_of_streams_equal_the_whole_batch(kind):
    """Invariant 50: histories are cut and joined by rows."""
    whole, parts = (engine(streams(kind, DOUBLE), dtype=DOUBLE, batch=5, micro_batch=size) for size in (None, 2))
    for iteration in range(2):
        metrics = whole.run(iteration), parts.run(iteration)
        for name, value in metrics[0].items():
            torch.testing.assert_close(metrics[1][name], value, rtol=1e-9, atol=1e-11)
    states = whole.state(), parts.state()
    assert states[0].keys() == states[1].keys()
    assert {"carry.0", "carry.1"} <= states[0].keys()
    for group, named in states[0].items():
        for name, tensor in named.items():
            torch.testing.assert_close(states[1][group][name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("cut", [2, 3])
def test_a_run_that_is_cut_inside_a_stream_goes_on_to_the_last_bit(cut):
    """PITFALLS, resume: before the last chunk, and after it, when there is nothing to carry."""
    whole, first, second = (engine(streams()) for _ in range(3))
    run(whole, range(4))
    run(first, range(cut))
    assert ("carry.0" in first.state()) == (cut < 3)
    second.load(copied(first.state()))
    run(second, range(cut, 4))
    assert_same_bits(second.state(), whole.state())


def test_a_carry_that_is_missing_is_an_error_when_its_stream_goes_on():
    """PITFALLS, resume: nothing starts over in silence."""
    first, second = (engine(streams()) for _ in range(2))
    first.run(0)
    second.load({group: named for group, named in copied(first.state()).items() if group != "carry.1"})
    with pytest.raises(ValueError, match=r"iteration 1 makes chunk 1 of 3: .* it got none"):
        second.run(1)
    state = copied(first.state())
    del state["carry.0"]["history.1.keys"]
    with pytest.raises(KeyError, match=r"history\.1\.keys"):
        second.load(state)


def test_what_is_carried_does_not_grow_beyond_the_window():
    made, running = recorded()
    sizes = []
    for iteration in range(3):
        running.run(iteration)
        sizes.append({slot: carry.history.kept for slot, carry in running.carries.items()})
    assert sizes == [{0: 2, 1: 2}, {0: 2, 1: 2}, {}]
    assert made.rolled[2].carry is not None
    assert made.rolled[2].carry.history.num_frames == 3

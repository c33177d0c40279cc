"""Records are cut, joined and checked leaf by leaf, whatever they hold."""

from dataclasses import FrozenInstanceError, dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewstep.records import Batch, Rollout, Scores, assert_detached, concat, leaves, map_tensors, rows, select

ROWS = 5


@dataclass(frozen=True)
class Conditioning:
    """A family's record, with all that one may hold."""

    embedding: Tensor
    mask: Tensor
    extra: dict[str, Tensor]
    pair: tuple[Tensor, Tensor]
    several: list[Tensor]
    absent: Tensor | None
    kind: str


def conditioning(start: int, num_rows: int = ROWS) -> Conditioning:
    """Every value of a row is its own: 1000 x the leaf + the row."""
    row = torch.arange(start, start + num_rows, dtype=torch.float64)
    return Conditioning(
        embedding=(1000 + row)[:, None, None].expand(-1, 7, 3),
        mask=(row.long() % 2 == 0)[:, None].expand(-1, 7),
        extra={"a": 2000 + row, "b": (3000 + row)[:, None]},
        pair=(4000 + row, 5000 + row),
        several=[6000 + row],
        absent=None,
        kind="text",
    )


def latents(key: Tensor) -> Tensor:
    return key.double().view(-1, 1, 1, 1, 1).expand(-1, 2, 3, 4, 4)


def batch(start: int = 0, num_rows: int = ROWS) -> Batch:
    key = torch.arange(start, start + num_rows)
    return Batch(key, latents(key), conditioning(start, num_rows), conditioning(start + 100, num_rows))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    assert len(leaves(one)) == len(leaves(other))
    for left, right in zip(leaves(one), leaves(other), strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


def test_leaves_come_in_field_order_through_every_container():
    first_of_each = [leaf.flatten()[0].item() for leaf in leaves(batch(3))]
    one = [1003.0, False, 2003.0, 3003.0, 4003.0, 5003.0, 6003.0]
    other = [1103.0, False, 2103.0, 3103.0, 4103.0, 5103.0, 6103.0]
    assert first_of_each == [3, 3.0, *one, *other]


def test_a_function_reaches_every_tensor_and_leaves_the_rest():
    record = batch()
    doubled = map_tensors(lambda tensor: tensor * 2, record)
    assert isinstance(doubled.cond, Conditioning)
    assert isinstance(doubled.cond.pair, tuple)
    assert isinstance(doubled.cond.several, list)
    assert list(doubled.cond.extra) == ["a", "b"]
    assert doubled.cond.absent is None
    assert doubled.cond.kind == "text"
    for before, after in zip(leaves(record), leaves(doubled), strict=True):
        assert torch.equal(after, before * 2)


@pytest.mark.parametrize("index", [slice(1, 4), slice(4, 5), slice(0, 0), torch.tensor([3, 0, 3])])
def test_rows_take_the_same_rows_of_every_tensor(index: slice | Tensor):
    record = batch(10)
    cut = rows(record, index)
    kept = torch.arange(10, 10 + ROWS)[index]
    assert torch.equal(cut.key, kept)
    assert torch.equal(cut.cond.embedding[:, 0, 0], 1000.0 + kept)
    assert torch.equal(cut.cond.extra["b"][:, 0], 3000.0 + kept)
    assert torch.equal(cut.cond.mask[:, 0], kept % 2 == 0)
    assert cut.uncond is not None
    assert torch.equal(cut.uncond.pair[1], 5100.0 + kept)


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, ROWS), max_size=4))
def test_the_parts_of_a_record_join_to_the_record(cuts: list[int]):
    """Micro-batches of any size, empty ones too."""
    bounds = [0, *sorted(cuts), ROWS]
    record = batch(20)
    parts = [rows(record, slice(a, b)) for a, b in pairwise(bounds)]
    assert_same(concat(parts), record)


def test_parts_join_in_the_order_given():
    joined = concat([batch(5, 2), batch(0, 3)])
    assert joined.key.tolist() == [5, 6, 0, 1, 2]
    assert joined.cond.several[0].tolist() == [6005, 6006, 6000, 6001, 6002]


def test_a_record_without_latents_or_unconditional_part_stays_without():
    record = Batch(torch.arange(ROWS), None, conditioning(0), None)
    cut = concat([rows(record, slice(0, 2)), rows(record, slice(2, ROWS))])
    assert cut.x0 is None
    assert cut.uncond is None
    assert_same(cut, record)


def test_select_picks_row_by_row_in_every_tensor():
    """The dropped conditioning of a row is wholly the unconditional one: no leaf of it stays behind."""
    here, there = conditioning(0), conditioning(100)
    mask = torch.tensor([True, False, False, True, False])
    picked = select(mask, there, here)
    for one, other, leaf in zip(leaves(there), leaves(here), leaves(picked), strict=True):
        for row in range(ROWS):
            assert torch.equal(leaf[row], one[row] if mask[row] else other[row])
    assert_same(select(torch.ones(ROWS, dtype=torch.bool), there, here), there)
    assert_same(select(torch.zeros(ROWS, dtype=torch.bool), there, here), here)


def test_a_record_with_a_graph_is_refused_by_name_however_deep_it_lies():
    assert_detached(batch(), "batch")
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    key = torch.arange(ROWS)
    scores = Scores(key, latents(key), {"critic": torch.zeros(ROWS)})
    assert_detached(scores, "scores")
    carried = Scores(scores.key, scores.gradient, {"critic": torch.ones(ROWS, dtype=torch.float64) * weight})
    with pytest.raises(RuntimeError, match="'scores' carries a gradient graph"):
        assert_detached(carried, "scores")
    assert_detached(map_tensors(Tensor.detach, carried), "scores")


def test_a_record_cannot_be_changed():
    record = batch()
    with pytest.raises(FrozenInstanceError):
        record.key = torch.zeros(ROWS, dtype=torch.int64)  # type: ignore[misc]


def test_a_rollout_keeps_its_stop_when_its_rows_are_cut():
    key = torch.arange(ROWS)
    record = Rollout(key, 2, latents(key), torch.full((ROWS, 2), 0.625), latents(key) + 1)
    cut = rows(record, slice(1, 3))
    assert cut.stop == 2
    assert cut.sigma_stop.shape == (2, 2)
    assert_same(concat([rows(record, slice(0, 1)), rows(record, slice(1, ROWS))]), record)

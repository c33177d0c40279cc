"""The order of the data (DESIGN 'Batch order'; PITFALLS 'resume starts over', 'ranks')."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fewstep import rng
from fewstep.data.order import BatchOrder
from fewstep.errors import UserError


@st.composite
def orders(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Seed, items, batch and slots."""
    num_items = draw(st.integers(1, 23))
    return draw(st.integers(0, 99)), num_items, draw(st.integers(1, num_items)), draw(st.integers(1, 4))


def walk(order: BatchOrder, num_iterations: int) -> torch.Tensor:
    """The ids of all batches, end to end."""
    batches = [order.ids(i, slot) for i in range(num_iterations) for slot in range(order.slots)]
    return torch.cat([torch.empty(0, dtype=torch.int64), *batches])


@settings(max_examples=25)
@given(orders())
def test_every_id_comes_once_an_epoch(given: tuple[int, int, int, int]):
    """Slot by slot and iteration by iteration the batches are the epochs, end to end."""
    _, num_items, batch, slots = given
    order = BatchOrder(*given)
    ids = walk(order, -(-3 * num_items // (batch * slots)))
    for epoch in ids[: 3 * num_items].view(3, num_items):
        assert sorted(epoch.tolist()) == list(range(num_items))


@settings(max_examples=25)
@given(orders(), st.integers(0, 9))
def test_a_resumed_run_reads_what_an_uninterrupted_one_reads(given: tuple[int, int, int, int], iteration: int):
    """PITFALLS 'resume starts over': nothing of the order has to be restored."""
    through = BatchOrder(*given)
    walk(through, iteration)
    for slot in range(through.slots):
        assert torch.equal(BatchOrder(*given).ids(iteration, slot), through.ids(iteration, slot))


@settings(max_examples=25)
@given(orders(), st.integers(0, 9), st.sampled_from([1, 2, 3]))
def test_the_ranks_together_read_what_one_process_reads(given: tuple[int, int, int, int], iteration: int, world: int):
    """PITFALLS 'ranks': row r of the global batch belongs to rank r modulo the number of ranks, and to no other."""
    whole = BatchOrder(*given)
    for slot in range(whole.slots):
        ids, keys = torch.full((whole.batch,), -1), torch.full((whole.batch,), -1)
        for rank in range(world):
            order = BatchOrder(*given, rank=rank, world=world)
            ids[rank::world], keys[rank::world] = order.ids(iteration, slot), order.keys(slot)
        assert torch.equal(ids, whole.ids(iteration, slot))
        assert torch.equal(keys, whole.keys(slot))


def test_a_batch_may_begin_in_one_epoch_and_end_in_the_next():
    order = BatchOrder(seed=4, num_items=5, batch=2)
    first, second = (rng.permutation(4, f"data.epoch.{epoch}", 5) for epoch in (0, 1))
    assert order.ids(2).tolist() == [first[4], second[0]]
    assert order.ids(3).tolist() == second[1:3].tolist()


def test_the_slots_of_an_iteration_are_different_rows():
    order = BatchOrder(seed=0, num_items=50, batch=3, slots=6)
    ids = torch.cat([order.ids(1, slot) for slot in range(6)])
    assert len(set(ids.tolist())) == 18


def test_epochs_and_seeds_differ():
    ids = walk(BatchOrder(seed=0, num_items=40, batch=40), 2).view(2, 40)
    assert not torch.equal(ids[0], ids[1])
    assert not torch.equal(ids[0], BatchOrder(seed=1, num_items=40, batch=40).ids(0))
    assert ids[0].tolist() != list(range(40))


def test_a_key_is_the_place_of_a_row_among_all_rows_of_an_iteration():
    order = BatchOrder(seed=0, num_items=9, batch=5, slots=3, rank=1, world=2)
    assert order.keys(0).tolist() == [1, 3]
    assert order.keys(2).tolist() == [11, 13]
    assert order.keys(2).dtype == torch.int64


def test_fewer_items_than_a_batch_are_refused_with_both_numbers():
    with pytest.raises(
        UserError, match=r"^data\.batch: 6 rows are more than the 5 items .* set data\.batch to 5 or less"
    ):
        BatchOrder(seed=0, num_items=5, batch=6)


@pytest.mark.parametrize(("iteration", "slot"), [(-1, 0), (0, 2), (0, -1)])
def test_a_batch_that_does_not_exist_is_refused(iteration: int, slot: int):
    with pytest.raises(ValueError, match="an iteration has 2 slots"):
        BatchOrder(seed=0, num_items=5, batch=2, slots=2).ids(iteration, slot)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_does_not_exist_is_refused(rank: int, world: int):
    with pytest.raises(ValueError, match=f"rank {rank} of {world}"):
        BatchOrder(seed=0, num_items=5, batch=2, rank=rank, world=world)


def test_iterations_that_hold_a_batch_read_the_same_rows_and_an_epoch_takes_so_many_times_longer():
    """Streams that go on for three iterations: iteration i has the rows of stream i // 3, slot by slot."""
    plain, held = BatchOrder(7, 11, 4, slots=2), BatchOrder(7, 11, 4, slots=2, hold=3)
    for iteration in range(12):
        for slot in (0, 1):
            assert torch.equal(held.ids(iteration, slot), plain.ids(iteration // 3, slot))
            assert torch.equal(held.keys(slot), plain.keys(slot))
    with pytest.raises(ValueError, match="hold 0"):
        BatchOrder(7, 11, 4, hold=0)

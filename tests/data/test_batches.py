"""Batches: the rows that the order names, encoded and conditioned, with the keys that name them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fewstep.data import batches as batches_module
from fewstep.data.batches import BatchSource
from fewstep.data.fashion_mnist import FashionMnist, FashionMnistSection
from fewstep.data.order import BatchOrder
from fewstep.records import Batch, assert_detached, leaves


def encode(pixels: torch.Tensor) -> torch.Tensor:
    """Exact in float32 on every device."""
    return pixels.float() / 128 - 1


def condition(labels: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"label": labels}, {"label": torch.full_like(labels, 10)}


@pytest.fixture
def dataset(clothes: Path) -> FashionMnist:
    return FashionMnist(FashionMnistSection(path=str(clothes), size=16, batch=3))


def source(dataset: FashionMnist, device: str = "cpu", **ranks: int) -> BatchSource:
    return BatchSource(dataset, BatchOrder(1, len(dataset), 3, 2, **ranks), encode, condition, device)


def assert_equal(one: Batch, other: Batch) -> None:
    for left, right in zip(leaves(one), leaves(other), strict=True):
        assert torch.equal(left.cpu(), right.cpu())


def test_a_batch_holds_the_rows_that_the_order_names(dataset: FashionMnist):
    """Iteration 1, slot 0: positions 6, 7, 8 of 7 items, so that it straddles two epochs."""
    batch = source(dataset).batch(1, 0)
    ids = BatchOrder(1, 7, 3, 2).ids(1, 0)
    items = dataset.items(ids.tolist())
    assert torch.equal(batch.x0, items.pixels.float() / 128 - 1)
    assert torch.equal(batch.cond["label"], items.label)
    assert batch.uncond["label"].tolist() == [10, 10, 10]
    assert batch.key.tolist() == [0, 1, 2]
    assert source(dataset).batch(1, 1).key.tolist() == [3, 4, 5]


def test_a_batch_carries_no_gradient(dataset: FashionMnist):
    """Although codec and conditioner may have weights."""
    weight = torch.ones(1, requires_grad=True)
    order = BatchOrder(1, 7, 3)
    source = BatchSource(
        dataset, order, lambda pixels: pixels * weight, lambda labels: (labels * weight, weight.expand(3)), "cpu"
    )
    assert_detached(source.batch(0), "batch")


def test_batches_do_not_depend_on_the_order_of_asking(dataset: FashionMnist):
    backwards = source(dataset)
    for iteration in (5, 2, 0):
        for slot in (1, 0):
            assert_equal(backwards.batch(iteration, slot), source(dataset).batch(iteration, slot))


def test_two_ranks_hold_the_rows_of_one_process(dataset: FashionMnist):
    """PITFALLS 'ranks': x0, label and key of row r are the same, whoever holds it."""
    whole = source(dataset).batch(3, 1)
    for rank in (0, 1):
        part = source(dataset, rank=rank, world=2).batch(3, 1)
        for found, expected in zip(leaves(part), leaves(whole), strict=True):
            assert torch.equal(found, expected[rank::2])


@pytest.mark.gpu
@pytest.mark.parametrize("resident_bytes", [0, 2**30])
def test_on_a_gpu_batches_are_the_same_and_nobody_waits(
    dataset: FashionMnist, monkeypatch: pytest.MonkeyPatch, resident_bytes: int
):
    """With the data set in the GPU's memory, in parts, and without."""
    monkeypatch.setattr(batches_module, "RESIDENT_BYTES", resident_bytes)
    monkeypatch.setattr(batches_module, "_CHUNK", 2)
    on_gpu, on_cpu = source(dataset, "cuda"), source(dataset)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [on_gpu.batch(iteration, slot) for iteration in range(4) for slot in (0, 1)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for number, batch in enumerate(found):
        assert {leaf.device.type for leaf in leaves(batch)} == {"cuda"}
        assert_equal(batch, on_cpu.batch(*divmod(number, 2)))

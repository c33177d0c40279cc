"""Tensors that come later: written one after the other into the file that others write at once."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fewstep.checkpoint.save import load_checkpoint, save_checkpoint, take_part
from fewstep.checkpoint.tensor_file import Later, Named, read_tensors, write_tensors
from tests.checkpoint.runs import KEEP

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


def values() -> dict[str, Tensor]:
    """Of every dtype, narrow ones first; one without elements, one without axes, and a view that is turned."""
    named = {str(kind): (torch.randn(3, 5) * 4).to(kind) for kind in reversed(KINDS)}
    turned = torch.randn(4, 6).T
    return {**named, "empty": torch.zeros(0, 6), "step": torch.tensor(7.0), "turned": turned}


def later(tensors: dict[str, Tensor]) -> Named:
    return {name: Later(tuple(t.shape), t.dtype, lambda t=t: t.clone()) for name, t in tensors.items()}  # type: ignore[misc]


def test_tensors_that_come_later_are_in_the_file_as_those_that_are_there(tmp_path: Path):
    expected = values()
    mixed = {**later(expected), "here": torch.arange(3)}
    write_tensors(tmp_path / "later", mixed)
    for found in (load_file(tmp_path / "later"), read_tensors(tmp_path / "later")):
        assert found.keys() == mixed.keys()
        for name, tensor in (expected | {"here": torch.arange(3)}).items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name


def test_no_two_of_them_are_held_at_a_time(tmp_path: Path):
    """PITFALLS, memory: a model larger than the memory of the process that writes it."""
    alive: list[weakref.ref[Tensor]] = []

    def make() -> Tensor:
        assert not any(reference() is not None for reference in alive)
        made = torch.randn(1000)
        alive.append(weakref.ref(made))
        return made

    named = {str(number): Later((1000,), torch.float32, make) for number in range(4)}
    save_checkpoint(tmp_path, 1, {"student": named}, {}, KEEP)
    assert len(alive) == 4
    assert load_checkpoint(tmp_path / "iteration-000001").tensors("student").keys() == named.keys()
    assert sum(tensor.nbytes for tensor in named.values()) == 16_000


def test_the_other_processes_make_them_in_the_order_of_the_writer(tmp_path: Path):
    orders: list[list[str]] = [[], []]

    def groups(order: list[str]) -> dict[str, Named]:
        def called(name: str, tensor: Tensor) -> Tensor:
            order.append(name)
            return tensor

        return {
            group: {
                name: Later(tuple(t.shape), t.dtype, lambda n=f"{group}/{name}", t=t: called(n, t))  # type: ignore[misc]
                for name, t in values().items()
            }
            for group in ("student", "ema")
        }

    save_checkpoint(tmp_path, 1, groups(orders[0]), {}, KEEP)
    take_part(groups(orders[1]))
    assert orders[0] == orders[1]
    assert len(orders[0]) == 2 * len(values())

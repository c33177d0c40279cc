"""Checkpoints that are written while the training goes on."""

from __future__ import annotations

import resource
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.checkpoint import background
from fewstep.checkpoint.background import Saver
from fewstep.checkpoint.save import CheckpointSection, load_checkpoint, newest_complete, save_checkpoint
from fewstep.checkpoint.tensor_file import Later
from fewstep.errors import UserError
from tests.checkpoint.test_save import ODD_TENSORS, bits

BESIDE = CheckpointSection(every=1, keep_last=2, asynchronous=True)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Event:
    """The disk is slow: no writer begins before the gate is open."""
    gate = Event()

    def slow(*arguments: Any) -> Path:
        assert gate.wait(timeout=30)
        return save_checkpoint(*arguments)

    monkeypatch.setattr(background, "save_checkpoint", slow)
    return gate


def groups(weight: Tensor) -> dict[str, dict[str, Tensor]]:
    return {"student": {"weight": weight, "count": torch.tensor(3)}, "ema": {"weight": weight}}


def test_every_tensor_comes_back_bit_for_bit_those_that_come_later_too(tmp_path: Path):
    tensors: dict[str, Any] = {**ODD_TENSORS, "later": Later((2, 3), torch.float64, lambda: torch.ones(2, 3).double())}
    with Saver() as saver:
        saver.save(tmp_path, 1, {"student": tensors}, {"a": 1}, BESIDE)
    found = load_checkpoint(tmp_path / "iteration-000001")
    assert found.meta == {"a": 1}
    for name, tensor in (ODD_TENSORS | {"later": torch.ones(2, 3).double()}).items():
        loaded = found.tensors("student")[name]
        assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
        assert bits(loaded) == bits(tensor.detach()), name


def test_training_goes_on_while_the_values_of_before_are_written(tmp_path: Path, gate: Event):
    weight = torch.zeros(4, 5)
    with Saver() as saver:
        saver.save(tmp_path, 1, groups(weight), {}, BESIDE)
        weight += 1
        saver.check()
        assert newest_complete(tmp_path) is None
        gate.set()
        saver.wait()
        assert load_checkpoint(tmp_path / "iteration-000001").tensors("student")["weight"].eq(0).all()


def test_the_next_save_waits_for_the_one_before_and_old_ones_are_removed(tmp_path: Path, gate: Event):
    weight, seen = torch.zeros(3), []

    def taken() -> Tensor:
        seen.append(newest_complete(tmp_path))
        return weight

    gate.set()
    with Saver() as saver:
        for iteration in (1, 2, 3):
            saver.save(tmp_path, iteration, {"student": {"weight": Later((3,), torch.float32, taken)}}, {}, BESIDE)
            weight += 1
    assert seen == [None, tmp_path / "iteration-000001", tmp_path / "iteration-000002"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration-000002", "iteration-000003"]
    assert load_checkpoint(tmp_path / "iteration-000003").tensors("student")["weight"].eq(2).all()


def test_a_full_disk_is_the_same_error_once_and_costs_no_older_checkpoint(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Saver() as saver:
        saver.save(tmp_path, 1, groups(torch.zeros(3)), {}, BESIDE)
        saver.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            saver.save(tmp_path, 2, groups(torch.zeros(100_000)), {}, BESIDE)
            assert saver._writer is not None
            saver._writer.join()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        with pytest.raises(UserError, match=r"iteration-000002: .*could not be written: .*needs .* GiB.*are intact"):
            saver.check()
        saver.check()
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000001"]


def test_an_error_that_nobody_asked_for_is_raised_at_the_end(tmp_path: Path):
    def train() -> None:
        with Saver() as saver:
            saver.save(tmp_path / "file", 1, groups(torch.zeros(3)), {}, BESIDE)

    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="could not be written"):
        train()


@pytest.mark.parametrize(("raised", "finished"), [(ValueError, True), (KeyboardInterrupt, False)])
def test_an_error_in_the_training_lets_the_writer_finish_and_a_second_ctrl_c_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException], finished: bool
):
    slow, done = Event(), []

    def writing(*arguments: Any) -> None:
        slow.wait(timeout=0.5)
        done.append(save_checkpoint(*arguments))

    monkeypatch.setattr(background, "save_checkpoint", writing)

    def train() -> None:
        with Saver() as saver:
            saver.save(tmp_path, 1, groups(torch.zeros(3)), {}, BESIDE)
            raise raised

    with pytest.raises(raised):
        train()
    assert bool(done) == finished
    slow.set()


def test_without_the_setting_a_save_is_over_when_it_returns(tmp_path: Path):
    with Saver() as saver:
        saver.save(tmp_path, 1, groups(torch.ones(2)), {}, CheckpointSection(every=1))
        assert newest_complete(tmp_path) == tmp_path / "iteration-000001"

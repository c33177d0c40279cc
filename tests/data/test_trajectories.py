"""Trajectories on the disk: what is kept, what is made again, what is refused, and what a batch holds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.data import trajectories as trajectories_module
from fewstep.data.api import Dataset, Items
from fewstep.data.order import BatchOrder
from fewstep.data.trajectories import (
    Chosen,
    Manifest,
    TrajectoryBatches,
    TrajectoryFolder,
    data_digest,
    weights_digest,
)
from fewstep.errors import UserError, UserErrors
from fewstep.records import Trajectory

SHAPE = (3, 2, 4, 5)


class Clips:
    """7 small clips; pixel values tell the item."""

    classes = ("a", "b")
    shape = SHAPE

    def __len__(self) -> int:
        return 7

    def items(self, ids: Sequence[int] | Tensor) -> Items:
        index = torch.as_tensor(ids)
        return Items(index.to(torch.uint8).view(-1, 1, 1, 1, 1).expand(-1, *SHAPE), index % 2)


def manifest(**values: Any) -> Manifest:
    known: dict[str, Any] = {
        "teacher": "runs/a, ema weights, iteration 3",
        "teacher_digest": "aa" * 32,
        "data": "clips, 7 items",
        "data_digest": "bb" * 32,
        "codec": "identity",
        "shape": SHAPE,
        "nodes": 8,
        "shift": 5.0,
        "guidance_scale": 6.0,
        "sigmas": (1.0, 0.8),
        "seed": 3,
        "dtype": "float32",
        "count": 10,
        "shard": 4,
    }
    return Manifest(**(known | values))


def made(numbers: Sequence[int]) -> Trajectory:
    """Every value tells the number, the place in the path and the frame."""
    key = torch.tensor(list(numbers))
    path = 100.0 * key[:, None] + 10 * torch.arange(3) + torch.zeros(len(key), 3)
    states = (path[:, :, None] + torch.arange(3)).view(len(key), 3, 3, 1, 1, 1).expand(-1, -1, *SHAPE)
    return Trajectory(key, states[:, :2], states[:, 2])


def filled(path: Path, shards: Sequence[int] | None = None, **values: Any) -> TrajectoryFolder:
    folder = TrajectoryFolder.open(path, manifest(**values))
    folder.begin()
    for shard in folder.shards if shards is None else shards:
        folder.write(shard, made(folder.numbers(shard)))
    return folder


def test_trajectories_come_back_by_number_across_shards(tmp_path: Path):
    folder = filled(tmp_path / "t")
    assert [list(folder.numbers(shard)) for shard in folder.shards] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    numbers = torch.tensor([9, 0, 4, 9])
    found, expected = folder.read(numbers), made([9, 0, 4, 9])
    assert torch.equal(found.key, numbers)
    assert torch.equal(found.states, expected.states)
    assert torch.equal(found.endpoint, expected.endpoint)


def test_the_shards_of_a_killed_process_are_kept_and_the_others_are_missing(tmp_path: Path):
    """Killed between two shards; another process sees what is there, file by file."""
    path = tmp_path / "t"
    filled(path, [0])
    again = TrajectoryFolder.open(path, manifest())
    assert again.missing() == [1, 2]
    again.write(2, made(again.numbers(2)))
    assert TrajectoryFolder.open(path, manifest()).missing() == [1]


def test_a_process_killed_inside_a_shard_leaves_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = filled(tmp_path / "t", [0])

    def cut(tensors: dict[str, Tensor], file: Path, **_: Any) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(trajectories_module, "save_file", cut)
    with pytest.raises(KeyboardInterrupt):
        folder.write(1, made(folder.numbers(1)))
    assert folder.missing() == [1, 2]
    assert sorted(file.name for file in folder.path.iterdir()) == ["manifest.json", "shard-00000.safetensors"]


def test_what_a_killed_process_left_half_written_is_cleared_once_nobody_writes_to_it(tmp_path: Path):
    folder = filled(tmp_path / "t", [0])
    old, new = (folder.path / f".partial-shard-0000{n}.safetensors-ab" for n in (1, 2))
    old.write_bytes(b"half"), new.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    folder.begin()
    assert not old.exists()
    assert new.exists()
    assert folder.missing() == [1, 2]


@pytest.mark.parametrize("content", [b"", b"half", None])
def test_a_damaged_shard_is_made_again(tmp_path: Path, content: bytes | None):
    folder = filled(tmp_path / "t")
    file = folder.path / "shard-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-3] if content is None else content)
    assert folder.missing() == [1]


def test_a_full_disk_is_told_and_leaves_the_other_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = filled(tmp_path / "t", [0])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trajectories_module, "save_file", full)
    with pytest.raises(UserError, match=r"shard-00001\.safetensors could not be written .*finished shards are kept"):
        folder.write(1, made(folder.numbers(1)))
    assert folder.missing() == [1, 2]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"nodes": 16}, "nodes = 16: the folder's are of 8"),
        ({"shift": 3.0}, "shift = 3.0: the folder's are of 5.0"),
        ({"guidance_scale": 1.0}, "guidance_scale = 1.0: the folder's are of 6.0"),
        ({"sigmas": (1.0,)}, "sigmas = (1.0,): the folder's are of (1.0, 0.8)"),
        ({"seed": 4}, "seed = 4: the folder's are of 3"),
        ({"dtype": "float16"}, "dtype = float16: the folder's are of float32"),
        ({"codec": "other"}, "codec = other: the folder's are of identity"),
        ({"shape": (1, 2, 4, 5)}, "shape = (1, 2, 4, 5): the folder's are of (3, 2, 4, 5)"),
        (
            {"teacher": "runs/b, raw weights", "teacher_digest": "cc" * 32},
            "teacher = runs/b, raw weights (cccccccc): the folder's are of runs/a, ema weights, iteration 3 (aaaaaaaa)",
        ),
        (
            {"data_digest": "dd" * 32},
            "data = clips, 7 items (dddddddd): the folder's are of clips, 7 items (bbbbbbbb)",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_the_recipe_is_refused_with_the_values_that_differ(tmp_path: Path, change, line):
    path = tmp_path / "t"
    filled(path, [0])
    with pytest.raises(UserErrors) as refused:
        TrajectoryFolder.open(path, manifest(**change))
    assert refused.value.errors[1:] == (line,)
    assert str(path) in refused.value.errors[0]
    assert manifest(**change).digest != manifest().digest


def test_all_values_that_differ_are_told_at_once(tmp_path: Path):
    filled(tmp_path / "t", [])
    with pytest.raises(UserErrors) as refused:
        TrajectoryFolder.open(tmp_path / "t", manifest(nodes=16, seed=5))
    assert len(refused.value.errors) == 3


def test_a_moved_teacher_or_another_count_is_the_same_collection(tmp_path: Path):
    path = tmp_path / "t"
    filled(path)
    change: dict[str, Any] = {"teacher": "elsewhere/a", "data": "moved", "shard": 3, "count": 6}
    fewer = TrajectoryFolder.open(path, manifest(**change))
    assert fewer.missing() == []
    assert (fewer.manifest.shard, len(fewer.shards)) == (4, 2)
    assert manifest(**change).digest == manifest().digest
    fewer.begin()
    assert json.loads((path / "manifest.json").read_text())["count"] == 10


def test_a_larger_count_goes_on_where_the_smaller_one_ended(tmp_path: Path):
    """The last shard was short and is made again; the others stay."""
    path = tmp_path / "t"
    filled(path)
    more = TrajectoryFolder.open(path, manifest(count=14))
    assert more.missing() == [2, 3]
    more.begin()
    assert json.loads((path / "manifest.json").read_text())["count"] == 14
    for shard in more.missing():
        more.write(shard, made(more.numbers(shard)))
    assert torch.equal(more.read(torch.tensor([13, 8])).states, made([13, 8]).states)


def test_a_folder_of_something_else_or_a_damaged_manifest_is_refused(tmp_path: Path):
    (tmp_path / "photo.png").touch()
    with pytest.raises(UserError, match=r"is no folder of trajectories"):
        TrajectoryFolder.open(tmp_path, manifest())
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"manifest\.json is damaged .*remove"):
        TrajectoryFolder.open(tmp_path, manifest())


def test_the_size_on_the_disk_is_known_beforehand(tmp_path: Path):
    assert manifest().num_bytes == 3 * 3 * 2 * 4 * 5 * 4
    assert manifest(dtype="float16").num_bytes * 2 == manifest().num_bytes
    folder = filled(tmp_path / "t", [0], dtype="float16")
    assert folder.read(torch.tensor([2])).states.dtype == torch.float16
    size = (folder.path / "shard-00000.safetensors").stat().st_size
    assert 0 < size - 4 * manifest(dtype="float16").num_bytes < 600


def test_every_item_is_chosen_once_before_any_is_chosen_again():
    chosen = Chosen(Clips(), manifest(count=17))
    ids = chosen.items(range(17)).pixels[:, 0, 0, 0, 0].tolist()
    assert isinstance(chosen, Dataset)
    assert len(chosen) == 17
    assert sorted(ids[:7]) == sorted(ids[7:14]) == list(range(7))
    assert ids[:7] != ids[7:14]
    assert Chosen(Clips(), manifest(count=5)).items(range(5)).pixels[:, 0, 0, 0, 0].tolist() == ids[:5]
    assert Chosen(Clips(), manifest(count=17, seed=4)).items(range(7)).label.tolist() != [i % 2 for i in ids[:7]]


def batches(folder: TrajectoryFolder, **ranks: int) -> TrajectoryBatches:
    order = BatchOrder(1, folder.manifest.count, 4, **ranks)
    return TrajectoryBatches(folder, Clips(), order, lambda p: p.double(), lambda labels: (labels, labels + 2), "cpu")


def test_a_row_of_a_batch_is_a_trajectory_with_the_item_that_it_was_made_for(tmp_path: Path):
    source = batches(filled(tmp_path / "t", dtype="float16"))
    ids = Chosen(Clips(), manifest()).items(range(10)).pixels[:, 0, 0, 0, 0]
    for iteration in (3, 0):
        batch, numbers = source.batch(iteration), BatchOrder(1, 10, 4).ids(iteration)
        assert batch.trajectory is not None
        assert batch.x0 is not None
        assert torch.equal(batch.trajectory.key, numbers)
        assert torch.equal(batch.trajectory.states, made(numbers.tolist()).states.double())
        assert torch.equal(batch.x0[:, 0, 0, 0, 0], ids[numbers].double())
        assert torch.equal(batch.cond, ids[numbers].long() % 2)
        assert batch.key.tolist() == [0, 1, 2, 3]


def test_two_ranks_hold_the_rows_of_one_process(tmp_path: Path):
    folder = filled(tmp_path / "t")
    whole = batches(folder).batch(1).trajectory
    parts = [batches(folder, rank=rank, world=2).batch(1).trajectory for rank in (0, 1)]
    assert whole is not None
    for rank, part in enumerate(parts):
        assert part is not None
        assert torch.equal(part.states, whole.states[rank::2])


def test_the_digest_of_data_and_weights_changes_with_what_they_hold():
    class Other(Clips):
        def items(self, ids: Sequence[int] | Tensor) -> Items:
            found = super().items(ids)
            return Items(found.pixels + 1, found.label)

    assert data_digest(Clips()) == data_digest(Clips()) != data_digest(Other())
    weights = {"a": torch.arange(1000.0).view(50, 20).bfloat16(), "b": torch.zeros(0)}
    assert weights_digest(weights) == weights_digest(dict(reversed(weights.items())))
    assert weights_digest(weights) != weights_digest({**weights, "a": weights["a"] * 1.5})
    assert weights_digest(weights) != weights_digest({**weights, "a": weights["a"].T})

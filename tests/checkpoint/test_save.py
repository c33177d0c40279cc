"""Checkpoints: bit-exact, atomic, marked, retained."""

from __future__ import annotations

import json
import os
import resource
import stat
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fewstep.checkpoint.atomic import clear_leftovers, written_aside
from fewstep.checkpoint.save import CheckpointSection, load_checkpoint, newest_complete, save_checkpoint
from fewstep.errors import UserError
from tests.checkpoint.runs import KEEP, kills_in_a_process


def save(checkpoints: Path, iteration: int, keep: CheckpointSection = KEEP, **tensors: Tensor) -> Path:
    named = tensors or {"weight": torch.full((7, 5), float(iteration)), "step": torch.tensor(iteration)}
    return save_checkpoint(checkpoints, iteration, {"student": named, "student.optimizer": named}, {"a": 1}, keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


ODD_TENSORS = {
    "a 0-dim float": torch.tensor(0.1),
    "a 0-dim count": torch.tensor(2**53 + 1),
    "bfloat16": torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "float64": torch.randn(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    "not a number, infinities, minus zero": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
    "transposed": torch.arange(15.0).view(3, 5).T,
    "a step of two": torch.arange(9.0)[::2],
    "expanded": torch.tensor([1.5]).expand(4),
    "empty": torch.empty(0, 3),
    "booleans": torch.tensor([True, False, True]),
    "a parameter": torch.nn.Parameter(torch.ones(2, 3) / 3),
}


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_a_tensor_comes_back_bit_for_bit(tmp_path: Path, kind: str):
    tensor = ODD_TENSORS[kind]
    found = load_checkpoint(save(tmp_path, 1, value=tensor)).tensors("student")["value"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert bits(found) == bits(tensor.detach())


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path: Path):
    tied, other = torch.randn(1000), torch.randn(3)
    path = save(tmp_path, 1, embedding=tied, head=tied, other=other)
    found = load_checkpoint(path).tensors("student")
    assert torch.equal(found["head"], tied)
    assert torch.equal(found["other"], other)
    assert found["head"] is found["embedding"]
    assert (path / "student.safetensors").stat().st_size < 1.5 * tied.nbytes


def test_views_that_overlap_come_back_with_their_own_values(tmp_path: Path):
    memory = torch.arange(10.0)
    views = {"front": memory[:6], "back": memory[4:], "all": memory, "reversed": memory.view(2, 5).T}
    found = load_checkpoint(save(tmp_path, 1, **views)).tensors("student")
    assert all(torch.equal(found[name], view) for name, view in views.items())


def test_a_loaded_tensor_that_is_changed_does_not_change_the_checkpoint(tmp_path: Path):
    path = save(tmp_path, 1)
    load_checkpoint(path).tensors("student")["weight"].add_(1)
    assert load_checkpoint(path).tensors("student")["weight"].eq(1).all()


def test_saving_leaves_the_live_tensors_bitwise_unchanged(tmp_path: Path):
    weight = torch.randn(5, 3, requires_grad=True)
    before, address = weight.detach().clone(), weight.data_ptr()
    save(tmp_path, 1, weight=weight)
    assert torch.equal(weight, before)
    assert weight.requires_grad
    assert weight.data_ptr() == address


def test_the_meta_comes_back_and_groups_are_listed(tmp_path: Path):
    meta = {"time_s": 0.1 + 0.2, "sigmas": [1.0, 0.9375], "nested": {"none": None}}
    found = load_checkpoint(save_checkpoint(tmp_path, 12, {"b": {}, "a.b": {}}, meta, KEEP))
    assert (found.iteration, found.meta, found.groups) == (12, meta, ("a.b", "b"))
    assert found.path.name == "iteration-000012"
    assert found.tensors("b") == {}


def test_a_group_that_is_not_there_is_an_error_that_lists_what_is(tmp_path: Path):
    checkpoint = load_checkpoint(save(tmp_path, 1))
    with pytest.raises(UserError, match=r"no group 'critic'; it holds student\.optimizer, student$"):
        checkpoint.tensors("critic")


def test_a_group_that_would_leave_the_folder_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="becomes that of a file"):
        save_checkpoint(tmp_path, 1, {"../student": {}}, {}, KEEP)


def test_newest_is_by_number_and_not_by_time_or_spelling(tmp_path: Path):
    keep = CheckpointSection(every=1, keep_last=9)
    for iteration in (1_000_000, 999_999, 20, 3):
        save(tmp_path, iteration, keep)
    assert newest_complete(tmp_path) == tmp_path / "iteration-1000000"


def test_without_checkpoints_there_is_no_newest_one(tmp_path: Path):
    assert newest_complete(tmp_path / "absent") is None
    assert newest_complete(tmp_path) is None


def without_marker(path: Path) -> None:
    (path / "complete.json").unlink()


def damaged_marker(path: Path) -> None:
    (path / "complete.json").write_text('{"iteration": 3, "files"')


def marker_of_another_kind(path: Path) -> None:
    (path / "complete.json").write_text("[]")


def shorter_file(path: Path) -> None:
    os.truncate(path / "student.safetensors", (path / "student.safetensors").stat().st_size - 1)


def missing_file(path: Path) -> None:
    (path / "student.optimizer.safetensors").unlink()


def marker_of_no_files(path: Path) -> None:
    (path / "complete.json").write_text('{"iteration": 3, "files": {}}')


def marker_without(path: Path, left_out: str) -> None:
    marker = json.loads((path / "complete.json").read_text())
    marker["files"] = {name: entry for name, entry in marker["files"].items() if not name.endswith(left_out)}
    (path / "complete.json").write_text(json.dumps(marker))


def marker_without_meta(path: Path) -> None:
    marker_without(path, "meta.json")


def marker_without_tensors(path: Path) -> None:
    marker_without(path, ".safetensors")


def empty_folder(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


BREAKS = {
    without_marker: "complete.json, so its save never ended",
    damaged_marker: "complete.json is damaged",
    marker_of_another_kind: "complete.json is damaged",
    marker_of_no_files: "complete.json does not list meta.json and tensors",
    marker_without_meta: "complete.json does not list meta.json and tensors",
    marker_without_tensors: "complete.json does not list meta.json and tensors",
    shorter_file: r"student.safetensors has \d+ bytes instead of \d+",
    missing_file: "student.optimizer.safetensors is missing",
    empty_folder: "complete.json, so its save never ended",
}


@pytest.mark.parametrize("damage", BREAKS)
def test_a_broken_checkpoint_is_skipped_with_a_warning_and_refused_by_name(tmp_path: Path, damage):
    """PITFALLS: half-written checkpoint."""
    older, broken = save(tmp_path, 2), save(tmp_path, 3)
    damage(broken)
    with pytest.warns(UserWarning, match=f"{broken}.*broken.*{BREAKS[damage]}"):
        assert newest_complete(tmp_path) == older
    with pytest.raises(UserError, match=f"{broken}.*{BREAKS[damage]}.*the newest complete one is {older}"):
        load_checkpoint(broken)


def test_a_checkpoint_that_is_not_there_is_an_error_that_names_the_newest(tmp_path: Path):
    there = save(tmp_path, 3)
    with pytest.raises(UserError, match=f"iteration-000004: .* no such folder; the newest complete one is {there}"):
        load_checkpoint(tmp_path / "iteration-000004")


@pytest.mark.parametrize("file", ["student.safetensors", "meta.json"])
def test_a_flipped_bit_is_found(tmp_path: Path, file: str):
    path = save(tmp_path, 1)
    content = bytearray((path / file).read_bytes())
    content[-3] ^= 1
    (path / file).write_bytes(content)
    with pytest.raises(UserError, match=f"{file}: its content is not what was written"):
        load_checkpoint(path).tensors("student")


@pytest.mark.parametrize("file", ["student.safetensors", "meta.json"])
def test_a_checkpoint_with_a_flipped_bit_is_skipped_where_contents_are_verified(tmp_path: Path, file: str):
    older, damaged = save(tmp_path, 2), save(tmp_path, 3)
    content = bytearray((damaged / file).read_bytes())
    content[-3] ^= 1
    (damaged / file).write_bytes(content)
    assert newest_complete(tmp_path) == damaged
    with pytest.warns(UserWarning, match=f"{damaged}: .*skipped: the content of {file} is not what was written"):
        assert newest_complete(tmp_path, verified=True) == older


def test_the_last_ones_and_the_multiples_are_kept(tmp_path: Path):
    keep = CheckpointSection(every=10, keep_last=2, keep_every=30)
    for iteration in range(10, 101, 10):
        save(tmp_path, iteration, keep)
    save(tmp_path, 104, keep)
    assert names(tmp_path) == [f"iteration-{kept:06d}" for kept in (30, 60, 90, 100, 104)]


def test_without_multiples_only_the_last_ones_are_kept(tmp_path: Path):
    for iteration in range(1, 6):
        save(tmp_path, iteration, CheckpointSection(every=1, keep_last=3))
    assert names(tmp_path) == ["iteration-000003", "iteration-000004", "iteration-000005"]


def test_a_broken_checkpoint_does_not_count_as_kept(tmp_path: Path):
    keep = CheckpointSection(every=1, keep_last=2)
    for iteration in (1, 2, 3):
        save(tmp_path, iteration, keep)
    without_marker(tmp_path / "iteration-000003")
    save(tmp_path, 4, keep)
    assert names(tmp_path) == ["iteration-000002", "iteration-000003", "iteration-000004"]


def test_keep_every_must_be_reachable():
    with pytest.raises(ValidationError, match="'keep_every' must be a multiple of 'every'"):
        CheckpointSection(every=40, keep_every=100)


def test_saving_an_iteration_again_replaces_it(tmp_path: Path):
    save(tmp_path, 1, value=torch.tensor(1.0))
    path = save(tmp_path, 1, value=torch.tensor(2.0))
    assert load_checkpoint(path).tensors("student")["value"] == 2
    assert names(tmp_path) == ["iteration-000001"]


def test_a_crash_between_the_two_renames_of_a_replacement_costs_nothing(tmp_path: Path):
    path = save(tmp_path, 5)
    path.rename(path.with_name("iteration-000005.replaced"))
    newest = newest_complete(tmp_path)
    assert newest is not None
    assert load_checkpoint(newest).iteration == 5
    assert newest_complete(tmp_path) != save(tmp_path, 5) or names(tmp_path) == ["iteration-000005"]
    assert names(tmp_path) == ["iteration-000005"]


def test_a_crash_before_the_replaced_one_is_removed_leaves_the_new_one_first(tmp_path: Path):
    old = save(tmp_path, 5, value=torch.tensor(1.0))
    old.rename(tmp_path / "iteration-000005.replaced")
    (tmp_path / "iteration-000005.replaced").rename(tmp_path / "set-aside")
    new = save(tmp_path, 5, value=torch.tensor(2.0))
    (tmp_path / "set-aside").rename(tmp_path / "iteration-000005.replaced")
    assert newest_complete(tmp_path) == new
    save(tmp_path, 6)
    assert names(tmp_path) == ["iteration-000005", "iteration-000006"]
    assert load_checkpoint(new).tensors("student")["value"] == 2


def test_a_full_disk_is_an_error_that_costs_no_older_checkpoint(tmp_path: Path):
    """The disk is full for real: the kernel refuses to write past a size."""
    older = save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match=r"iteration-000002: .*could not be written: .*needs .* GiB.*are intact"):
            save(tmp_path, 2, weight=torch.zeros(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == [older.name]
    assert load_checkpoint(older).tensors("student")["weight"].eq(1).all()
    assert newest_complete(tmp_path) == older


def test_an_interrupted_save_leaves_nothing(tmp_path: Path):
    def interrupted() -> None:
        with written_aside(tmp_path / "iteration-000001") as partial:
            (partial / "student.safetensors").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == []


def test_everything_is_on_the_disk_before_the_name_is_given_and_the_name_before_the_save_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def spied_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def spied_rename(path: Path, target: Path) -> Path:
        events.append(f"rename to {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(Path, "rename", spied_rename)
    path = save(tmp_path, 1)
    named = events.index(f"rename to {path.name}")
    before, after = events[:named], events[named + 1 :]
    assert sorted(before[:-1]) == names(path)
    assert before[-1].startswith(".partial-")
    assert after[0] == tmp_path.name


def test_a_folder_being_written_by_a_living_process_is_left_alone(tmp_path: Path):
    with written_aside(tmp_path / "iteration-000001") as partial:
        clear_leftovers(tmp_path)
        save(tmp_path, 2)
        assert partial.is_dir()
        (partial / "file").write_text("x")
    assert names(tmp_path) == ["iteration-000001", "iteration-000002"]


def test_what_dead_processes_left_is_named_and_cleared(tmp_path: Path):
    older = save(tmp_path, 1)
    dead = tmp_path / ".partial-iteration-000002-4711-abc"
    dead.mkdir()
    (tmp_path / ".removing-iteration-000000-abc").mkdir()
    with pytest.warns(UserWarning, match=f"{dead}.*cut off"):
        assert newest_complete(tmp_path) == older
    save(tmp_path, 3)
    assert names(tmp_path) == ["iteration-000001", "iteration-000003"]


def test_a_checkpoint_is_as_readable_as_any_new_folder(tmp_path: Path):
    plain = tmp_path / "plain"
    plain.mkdir()
    path = save(tmp_path, 1)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_the_marker_lists_every_other_file(tmp_path: Path):
    path = save(tmp_path, 1)
    marker = json.loads((path / "complete.json").read_text())
    assert sorted(marker["files"]) == sorted(set(names(path)) - {"complete.json"})
    assert all(entry["bytes"] == (path / name).stat().st_size for name, entry in marker["files"].items())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """The folder in which real processes were killed by SIGKILL while they saved, and a row for every kill."""
    folder = tmp_path_factory.mktemp("killed")
    return folder, kills_in_a_process(folder)


@pytest.mark.parametrize("how", ["moment", "step", "replace", "beside"])
def test_killing_a_save_never_costs_a_finished_checkpoint(killed: tuple[Path, list[list[str]]], how: str):
    """PITFALLS: half-written checkpoint. At 20 random moments; before every single file operation of a save that also
    removes an older checkpoint; before every one of a save that replaces its own iteration; and before every one of a
    save that is made beside the training."""
    checkpoints, rows = killed[0] / how, [row[1:] for row in killed[1] if row[0] == how]
    assert len(rows) >= 20
    for promised, found, intact, *_ in rows:
        assert int(found) >= int(promised)
        assert intact == "1"
    left = [name.split("-")[0] for row in rows for name in row[3:]]
    assert left.count(".partial") >= 5, "the kills missed the saves"
    assert how == "moment" or left.count(".removing") >= 3
    save(checkpoints, int(rows[-1][1]) + 1)
    assert not [name for name in names(checkpoints) if name.startswith(".")]

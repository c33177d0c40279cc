"""Weights & Biases where the package is installed: offline, one run through all resumes, and never fatal."""

import struct
import time

import pytest

from fewstep.observe.metrics import Row
from fewstep.observe.sinks import WandbSection, WandbSink

pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def records(folder, kind: str) -> list:
    """The whole records of one kind in the folder's offline runs, in order. Such a file is a header of 7 bytes, then
    records: 7 bytes each of checksum, length and type, and a protobuf message."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        content, at = path.read_bytes(), 7
        assert len(content) < 32768, "more than one block: not read here"
        while at + 7 <= len(content):
            _, length, _ = struct.unpack_from("<IHB", content, at)
            message, at = content[at + 7 : at + 7 + length], at + 7 + length
            if at > len(content):
                break
            record = wandb_internal_pb2.Record.FromString(message)
            if record.WhichOneof("record_type") == kind:
                found.append(getattr(record, kind))
    return found


def logged(folder, num_rows: int) -> list[dict[str, str]]:
    """The rows of the offline runs in the folder; wandb's own process may still be writing them."""
    deadline = time.monotonic() + 20
    while len(rows := records(folder, "history")) < num_rows and time.monotonic() < deadline:
        time.sleep(0.05)
    return [{item.key or item.nested_key[0]: item.value_json for item in row.item} for row in rows]


def session(folder, section: WandbSection, *iterations: int) -> list[str]:
    warnings: list[str] = []
    sink = WandbSink(section, folder, "nano", {"seed": 0}, warnings.append)
    for iteration in iterations:
        sink.write(Row("train", iteration, 0.5 * iteration, {"critic/loss": 1.0 / iteration}))
    sink.write(Row("event", iterations[-1], 0.0, message="no values"))
    sink.close()
    sink.write(Row("train", 99, 0.0, {"critic/loss": 0.0}))
    return warnings


def test_resumed_sessions_share_one_run_id_and_lose_no_row(tmp_path):
    """An iteration that is logged again after a resume is a new row, not a dropped one: the axis is our own."""
    section = WandbSection(mode="offline")
    assert session(tmp_path, section, 5, 10, 15) == []
    assert session(tmp_path, section, 12, 15) == []
    kept = (tmp_path / "wandb_run_id.txt").read_text().strip()
    folders = [path.name for path in tmp_path.glob("wandb/offline-run-*")]
    assert folders
    assert all(name.endswith(kept) for name in folders)
    rows = logged(tmp_path, 5)
    assert [float(row["iteration"]) for row in rows] == [5, 10, 15, 12, 15]
    axes = {metric.glob_name: metric.step_metric for metric in records(tmp_path, "metric")}
    assert axes["*"] == "iteration"
    assert [float(row["critic/loss"]) for row in rows] == [1 / 5, 1 / 10, 1 / 15, 1 / 12, 1 / 15]


def test_without_a_key_the_run_goes_on_offline_with_one_warning(tmp_path):
    (warning,) = session(tmp_path, WandbSection(mode="online"), 5, 10)
    assert "offline" in warning
    assert [float(row["iteration"]) for row in logged(tmp_path, 2)] == [5, 10]

"""PITFALLS, row "tracking": the local file never loses a row, trackers are optional."""

import importlib.util
import json
import math
import os
import re
import signal
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewstep.observe.metrics import Row
from fewstep.observe.sinks import (
    JsonlSink,
    ObserveSection,
    TensorBoardSink,
    WandbSection,
    missing_packages,
    open_sinks,
    read_rows,
)


def train_row(iteration: int, loss: float, time_s: float = 0.0) -> Row:
    return Row("train", iteration, time_s, {"critic/loss": loss})


def write(path, *rows: Row) -> None:
    sink = JsonlSink(path)
    for row in rows:
        sink.write(row)
    sink.close()


def losses(path) -> dict[int, float]:
    return {row.iteration: row.values["critic/loss"] for row in read_rows(path) if row.kind == "train"}


def strict(line: str) -> dict:
    """JSON as every other reader understands it: without the constants NaN and Infinity."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@settings(max_examples=50, deadline=None)
@given(values=st.dictionaries(st.text(min_size=1).map(lambda name: f"critic/{name}"), st.floats(), max_size=5))
def test_every_value_survives_the_file_as_valid_json(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    write(path, Row("train", 7, 1.25, values, message="line one\nline two"))
    strict(path.read_text())
    (row,) = read_rows(path)
    assert (row.kind, row.iteration, row.time_s, row.message) == ("train", 7, 1.25, "line one\nline two")
    assert list(row.values) == list(values)
    for name, value in values.items():
        same = math.isnan(row.values[name]) if math.isnan(value) else row.values[name] == value
        assert same, name


def test_infinities_keep_their_sign(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, train_row(1, math.inf), train_row(2, -math.inf))
    assert losses(path) == {1: math.inf, 2: -math.inf}


def test_wherever_the_last_line_was_torn_the_rows_before_it_stand_and_new_ones_follow(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, train_row(5, 0.5), train_row(10, 0.25))
    whole = path.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = cut >= len(whole) - 1
        expected = {5: 0.5, 10: 0.25} if complete else {5: 0.5}
        assert losses(path) == expected, "a reader beside a writer"
        write(path, train_row(15, 0.125))
        assert losses(path) == expected | {15: 0.125}
        for line in path.read_text().splitlines():
            strict(line)


def test_a_block_of_zeros_after_a_power_loss_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, train_row(5, 0.5))
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    write(path, train_row(10, 0.25))
    assert losses(path) == {5: 0.5, 10: 0.25}


def test_a_row_outlives_a_process_that_is_killed_right_after_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    child = os.fork()
    if child == 0:
        sink = JsonlSink(path)
        sink.write(train_row(5, 0.5))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert losses(path) == {5: 0.5}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_names_the_file_and_the_sink_can_be_closed(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink._file.close()
    sink._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115 (reading it, as a sink does, never ends)
    with pytest.raises(OSError, match="No space left on device") as caught:
        sink.write(train_row(1, 0.5))
    assert caught.value.filename == str(tmp_path / "metrics.jsonl")
    sink.close()


def test_after_a_resume_rows_beyond_it_are_superseded_but_stay_in_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, train_row(5, 5.0), train_row(10, 10.0), train_row(15, 15.0), Row("warning", 15, 0.0, message="drift"))
    before = path.read_bytes()
    write(path, Row("resume", 10, 0.0, message="Resumed."), train_row(12, 12.0))
    assert path.read_bytes().startswith(before)
    assert losses(path) == {5: 5.0, 10: 10.0, 12: 12.0}
    assert [row.kind for row in read_rows(path)] == ["train", "train", "resume", "train"]


def test_of_several_rows_for_one_kind_and_iteration_the_latest_holds(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        train_row(5, 1.0, time_s=1.0),
        Row("validation", 5, 2.0, {"critic/loss": 7.0}),
        train_row(5, 2.0, time_s=3.0),
    )
    assert [(row.kind, row.time_s, row.values["critic/loss"]) for row in read_rows(path)] == [
        ("validation", 2, 7.0),
        ("train", 3, 2.0),
    ]


def test_all_warnings_of_one_iteration_stand(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, *(Row("warning", 5, 0.0, message=text) for text in ("stop 0", "stop 1", "stop 0")))
    assert sorted(row.message for row in read_rows(path)) == ["stop 0", "stop 1"]


@pytest.mark.parametrize(
    "damage",
    [
        b"{broken\n",
        b"[1, 2]\n",
        b"\xff\xfe\n",
        b'{"kind": "train"}\n',
        b'{"kind": 1, "a": {}}\n',
        b'{"kind": "train", "iteration": Infinity, "time_s": 1}\n',
        b'{"kind": "resume", "iteration": -1, "time_s": 1}\n',
        b'{"kind": "train", "iteration": 1' + b"0" * 400 + b', "time_s": 1}\n',
        b'{"kind": "train", "iteration": 7, "time_s": 1e999}\n',
        b'{"kind": "train", "iteration": 7, "time_s": 1, "loss": 1' + b"0" * 400 + b"}\n",
        b'{"kind": ' + b"[" * 100_000 + b"\n",
    ],
)
def test_a_damaged_line_in_the_middle_is_named_and_left_out(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    write(path, train_row(5, 0.5))
    path.write_bytes(path.read_bytes() + damage)
    write(path, train_row(10, 0.25))
    with pytest.warns(UserWarning, match="line 2"):
        assert losses(path) == {5: 0.5, 10: 0.25}


def test_a_message_is_text_whatever_was_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "warning", "iteration": 1, "time_s": 0, "message": 5}\n')
    assert [row.message for row in read_rows(path)] == ["5"]


def scalars(folder, name: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def test_tensorboard_reads_back_the_same_values(tmp_path):
    sink = TensorBoardSink(tmp_path)
    values = {5: 0.1, 10: -3e-7, 15: 12345.678, 20: math.inf}
    for iteration, value in values.items():
        sink.write(train_row(iteration, value))
    sink.write(Row("warning", 20, 0.0, message="drift"))
    sink.close()
    assert scalars(tmp_path, "critic/loss") == [(step, float32(value)) for step, value in values.items()]


def test_tensorboard_hides_what_a_resume_superseded(tmp_path):
    first = TensorBoardSink(tmp_path)
    for iteration in (5, 10, 15, 20):
        first.write(train_row(iteration, float(iteration)))
    first.close()
    second = TensorBoardSink(tmp_path, iteration=10)
    second.write(train_row(15, -15.0))
    second.close()
    assert scalars(tmp_path, "critic/loss") == [(5, 5.0), (10, 10.0), (15, -15.0)]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed here")
def test_a_recipe_that_asks_for_an_absent_package_is_refused_with_what_to_write():
    (missing,) = missing_packages(ObserveSection(wandb=WandbSection()))
    assert re.fullmatch(r"observe\.wandb: .*fewstep\[wandb\].*observe\.wandb=null", missing)


def test_an_absent_tracker_that_nobody_asks_for_is_no_trouble(tmp_path):
    section = ObserveSection(tensorboard=False)
    assert missing_packages(section) == []
    (sink,) = open_sinks(section, tmp_path, name="run", recipe={})
    assert isinstance(sink, JsonlSink)
    sink.close()

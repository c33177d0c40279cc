"""Signs of life through a real store, of real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from fewstep.engines import pulse
from fewstep.engines.pulse import heartbeat


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(pulse, "BEAT_S", 0.05)
    monkeypatch.setattr(pulse, "SILENCE_S", 1.0)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)


def test_a_rank_that_falls_silent_is_reported_once_and_one_that_said_so_is_not(store: dist.Store):
    found: list[int] = []
    with heartbeat(store, 0, 3, found.append):
        with heartbeat(store, 1, 3, found.append):
            time.sleep(1.5)
        assert store.get("pulse/1") == pulse.OVER.encode()
        time.sleep(1.5)
    assert found == [], "rank 2 was never heard, rank 1 said that it ends"
    store.set("pulse/1", "7")
    with heartbeat(store, 0, 3, found.append):
        time.sleep(2.0)
    assert found == [1]


def test_a_beat_is_given_while_the_own_code_waits(store: dist.Store):
    with heartbeat(store, 0, 2, lambda other: None):
        store.wait(["pulse/0"])
        before = int(store.get("pulse/0"))
        with pytest.raises(dist.DistStoreError):
            store.wait(["never"], timedelta(seconds=1))
        assert int(store.get("pulse/0")) > before + 3


def test_a_process_whose_launcher_is_gone_is_asked_to_stop_once(store: dist.Store):
    asked = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    try:
        with heartbeat(store, 0, 1, lambda other: None, gone.pid):
            time.sleep(0.5)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert asked == [signal.SIGTERM]


ORPHANED = """
import os, signal, time
import torch.distributed as dist
from fewstep.engines import pulse

pulse.BEAT_S = 0.05
launcher, (read, write) = os.getpid(), os.pipe()
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(os.write(1, b"asked to stop") - 13))
    store = dist.TCPStore("127.0.0.1", int(os.read(read, 9)), is_master=False)
    with pulse.heartbeat(store, 0, 2, lambda other: None, launcher):
        time.sleep(20)
    os._exit(1)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.write(write, str(store.port).encode())
store.wait(["pulse/0"])
del store
time.sleep(0.5)
"""


def test_a_launcher_that_keeps_the_store_is_missed_when_the_store_went_first():
    said = subprocess.run([sys.executable, "-c", ORPHANED], capture_output=True, text=True, timeout=120)
    assert said.stdout == "asked to stop", said.stderr


def test_where_the_store_is_gone_nobody_is_reported_and_nothing_raised(store: dist.Store):
    found: list[int] = []
    errors: list[object] = []
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=2))  # type: ignore[attr-defined]
        client.set("pulse/1", "7")
        with heartbeat(client, 0, 2, found.append):
            time.sleep(0.2)
            del store
            time.sleep(1.5)
    finally:
        threading.excepthook = hook
    assert not errors

"""Faults that only groups of workers on Ray can have; those that all engines share are in ``test_faults.py``."""

from __future__ import annotations

import random
import re
import signal
import time

import pytest

from tests.faults.launchers import COLOCATED, SPLIT, on_ray
from tests.faults.ray_head import ray_head
from tests.faults.sessions import Patient, Session, lives, noted
from tests.faults.test_faults import PACE, SEED, goes_on_to_the_same_end, lost_no_more_than_it_may, says_how_to_go_on

pytestmark = pytest.mark.faults
CRITIC, STUDENT = 0, 1
"""Places of the two workers in the launcher's list."""


def seen(session: Session, phase: str) -> int:
    """The latest iteration in which a worker of this session was at the phase."""
    return max((row["iteration"] for row in noted(session.log.parent) if row["phase"] == phase), default=-1)


def ends_with_the_name(session: Session, patient: Patient, rank: int) -> float:
    took = session.end()
    assert session.process.returncode
    assert re.search(session.launcher.killed(rank), session.said), session.said
    says_how_to_go_on(patient, session)
    lost_no_more_than_it_may(patient)
    return took


def test_a_worker_or_the_driver_that_is_killed_during_a_save_leaves_the_checkpoint_before(world, sound, note):
    """A worker: the driver takes the half-written folder away. The driver: the next run leaves it aside."""
    patient, draw, slowest = Patient(world, "cut-split", 30, 4, task=SPLIT.task), random.Random(SEED), 0.0
    for rank in (CRITIC, STUDENT, None, None):
        session = patient.start(SPLIT, **PACE)
        session.wait(lambda: patient.done() > 0 or patient.saved() > 0, "an iteration")
        before = patient.saved()
        session.wait(lambda: bool(patient.partials()), "a save", every_s=0)
        time.sleep(draw.uniform(0, 0.004))
        if rank is None:
            session.process.kill()
            slowest = max(slowest, session.end())
        else:
            session.strike(rank, signal.SIGKILL)
            slowest = max(slowest, ends_with_the_name(session, patient, rank))
            assert not patient.partials()
        assert patient.saved() in (before, before + patient.every)
    goes_on_to_the_same_end(patient, sound, SPLIT)
    note(f"{SPLIT}: SIGKILL during a save, of each worker and twice of the driver: slowest end {slowest:.1f} s")


@pytest.mark.parametrize(
    ("phase", "struck", "most_s"),
    [("scores", STUDENT, 0.0), ("rollout.1", STUDENT, 0.01), ("rollout.0", CRITIC, 0.0)],
    ids=["the student sleeps", "the student goes to sleep", "the critic sleeps"],
)
def test_a_worker_that_is_killed_in_its_sleep_is_named(phase, struck, most_s, world, sound, note):
    """At a moment when the other group computes, or has its turn next."""
    patient = Patient(world, f"asleep-{phase}", 20, 4, task=COLOCATED.task)
    session, draw = patient.start(COLOCATED, **PACE), random.Random(SEED)
    session.wait(lambda: seen(session, phase) >= 9, f"{phase} of iteration 9", every_s=0.001)
    time.sleep(draw.uniform(0, most_s))
    session.strike(struck, signal.SIGKILL)
    took = ends_with_the_name(session, patient, struck)
    goes_on_to_the_same_end(patient, sound, COLOCATED)
    note(f"{COLOCATED}: SIGKILL of {COLOCATED.workers[struck]} in {phase}: named and ended in {took:.1f} s")


def test_a_worker_that_is_stopped_in_its_sleep_is_named(world, sound, note):
    patient = Patient(world, "stopped-asleep", 20, 4, task=COLOCATED.task)
    session = patient.start(COLOCATED, **PACE)
    session.wait(lambda: seen(session, "scores") >= 9, "scores of iteration 9", every_s=0.001)
    session.strike(STUDENT, signal.SIGSTOP)
    took = session.end()
    assert re.search(COLOCATED.stalled(STUDENT), session.said), session.said
    lost_no_more_than_it_may(patient)
    goes_on_to_the_same_end(patient, sound, COLOCATED)
    note(f"{COLOCATED}: SIGSTOP of a worker that sleeps: named and ended in {took:.1f} s")


def test_a_driver_that_is_killed_leaves_no_worker(world, sound, note):
    patient = Patient(world, "driverless", 30, 4, task=SPLIT.task)
    session = patient.start(SPLIT, **PACE)
    session.wait(lambda: patient.done() >= 9, "iteration 9")
    session.process.kill()
    took = session.end()
    lost_no_more_than_it_may(patient)
    goes_on_to_the_same_end(patient, sound, SPLIT)
    note(f"{SPLIT}: SIGKILL of the driver: its Ray and its workers ended in {took:.1f} s")


def test_a_run_whose_workers_are_killed_goes_on_by_itself_as_often_as_it_may(world, sound, note):
    """``engine.max_restarts``."""
    patient = Patient(world, "by-itself", 30, 4, ("engine.max_restarts=2",), SPLIT.task)
    session = patient.start(SPLIT, **PACE)
    for rank, until in ((STUDENT, 6), (CRITIC, 15)):
        session.wait(lambda until=until: patient.done() >= until, f"iteration {until}")
        session.strike(rank, signal.SIGKILL)
        session.wait(lambda rank=rank: re.search(SPLIT.killed(rank), session.said) is not None, "its name")
    session.end(180)
    assert session.process.returncode == 0, session.said
    assert "restarts left: 1" in session.said
    assert "restarts left: 0" in session.said
    patient.assert_equals(sound(SPLIT, 30, 4))
    patient.check_items()
    note(f"{SPLIT}: SIGKILL of a worker, twice, with max_restarts=2: to its end without a hand")


@pytest.mark.parametrize("killed", ["gcs_server", "raylet", "all of it"])
def test_a_run_whose_cluster_loses_its_head_ends_and_goes_on_with_a_new_one(killed, world, sound, note):
    """The run joined the cluster: it ends, the workers too, and the next head serves it as well."""
    patient = Patient(world, f"headless-{killed[:3]}", 30, 4, task=SPLIT.task)
    with ray_head(OMP_NUM_THREADS="1", **PACE) as head:
        joined = on_ray("split", {"critic": 1, "student": 1}, f", address: '{head.address}'")
        session = patient.start(joined, **PACE)
        session.wait(lambda: patient.done() >= 9, "iteration 9")
        workers = session.ranks()
        head.kill(*([killed] if killed != "all of it" else []))
        took = session.end()
        assert session.process.returncode
        assert "Traceback" not in session.said, session.said
        assert f"Ray at {head.address} is gone" in session.said, session.said
        says_how_to_go_on(patient, session)
        lost_no_more_than_it_may(patient)
        assert len(workers) == 2
        assert not any(lives(pid) for pid in workers.values())
        head.end()
        head.start()
        patient.finish(joined)
    patient.assert_equals(sound(SPLIT, 30, 4))
    note(f"{joined.name}, joined: SIGKILL of {killed}: ended in {took:.1f} s, and went on with the next head")

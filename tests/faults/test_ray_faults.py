"""Faults that only groups of workers on Ray can have; those that all engines share are in ``test_faults.py``."""

from __future__ import annotations

import random
import re
import signal
import time
from functools import partial

import pytest

from tests.faults.launchers import COLOCATED, ONE_DMD2, SPLIT, on_ray
from tests.faults.ray_head import ray_head
from tests.faults.sessions import Patient, Session, noted
from tests.faults.test_faults import (
    PACE,
    SEED,
    SLOW,
    goes_on_to_the_same_end,
    is_killed_at_random,
    lost_no_more_than_it_may,
    says_how_to_go_on,
)

pytestmark = pytest.mark.faults
CRITIC, STUDENT, DRIVER = 0, 1, -1
"""Places of the two workers in the launcher's list."""


def was_at(session: Session, phase: str, iteration: int) -> bool:
    """Whether a worker of this session has begun the phase of that iteration, or of a later one."""
    return any(row["iteration"] >= iteration and row["phase"] == phase for row in noted(session.log.parent))


def ends_with_the_name(session: Session, patient: Patient, rank: int) -> float:
    took = session.end()
    assert session.process.returncode
    assert re.search(session.launcher.killed(rank), session.said), session.said
    says_how_to_go_on(patient, session)
    lost_no_more_than_it_may(patient)
    return took


def test_a_worker_or_the_driver_that_is_killed_during_a_save_leaves_the_checkpoint_before(world, sound, note):
    """A worker: the driver takes the half-written folder away. The driver: the next run leaves it aside, and neither
    its Ray nor a worker stays."""
    patient, draw, slowest = Patient(world, "cut-split", 24, 4, task=SPLIT.task), random.Random(SEED), 0.0
    for rank in (CRITIC, STUDENT, DRIVER, DRIVER):
        session = patient.start(SPLIT, **PACE)
        session.wait(lambda: patient.done() > 0 or patient.saved() > 0, "an iteration")
        before = patient.saved()
        session.wait(lambda: bool(patient.partials()), "a save", every_s=0.0005)
        time.sleep(draw.uniform(0, 0.004))
        if rank == DRIVER:
            session.process.kill()
            slowest = max(slowest, session.end())
        else:
            session.strike(rank, signal.SIGKILL)
            slowest = max(slowest, ends_with_the_name(session, patient, rank))
            assert not patient.partials()
        assert patient.saved() in (before, before + patient.every)
    goes_on_to_the_same_end(patient, sound, SPLIT)
    note(f"{SPLIT}: SIGKILL during a save, of each worker and twice of the driver: slowest end {slowest:.1f} s")


def test_a_worker_that_is_killed_or_stopped_in_its_sleep_is_named(world, sound, note):
    """While the other group computes, or has its turn next."""
    patient, draw = Patient(world, "asleep", 24, 4, task=COLOCATED.task), random.Random(SEED)
    for phase, struck, most_s, number in (
        ("scores", STUDENT, 0.0, signal.SIGKILL),
        ("rollout.1", STUDENT, 0.01, signal.SIGKILL),  # it goes to sleep next
        ("rollout.0", CRITIC, 0.0, signal.SIGKILL),
        ("scores", STUDENT, 0.0, signal.SIGSTOP),
    ):
        until, session = patient.done() + 3, patient.start(COLOCATED, **PACE)
        session.wait(partial(was_at, session, phase, until), f"{phase} of iteration {until}", every_s=0.001)
        time.sleep(draw.uniform(0, most_s))
        session.strike(struck, number)
        if number == signal.SIGKILL:
            took = ends_with_the_name(session, patient, struck)
        else:
            took = session.end()
            assert re.search(COLOCATED.stalled(struck), session.said), session.said
            lost_no_more_than_it_may(patient)
        note(f"{COLOCATED}: {number.name} of {COLOCATED.workers[struck]} in {phase}: named and ended in {took:.1f} s")
    goes_on_to_the_same_end(patient, sound, COLOCATED)


def test_a_run_whose_workers_are_killed_goes_on_by_itself_as_often_as_it_may(world, sound, note):
    """``engine.max_restarts``."""
    patient = Patient(world, "by-itself", 24, 4, ("engine.max_restarts=2",), SPLIT.task)
    session = patient.start(SPLIT, **PACE)
    for rank, until in ((STUDENT, 6), (CRITIC, 13)):
        session.wait(lambda until=until: patient.done() >= until, f"iteration {until}")
        session.strike(rank, signal.SIGKILL)
        session.wait(lambda rank=rank: re.search(SPLIT.killed(rank), session.said) is not None, "its name")
    session.end(180)
    assert session.process.returncode == 0, session.said
    assert "restarts left: 1" in session.said
    assert "restarts left: 0" in session.said
    patient.assert_equals(sound(SPLIT, 24, 4))
    patient.check_items()
    note(f"{SPLIT}: SIGKILL of a worker, twice, with max_restarts=2: to its end without a hand")


def test_a_run_whose_cluster_loses_its_head_ends_and_goes_on_with_the_next_one(world, sound, note):
    """The run joined the cluster: it ends, the workers too, and the next head serves it as well. Where the driver is
    killed the workers end, and the head stays. Without its head it goes on for seconds, hence the many iterations."""
    patient = Patient(world, "headless", 80, 4, task=SPLIT.task)
    with ray_head(**SLOW, **rows_of(patient)) as head:
        joined = on_ray("split", head.address)
        for struck in (("gcs_server",), ("raylet",), (), None):
            session, until = patient.start(joined, **PACE), patient.done() + 4
            session.wait(lambda until=until: patient.done() >= until, f"iteration {until}")
            if struck is None:
                session.process.kill()
            else:
                head.kill(*struck)
            took = session.end()
            assert session.process.returncode
            lost_no_more_than_it_may(patient)
            names = "the driver" if struck is None else " and ".join(struck) or "the whole head"
            note(f"{joined}: SIGKILL of {names}: ended in {took:.1f} s")
            if struck is not None:
                assert "Traceback" not in session.said, session.said
                assert re.search(r"Ray at \S+ is gone: its (head|daemon)", session.said), session.said
                says_how_to_go_on(patient, session)
                head.end()
                head.start()
        patient.finish(joined)
    patient.assert_equals(sound(ONE_DMD2, 80, 4), exact=False)
    patient.check_items()


def test_workers_that_are_killed_20_times_at_random_moments_lose_nothing(world, sound, note):
    """On a cluster that goes on meanwhile; from session to session the run goes from layout to layout."""
    patient = Patient(world, "killed-workers", 70, 2, task=SPLIT.task)
    with ray_head(**PACE, **rows_of(patient)) as head:
        chain = [on_ray(layout, head.address) for layout in ("shared", "split", "colocated")]
        line = is_killed_at_random(patient, chain, note)
        patient.finish(chain[-1])
    patient.assert_equals(sound(ONE_DMD2, 70, 2), exact=False)
    patient.check_items()
    note(line)


def rows_of(patient: Patient) -> dict[str, str]:
    """Where workers note what they see, whose environment is that of the cluster."""
    folder = patient.rows_folder / "workers"
    folder.mkdir(parents=True)
    return {"FAULT_ROWS": str(folder)}

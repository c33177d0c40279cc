"""A small share of the faults, for every run of the suite; the others take minutes (``make faults``)."""

from __future__ import annotations

import signal

import pytest

from tests.faults.launchers import ONE, SFT, TORCHRUN
from tests.faults.sessions import SETTINGS, Patient

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


def test_two_ranks_that_are_killed_during_a_save_go_on_as_one_process(world):
    """PITFALLS, half-written checkpoint; ranks; hangs: rank 0 is killed while its folder is half written."""
    patient = Patient(world, "shared", 12, 4)
    session = patient.start(TORCHRUN, FAULT_PACE="0.05")
    session.wait(lambda: patient.saved() == 4, "the first checkpoint")
    session.wait(lambda: bool(patient.partials()), "the next", every_s=0)
    session.strike(0, signal.SIGKILL)
    session.end()
    assert "rank 0 no longer answers: killed, or stalled" in session.said, session.said
    assert f"torchrun --nproc-per-node 2 -m fewstep train --resume {patient.run.path}" in session.said
    assert patient.saved() in (4, 8)
    patient.finish(ONE)
    world.train(SFT.recipe, *SETTINGS, *SFT.settings, *ONE.settings, "checkpoint.every=4", iterations=12, into="whole")
    patient.assert_equals(Patient(world, "whole", 12), exact=False)
    patient.check_items()

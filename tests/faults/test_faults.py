"""Real faults in real runs of real processes: PITFALLS, hangs and half-written checkpoints.

Whatever happens to a run, it ends within a minute, leaves no process, says which rank or worker and why and how to go
on, and has lost the iterations since its last complete checkpoint and nothing else: it reaches the weights and the
metrics of a run that nothing happened to, to the last bit.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from dataclasses import replace

import pytest

from tests.faults.launchers import ONE, SHARED, SPLIT, TORCHRUN
from tests.faults.sessions import START_S, Patient, Session
from tests.faults.small_disk import small_disk

PACE, SLOW = {"FAULT_PACE": "0.05"}, {"FAULT_PACE": "0.2"}
"""``SLOW`` where a fault must come between two iterations that are few."""
KILLS, SEED = 20, 4

pytestmark = pytest.mark.faults


def launchers(*some):
    return pytest.mark.parametrize("launcher", some, ids=str)


def goes_on_to_the_same_end(patient: Patient, sound, launcher) -> None:
    patient.finish(launcher)
    patient.assert_equals(sound(launcher, patient.iterations, patient.every))
    patient.check_items()
    assert not patient.partials()


def lost_no_more_than_it_may(patient: Patient) -> None:
    """All iterations up to the last checkpoint that was due before the last row of metrics."""
    assert patient.saved() >= max(patient.done() - 1, 0) // patient.every * patient.every


def is_killed_at_random(patient: Patient, chain, note, kills: int = KILLS) -> str:
    """SIGKILL of a random rank or worker, now and then while it starts, else some iterations after it went on; each
    session by the next launcher of the chain. Returns what is to be noted of it all."""
    draw, slowest, begun = random.Random(SEED), 0.0, time.monotonic()
    for kill in range(kills):
        launcher = chain[kill % len(chain)]
        session, rank, at = patient.start(launcher, **PACE), draw.randrange(launcher.world), patient.done()
        if draw.random() < 0.2:
            moment, where = draw.uniform(0.2, 3.0), "after the start"
        else:
            until = min(at + draw.randint(1, 6), patient.iterations - 1)
            session.wait(lambda until=until: patient.done() >= until, f"iteration {until}")
            moment, where = draw.uniform(0, 0.07), f"after iteration {until}"
        time.sleep(moment)
        session.strike(rank, signal.SIGKILL)
        took = session.end()
        slowest = max(slowest, took)
        lost_no_more_than_it_may(patient)
        if launcher.workers:
            assert re.search(launcher.killed(rank), session.said), session.said
        moments = f"{launcher}, rank {rank}, {1000 * moment:4.0f} ms {where}"
        note(f"    kill {kill + 1:2d}: {moments}; ended in {took:.1f} s, {patient.saved()} kept")
    names, whole = " -> ".join(launcher.name for launcher in chain), time.monotonic() - begun
    return f"{names}: SIGKILL, {kills} random moments (seed {SEED}): slowest end {slowest:.1f} s, all in {whole:.0f} s"


@launchers(ONE, TORCHRUN)
def test_a_run_that_is_killed_20_times_at_random_moments_loses_nothing(launcher, world, sound, note):
    patient = Patient(world, f"killed-{launcher.slug}", 84, 2)
    line = is_killed_at_random(patient, [launcher], note)
    goes_on_to_the_same_end(patient, sound, launcher)
    note(line)


@launchers(ONE, TORCHRUN)
def test_a_kill_during_a_save_leaves_the_checkpoint_before(launcher, world, sound, note):
    """Of rank 0, which writes, when its half-written folder is seen on the disk."""
    patient, draw, cut = Patient(world, f"cut-{launcher.slug}", 30, 4), random.Random(SEED), 0
    slowest = 0.0
    for _ in range(4):
        session = patient.start(launcher, **PACE)
        session.wait(lambda: patient.done() > 0 or patient.saved() > 0, "an iteration")
        before = patient.saved()
        session.wait(lambda: bool(patient.partials()), "a save", every_s=0)
        time.sleep(draw.uniform(0, 0.004))
        session.strike(0, signal.SIGKILL)
        slowest = max(slowest, session.end())
        cut += bool(patient.partials())
        assert patient.saved() in (before, before + patient.every)
    assert cut, "no kill came while a checkpoint was half written"
    goes_on_to_the_same_end(patient, sound, launcher)
    assert "a save that was cut off, ignored" in "".join(session.said for session in patient.sessions)
    note(f"{launcher}: SIGKILL during a save, {cut} of 4 half-written: slowest end {slowest:.1f} s")


@launchers(ONE, TORCHRUN, SHARED)
def test_a_rank_that_raises_ends_the_run_with_its_words(launcher, world, sound, note):
    rank = launcher.world - 1
    patient = Patient(world, f"raised-{launcher.slug}", 30, 4, task=launcher.task)
    session = patient.start(launcher, FAULT=f"raise:{rank}:13")
    session.wait(lambda: patient.done() >= 12, "iteration 12")
    took = session.end()
    assert session.process.returncode
    assert re.search(launcher.raised(rank), session.said), session.said
    says_how_to_go_on(patient, session)
    assert patient.saved() == 12
    goes_on_to_the_same_end(patient, sound, launcher)
    note(f"{launcher}: a rank raises: ended in {took:.1f} s")


@launchers(TORCHRUN, SHARED)
@pytest.mark.parametrize("kind", ["stopped", "hung"])
def test_a_rank_that_stalls_is_named(launcher, kind, world, sound, note):
    """By SIGSTOP, which stops all of its threads; or by code of its own that never returns."""
    limit = ("engine.timeout_s=8",)  # beside the 30 s that torchrun gives a rank between SIGTERM and SIGKILL
    patient, rank = Patient(world, f"{kind}-{launcher.slug}", 30, 4, limit, launcher.task), launcher.world - 1
    told = {"FAULT": f"hang:{rank}:13"} if kind == "hung" else {}
    session = patient.start(launcher, **PACE, **told)
    session.wait(lambda: patient.done() >= 13, "iteration 13")
    if kind == "stopped":
        session.strike(rank, signal.SIGSTOP)
    took = session.end()
    assert session.process.returncode
    assert re.search(launcher.stalled(rank), session.said), session.said
    says_how_to_go_on(patient, session)
    lost_no_more_than_it_may(patient)
    goes_on_to_the_same_end(patient, sound, launcher)
    note(f"{launcher}: a rank is {kind}: ended in {took:.1f} s")


@launchers(TORCHRUN)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_by_the_others(launcher, rank, world, sound, note):
    patient = Patient(world, f"named-{rank}-{launcher.slug}", 30, 4)
    session = patient.start(launcher, **PACE)
    session.wait(lambda: patient.done() >= 9, "iteration 9")
    session.strike(rank, signal.SIGKILL)
    took = session.end()
    assert re.search(launcher.killed(rank), session.said), session.said
    says_how_to_go_on(patient, session)
    goes_on_to_the_same_end(patient, sound, launcher)
    note(f"{launcher}: SIGKILL of rank {rank}: named and ended in {took:.1f} s")


@launchers(ONE, TORCHRUN, SPLIT)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_stop_that_is_asked_for_saves_the_last_iteration(launcher, number, world, sound, note):
    """Of the launcher, as a scheduler asks it; or of all processes in its group, as a terminal does."""
    patient = Patient(world, f"{number.name}-{launcher.slug}", 30, 8, task=launcher.task)
    session = patient.start(launcher, **SLOW)
    session.wait(lambda: patient.done() >= 11, "iteration 11")
    if number == signal.SIGINT:
        os.killpg(session.process.pid, number)
    else:
        session.process.send_signal(number)
    took = session.end()
    assert patient.saved() == patient.done() < 30, session.said
    says_how_to_go_on(patient, session)
    if launcher is not TORCHRUN:  # which says something of its own
        assert session.process.returncode == 130
        assert session.said.splitlines()[-1].startswith("Checkpoint saved. Go on with: "), session.said
        assert "Traceback" not in session.said
    goes_on_to_the_same_end(patient, sound, launcher)
    note(f"{launcher}: {number.name}: saved and ended in {took:.1f} s")


@launchers(TORCHRUN)
def test_ranks_whose_launcher_is_killed_stop_with_a_checkpoint(launcher, world, sound, note):
    patient = Patient(world, f"orphans-{launcher.slug}", 400, 100)
    session = patient.start(launcher, **PACE)
    session.wait(lambda: patient.done() >= 5, "iteration 5")
    session.process.kill()
    took = session.end()
    assert patient.saved() == patient.done() < 400
    note(f"{launcher}: SIGKILL of the launcher: its ranks saved and ended in {took:.1f} s")


@launchers(ONE, TORCHRUN, SPLIT)
@pytest.mark.parametrize("room", [2**16, 0], ids=["during a save", "to the last byte"])
def test_a_disk_that_is_full_ends_the_run_and_refuses_the_next_until_there_is_room(
    launcher, room, tmp_path, world, sound, note
):
    """A real one, of 24 MiB, which something else fills."""
    with small_disk(tmp_path / "disk", 24) as disk:
        if disk is None:
            pytest.skip("neither unshare -rm nor root may mount a tmpfs here")
        named = Patient(world, f"full-{room}-{launcher.slug}", 30, 4, task=launcher.task)
        patient = replace(named, around=disk.around, place=disk.inside / "run", seen_at=disk.here / "run")
        session = patient.start(launcher, **SLOW)
        session.wait(lambda: patient.saved() >= 8, "the second checkpoint")
        disk.fill(but=room)
        took = session.end()
        assert session.process.returncode
        assert "No space left on device" in session.said, session.said
        assert f"fewstep train --resume {disk.inside / 'run'}" in session.said
        files = ["checkpoints"] if room else ["checkpoints", "metrics.jsonl"]  # a row may find room in its last page
        assert any(f"{disk.inside / 'run' / name}" in session.said for name in files), session.said
        assert patient.saved() in (8, 12)
        assert not patient.partials()
        again = patient.start(launcher)
        again.end(START_S)
        assert "a checkpoint takes" in again.said, again.said
        disk.empty()
        goes_on_to_the_same_end(patient, sound, launcher)
        where = "during a save" if room else "to the last byte"
        note(f"{launcher}: a full disk {where}: ended in {took:.1f} s")


@pytest.mark.parametrize("first", [TORCHRUN, ONE], ids=str)
def test_killed_on_two_ranks_and_on_one_and_on_two_again_it_is_the_sound_run(first, world, sound, note):
    """Weights and metrics to 1e-9 in float64, and each item once an epoch, whoever ran its iteration."""
    order = [TORCHRUN, ONE, TORCHRUN] if first is TORCHRUN else [ONE, TORCHRUN, ONE]
    patient, draw = Patient(world, f"moved-{first.slug}", 60, 4), random.Random(SEED)
    for launcher in order:
        session, until = patient.start(launcher, **PACE), patient.saved() + draw.randint(6, 14)
        session.wait(lambda until=until: patient.done() >= until, f"iteration {until}")
        session.strike(draw.randrange(launcher.world), signal.SIGKILL)
        session.end()
        lost_no_more_than_it_may(patient)
    patient.finish(order[1])
    patient.assert_equals(sound(ONE, 60, 4), exact=False)
    patient.check_items()
    note(f"{' -> '.join(one.name for one in [*order, order[1]])}: SIGKILL between them: equal to 1e-9")


def says_how_to_go_on(patient: Patient, session: Session) -> None:
    assert f"fewstep train --resume {patient.run.path}" in session.said, session.said

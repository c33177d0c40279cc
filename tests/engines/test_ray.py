"""Groups of workers on Ray equal one process: real workers, tiny networks in float64, Ray started once."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.checkpoint.save import CheckpointSection, load_checkpoint, save_checkpoint
from fewstep.engines.mesh import RankError
from fewstep.engines.process import ProcessEngine
from fewstep.engines.ray.driver import Driver
from fewstep.engines.ray.placement import RaySection, groups_of
from fewstep.engines.ray.schedule import Step, leading, steps
from tests.engines.ray_share import CASES, begin, made
from tests.engines.worlds import copied

pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("unchecked_shapes")

ITERATIONS, CPU = 3, torch.device("cpu")
KEEP = CheckpointSection(every=1, keep_last=9)
SECTIONS = {
    "shared": RaySection(layout="shared", groups={"all": {"workers": 2}}),  # type: ignore[arg-type]
    "split 2 + 1": RaySection(layout="split", groups={"critic": {"workers": 2}, "student": {"workers": 1}}),  # type: ignore[arg-type]
    "colocated": RaySection(layout="colocated", groups={"critic": {"workers": 1}, "student": {"workers": 1}}),  # type: ignore[arg-type]
    "overlap": RaySection(layout="split", groups={"critic": {"workers": 1}, "student": {"workers": 1}}, overlap=True),  # type: ignore[arg-type]
    "shared+rollout": RaySection(groups={"all": {"workers": 2}, "rollout": {"workers": 1}}),  # type: ignore[arg-type]
    "split+rollout": RaySection(
        layout="split",
        groups={"critic": {"workers": 2}, "student": {"workers": 1}, "rollout": {"workers": 2}},  # type: ignore[arg-type]
    ),
}
SECTIONS |= {
    f"overlap {name}": SECTIONS[name].model_copy(update={"overlap": True})
    for name in ("shared+rollout", "split+rollout")
}
ROLLING = ("dmd2_fresh_gan", "sid_gan_on_teacher", "self_forcing", "dmd2_skips")
"""Methods whose samples are made by workers of their own."""
PLAIN = [name for name in CASES if name != "dmd2_skips"]
SPLIT = [name for name in PLAIN if name not in ("sft", "diffusion_forcing", "teacher_forcing", "ode_init")]
"""Methods with roles beside the student."""
ALWAYS = {
    "shared": ("self_forcing", "sft", "diffusion_forcing", "teacher_forcing", "ode_init", "dmd2_separate"),
    "split 2 + 1": ("dmd2_fresh_gan", "consistency", "streams"),
    "colocated": ("dmd2_shared", "sid_gan_on_teacher"),
    "overlap": ("dmd2_fresh_gan",),
}
"""What the suite runs every time: each method once; the other pairs are ``thorough``."""


def pairs(**cases: Sequence[str]) -> list[Any]:
    """Layout and method, for parametrize; ``cases``: by layout."""
    return [
        pytest.param(layout, case, marks=() if case in ALWAYS.get(layout, ()) else pytest.mark.thorough)
        for layout, found in cases.items()
        for case in found
    ]


@pytest.fixture(scope="module")
def ray_started() -> Iterator[None]:
    """Ray, for all drivers of this module; each has workers of its own, which serve one method after the other."""
    import ray

    from fewstep.engines.ray.cluster import start

    start(RaySection(), [{"CPU": 24.0}])
    yield
    ray.shutdown()


class Fleet:
    """Drivers by layout, started when they are first asked for."""

    def __init__(self, stack: ExitStack):
        self._stack, self._drivers = stack, dict[str, Driver]()

    def driver(self, layout: str, case: str) -> Driver:
        """The driver of a layout, its workers about to train the method; with overlap and without it has the same."""
        section, method = SECTIONS[layout], CASES[case]()
        groups, workers = groups_of(section, method, ITERATIONS, CPU), f"{section.layout} {section.groups}"
        if workers not in self._drivers:
            self._drivers[workers] = self._stack.enter_context(Driver(section, method, groups, begin(case)))
        else:
            self._drivers[workers].section = section
            self._drivers[workers].begin(method, groups, begin(case))
        self._drivers[workers]._cut = lambda iteration: iteration == ITERATIONS
        return self._drivers[workers]


@pytest.fixture(scope="module")
def fleet(ray_started) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack)


def saved(driver: Driver, folder: Path, iteration: int = ITERATIONS) -> dict[str, dict[str, Tensor]]:
    """What the workers wrote together."""
    driver.save(folder, Blank(iteration), KEEP)  # type: ignore[arg-type]
    found = load_checkpoint(folder / f"iteration-{iteration:06d}")
    return {group: found.tensors(group) for group in found.groups}


class Blank:
    """In place of what a checkpoint says of its run."""

    def __init__(self, iteration: int):
        self.iteration = iteration

    to_json = staticmethod(dict[str, Any])


def assert_close(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for group, named in expected.items():
        assert found[group].keys() == named.keys(), group
        for name, tensor in named.items():
            assert found[group][name].dtype == tensor.dtype
            torch.testing.assert_close(found[group][name], tensor, rtol=1e-9, atol=1e-9, msg=f"{group}: {name}")


def assert_trained(found: dict[str, dict[str, Tensor]], start: dict[str, Tensor], moved: dict[str, float]) -> None:
    """The first block has a gradient, the average has moved, and of the networks all but the teacher."""
    assert found["student.optimizer"]["exp_avg/blocks.0.self_attention.q.weight"].abs().max() > 1e-9
    assert any(not torch.equal(tensor, start[name]) for name, tensor in found["ema"].items())
    for name, value in moved.items():
        assert name == "asleep" or value == float(name != "moved/teacher"), name


def seen(driver: Driver, group: str) -> dict[str, float]:
    return driver._ask(group, "validate", 0)[0]


def without_waits(row: dict[str, float]) -> dict[str, float]:
    assert all(value >= 0 for name, value in row.items() if name.endswith("/waiting_s"))
    return {name: value for name, value in row.items() if not name.endswith("/waiting_s")}


@pytest.mark.parametrize(
    ("layout", "case"),
    pairs(**{"shared": PLAIN, "split 2 + 1": SPLIT, "colocated": SPLIT})
    + pairs(**{"shared+rollout": ROLLING, "split+rollout": ROLLING}),
)
def test_groups_of_workers_equal_one_process(fleet: Fleet, tmp_path: Path, layout: str, case: str):
    """Invariants 36, 43, 50 and 51: losses, and the weights, moments and average of every role."""
    driver, one = fleet.driver(layout, case), made(case)
    start = copied({"ema": one.ema.state()})["ema"]  # type: ignore[union-attr]
    for iteration in range(ITERATIONS):
        row = {name: float(value) for name, value in one.run(iteration).items()}
        assert without_waits(driver.run(iteration)) == pytest.approx(row, rel=1e-9, abs=1e-9, nan_ok=True)
    found = saved(driver, tmp_path)
    assert_close(found, copied(one.state()))
    learning = [group.name for group in driver.groups if not group.rolls]
    moved = {name: value for group in learning for name, value in seen(driver, group).items()}
    assert_trained(found, start, moved)


def test_of_groups_that_take_turns_one_sleeps(fleet: Fleet):
    """Weights, moments and average of whichever is idle."""
    import ray

    driver = fleet.driver("colocated", "dmd2_shared")
    driver.run(0)
    idle = {name: list(driver._workers[name].call("validate", 0)) for name in ("critic", "student")}
    assert [ray.get(calls)[0]["asleep"] for calls in idle.values()] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("layout", "case"),
    pairs(
        **{
            "overlap": ("dmd2_fresh_gan", "dmd2_shared", "consistency"),
            "overlap shared+rollout": ("self_forcing",),
            "overlap split+rollout": ("dmd2_fresh_gan", "dmd2_shared"),
        }
    ),
)
def test_overlap_equals_the_same_staleness_in_one_process(fleet: Fleet, tmp_path: Path, layout: str, case: str):
    """The rollouts of an iteration are made before the update of the one before; that is all that differs."""
    driver, one = fleet.driver(layout, case), made(case)
    rows = rows_of(driver)
    emulated(one, driver)
    assert_close(saved(driver, tmp_path), copied(one.state()))
    if case == "consistency":
        plain = made(case)
        for iteration in range(ITERATIONS):
            row = {name: float(value) for name, value in plain.run(iteration).items()}
            assert without_waits(rows[iteration]) == pytest.approx(row, rel=1e-9, abs=1e-9), "nothing is stale"


def rows_of(driver: Driver) -> list[dict[str, float]]:
    return [driver.run(iteration) for iteration in range(ITERATIONS)]


def emulated(one: ProcessEngine, driver: Driver, iterations: int = ITERATIONS) -> None:
    """All phases in one process, the leading ones of an iteration before the rest of the one before."""
    records: dict[tuple[int, int], Any] = {}

    def perform(found: list[Step]) -> None:
        for step in found:
            phase = list(one.method.phases(step.iteration))[step.index]
            foreign = {name: records[step.iteration, giver] for name, giver in step.takes.items()}
            records[step.iteration, step.index] = one.perform(phase, step.iteration, foreign)

    for iteration in range(iterations):
        mine, following = (steps(one.method, driver.groups, number) for number in (iteration, iteration + 1))
        first = leading(mine)
        if iteration == 0:
            perform(first)
        perform(leading(following))
        perform([step for step in mine if step not in first])
        one.finish(iteration)


def test_no_work_is_begun_across_a_checkpoint(fleet: Fleet, tmp_path: Path):
    """A run that goes on from it does what one does that never stopped."""
    driver, one = fleet.driver("overlap", "dmd2_shared"), made("dmd2_shared")
    driver._cut = lambda iteration: True
    for iteration in range(ITERATIONS):
        driver.run(iteration)
        one.run(iteration)
        assert driver.between
    assert_close(saved(driver, tmp_path), copied(one.state()))


def test_the_critic_group_goes_on_while_the_student_is_updated_and_a_stop_waits_until_the_student_is_there(
    fleet: Fleet, tmp_path: Path
):
    driver, one = fleet.driver("overlap", "dmd2_fresh_gan"), made("dmd2_fresh_gan")
    driver.run(0)
    assert not driver.between
    assert {name: updates for name, (updates, _) in driver.counters().items()} == {
        "student": 1,
        "critic": 4,
        "discriminator": 4,
    }
    driver._cut = lambda iteration: True
    driver.run(1)
    assert driver.between
    emulated(one, driver, 2)
    assert_close(saved(driver, tmp_path, 2), copied(one.state()))


def test_one_process_and_groups_of_workers_go_on_from_each_other(fleet: Fleet, tmp_path: Path):
    """Streams, whose carries stand in the checkpoint, from the middle of them."""
    one, driver = made("streams"), fleet.driver("split 2 + 1", "streams")
    one.run(0)
    save_checkpoint(tmp_path / "one", 1, one.state(), {}, KEEP)
    driver.load(load_checkpoint(tmp_path / "one" / "iteration-000001"))
    again = saved(driver, tmp_path / "again", 1)
    assert_close(again, copied(one.state()))
    assert {"carry.0", "carry.1"} <= again.keys()
    one.run(1)
    driver.run(1)
    resumed = made("streams")
    resumed.load(saved(driver, tmp_path / "groups", 2))
    for engine in (one, resumed):
        engine.run(2)
    assert_close(copied(resumed.state()), copied(one.state()))


@pytest.mark.parametrize(
    "layout", [pytest.param("overlap split+rollout", marks=pytest.mark.thorough), "shared+rollout"]
)
def test_workers_that_roll_out_go_on_from_what_one_process_saved(fleet: Fleet, tmp_path: Path, layout: str):
    """Whatever they have rolled out before."""
    driver, one = fleet.driver(layout, "dmd2_shared"), made("dmd2_shared")
    driver._cut = lambda iteration: True
    driver.run(0)
    for iteration in range(2):
        one.run(iteration)
    save_checkpoint(tmp_path / "one", 2, one.state(), {}, KEEP)
    driver.load(load_checkpoint(tmp_path / "one" / "iteration-000002"))
    driver.run(2)
    one.run(2)
    assert_close(saved(driver, tmp_path / "groups"), copied(one.state()))


@pytest.mark.parametrize(
    ("layout", "trouble", "words"),
    [
        ("shared", "all/1 raises", [r"worker all/1 \(process \d+ on .*\) failed: ValueError: no more rows"]),
        pytest.param(
            "overlap",
            "critic/0 stalls",
            [r"worker critic/0 .* has been at phase '.*' of iteration 3", "timeout_s = 3"],
            marks=pytest.mark.faults,
        ),
        pytest.param(
            "overlap", "student/0 SIGSTOP", [r"worker student/0 .*: no answer for 2 s"], marks=pytest.mark.faults
        ),
        pytest.param(
            "overlap shared+rollout",
            "rollout/0 SIGKILL",
            [r"worker rollout/0 \(process \d+ on .*\) died: killed"],
            marks=pytest.mark.faults,
        ),
        pytest.param(
            "shared+rollout",
            "all/1 corrupts",
            [r"worker rollout/0 .* failed: WeightError: weight '(.*)', rows 24 to \d+, is not the student's: SHA-256"],
            marks=pytest.mark.faults,
        ),
    ],
)
def test_a_worker_that_fails_or_stalls_is_named_and_none_is_left(
    ray_started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, trouble: str, words: list[str]
):
    """PITFALLS, hangs."""
    from fewstep.engines.ray import group

    monkeypatch.setattr(group, "PULSE_S", 0.5)
    monkeypatch.setattr(group, "SILENT_S", 2.0 if "SIGSTOP" in trouble else 30.0)
    section = SECTIONS[layout].model_copy(update={"timeout_s": 3.0})
    case = "dmd2_shared"
    groups = groups_of(section, CASES[case](), ITERATIONS, CPU)
    with Driver(section, CASES[case](), groups, begin(case, trouble=f"{trouble} {tmp_path}")) as driver:
        began, seats = time.monotonic(), driver.seats
        with pytest.raises(RankError) as caught:
            rows_of(driver)
    assert time.monotonic() - began < 30
    assert all(re.search(word, str(caught.value)) for word in words), str(caught.value)
    assert not any(group.lives(seat.place["pid"]) for seat in seats)


def test_the_suite_runs_each_method_on_ray_once_every_time():
    equal = [case for layout in ("shared", "split 2 + 1", "colocated") for case in ALWAYS[layout]]
    assert sorted(equal) == sorted(PLAIN)

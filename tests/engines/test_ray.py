"""Groups of workers on Ray equal one process: real workers, tiny networks in float64, Ray started once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.checkpoint.meta import Meta
from fewstep.checkpoint.save import CheckpointSection, load_checkpoint
from fewstep.engines.process import ProcessEngine
from fewstep.engines.ray.driver import Driver
from fewstep.engines.ray.placement import RaySection, groups_of
from fewstep.engines.ray.schedule import leading, steps
from fewstep.methods.api import Method
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
}
SPLIT = [name for name in CASES if name not in ("sft", "diffusion_forcing", "teacher_forcing", "ode_init")]
"""Methods with roles beside the student."""


@pytest.fixture(scope="module")
def ray_started() -> Iterator[None]:
    """Ray, for all drivers of this module; each has workers of its own, which serve one method after the other."""
    import ray

    from fewstep.engines.ray.cluster import start

    start(RaySection(), [{"CPU": 16.0}])
    yield
    ray.shutdown()


class Fleet:
    """Drivers by layout, started when they are first asked for."""

    def __init__(self, stack: ExitStack):
        self._stack, self._drivers = stack, dict[str, Driver]()

    def driver(self, layout: str, case: str) -> Driver:
        """The driver of a layout, its workers about to train the method."""
        section, method = SECTIONS[layout], CASES[case]()
        groups = groups_of(section, method, ITERATIONS, CPU)
        if layout not in self._drivers:
            self._drivers[layout] = self._stack.enter_context(Driver(section, method, groups, begin(case)))
        else:
            self._drivers[layout].begin(method, groups, begin(case))
        return self._drivers[layout]


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
        assert value == float(name != "moved/teacher"), name


def without_waits(row: dict[str, float]) -> dict[str, float]:
    assert all(value >= 0 for name, value in row.items() if name.endswith("/waiting_s"))
    return {name: value for name, value in row.items() if not name.endswith("/waiting_s")}


@pytest.mark.parametrize(
    ("layout", "case"),
    [("shared", case) for case in CASES] + [(layout, case) for layout in ("split 2 + 1", "colocated") for case in SPLIT],
)
def test_groups_of_workers_equal_one_process(fleet: Fleet, tmp_path: Path, layout: str, case: str):
    """Invariants 36, 43, 50 and 51: losses, and the weights, moments and average of every role."""
    driver, one = fleet.driver(layout, case), made(case)
    start = copied({"ema": one.ema.state()})["ema"]  # type: ignore[union-attr]
    for iteration in range(ITERATIONS):
        row = {name: float(value) for name, value in one.run(iteration).items()}
        assert without_waits(driver.run(iteration)) == pytest.approx(row, rel=1e-9, abs=1e-9)
    found = saved(driver, tmp_path)
    assert_close(found, copied(one.state()))
    moved = {name: value for group in driver.groups for name, value in driver._ask(group.name, "validate", 0)[0].items()}
    assert_trained(found, start, moved)

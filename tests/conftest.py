"""What every test gets: checked shapes, fixed seeds, one thread, no network, no cache of the user; ``gpu`` tests are
skipped where there is no CUDA device."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator

# Before torch is imported: one thread a worker (the workers share the cores), and no library asks the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline")

import jaxtyping

# Every annotated function of fewstep checks the shapes and types of what it takes and gives. The hook acts at import.
assert not any(name.split(".")[0] == "fewstep" for name in sys.modules), (
    "fewstep was imported before its shapes are checked"
)
jaxtyping.install_import_hook("fewstep", "beartype.beartype")

import hypothesis
import numpy as np
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("fewstep", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fewstep")


def pytest_configure(config: pytest.Config) -> None:
    """A home folder for the tests, so that no cache of the user is read or filled; the workers inherit it."""
    if not hasattr(config, "workerinput"):
        home = tempfile.TemporaryDirectory(prefix="fewstep-tests-", ignore_cleanup_errors=True)
        os.environ["HOME"] = home.name
        config.add_cleanup(home.cleanup)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes as their number: packed files hold the time, and all workers must give a test the same name."""
    return f"{argname}-{len(val)}-bytes" if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none, and minutes of faults where nobody asks for them."""
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("faults") and "faults" not in item.config.getoption("markexpr"):
            item.add_marker(pytest.mark.skip(reason="minutes of real faults: make faults"))
        if item.get_closest_marker("thorough") and "thorough" not in item.config.getoption("markexpr"):
            item.add_marker(pytest.mark.skip(reason="minutes: make test TESTS='-m thorough tests'"))


@pytest.fixture(autouse=True)
def _same_start_for_every_test():
    """Global generators restart for every test; the default dtype is given back, whatever the test did to it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def unchecked_shapes():
    """The shape checks of the import hook step aside: no compiler can trace through them, and they are most of the time
    that a small network takes."""
    yield from _without_checks()


@pytest.fixture(scope="module", autouse=True)
def _whole_runs(request: pytest.FixtureRequest):
    """They step aside for a module that says ``WHOLE_RUNS = True``, whose tests run commands from end to end."""
    yield from _without_checks() if getattr(request.module, "WHOLE_RUNS", False) else iter([None])


def _without_checks() -> Iterator[None]:
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

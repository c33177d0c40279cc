"""Fixtures of the rollout tests."""

from __future__ import annotations

import jaxtyping
import pytest


@pytest.fixture
def unchecked_shapes():
    """The shape checks of the import hook step aside: they are most of the time that a clip takes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def checked_shapes(unchecked_shapes: None):
    """The shape checks all the same, in a module that goes without them."""
    jaxtyping.config.update("jaxtyping_disable", False)

"""Fixtures of the model tests."""

from __future__ import annotations

import jaxtyping
import pytest


@pytest.fixture
def unchecked_shapes():
    """The shape checks of the import hook step aside: no compiler can trace through them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

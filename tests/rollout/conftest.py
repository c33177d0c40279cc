"""Fixtures of the rollout tests."""

from __future__ import annotations

import jaxtyping
import pytest


@pytest.fixture
def checked_shapes(unchecked_shapes: None):
    """The shape checks all the same, in a module that goes without them."""
    jaxtyping.config.update("jaxtyping_disable", False)

"""Settings under which diffusers' ``FlowMatchEulerDiscreteScheduler`` runs trained noise levels by itself.

For ``num_inference_steps = K`` that scheduler takes K equal steps of u from 1 to its own smallest noise level, shifts
them, and stretches the result so that it ends at ``shift_terminal``. With p = 1 - sigma the i-th noise level obeys

    i / p_i  =  (shift / step - (shift - 1) i) / stretch,      step = (1 - smallest) / (K - 1),

a straight line in i, and so does every shifted ladder. Hence one shift and one end give the whole ladder; the shift is
the root of a quadratic equation, and not the one of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

NUM_TRAIN_TIMESTEPS = 1000
_TOLERANCE = 1e-6


def scheduler_config(sigmas: Sequence[float], solver: str) -> tuple[dict[str, Any], bool]:
    """The scheduler's ``scheduler_config.json``, and whether ``set_timesteps(len(sigmas))`` then gives ``sigmas``.

    Where it does not, the settings leave ``set_timesteps(sigmas=...)`` as it is given. ``renoise`` is the scheduler's
    stochastic sampling, ``ode`` its Euler steps.
    """
    settings = _settings(sigmas)
    shift, terminal = settings or (1.0, None)
    config = {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": NUM_TRAIN_TIMESTEPS,
        "shift": shift,
        "shift_terminal": terminal,
        "stochastic_sampling": solver == "renoise",
    }
    return config, settings is not None


def _settings(sigmas: Sequence[float]) -> tuple[float, float | None] | None:
    """Shift and end of the scheduler's grid that are ``sigmas`` to 1e-6, or None if there are none."""
    if len(sigmas) == 1:
        return 1.0, None
    for shift in _shifts(sigmas):
        if np.abs(_grid(len(sigmas), shift, sigmas[-1]) - np.array(sigmas)).max() < _TOLERANCE:
            return shift, sigmas[-1]
    return None


def _shifts(sigmas: Sequence[float]) -> list[float]:
    """The shifts whose grid goes through the first three noise levels, those nearest to 1 first."""
    if len(sigmas) == 2:
        return [1.0]
    steps, smallest = len(sigmas) - 1, 1 / NUM_TRAIN_TIMESTEPS
    first, second = (i / (1 - sigmas[i]) for i in (1, 2))
    slope, start = second - first, 2 * first - second
    odds = (1 - smallest) / smallest
    roots = np.roots([steps * slope, odds * (steps * slope + start), -odds * start])
    real = [float(root.real) for root in roots if abs(root.imag) < _TOLERANCE and root.real > 0]
    return [1.0, *sorted(real, key=lambda shift: abs(math.log(shift)))]


def _grid(num: int, shift: float, end: float) -> np.ndarray:
    """The scheduler's noise levels; it computes the two ends of its grid in float32, and so does this."""

    def shifted(u: np.ndarray) -> np.ndarray:
        return shift * u / (1 + (shift - 1) * u)

    first, last = shifted(np.array([1, 1 / NUM_TRAIN_TIMESTEPS], np.float32)).tolist()
    rest = 1 - shifted(np.linspace(first, last, num))
    return 1 - rest * (1 - end) / rest[-1]

"""A teacher's trajectories from noise to data, and the states in them that a few-step student starts from.

CausVid (arXiv:2412.07772) trains on those of a bidirectional teacher. Causal Forcing takes an autoregressive teacher:
the ODE of every block runs against the history of ground-truth blocks, so all blocks of a clip advance together, and
their history is filled once instead of being carried along at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from fewstep.errors import UserError
from fewstep.flow import solvers
from fewstep.flow.guidance import guide
from fewstep.flow.sigmas import grid
from fewstep.models.api import FlowModel
from fewstep.models.guided import guided_velocity
from fewstep.records import Batch, Trajectory, concat
from fewstep.rng import Draw
from fewstep.shapes import Latents, Sigma

Velocity = Callable[[Latents, Sigma], Latents]


@dataclass(frozen=True)
class TeacherODE:
    """Euler steps of a guided teacher along a grid of ``nodes`` noise levels at ``shift``, the last one to 0.

    keep: the noise levels whose states are kept, descending: the student's ladder. guidance_scale: 1 is off.
    Raises UserError unless the grid contains all of ``keep``, exactly.
    """

    nodes: int
    shift: float
    keep: tuple[float, ...]
    guidance_scale: float = 1.0

    def __post_init__(self) -> None:
        missing = sorted(set(self.keep) - set(self.sigmas), reverse=True)
        if missing:
            raise UserError(
                f"the teacher's grid of {self.nodes} nodes at shift {self.shift:g} (method.nodes, method.shift) lacks "
                f"{_listed(missing)} of the student's ladder {_listed(self.keep)} (sampling); {self._advice()}"
            )

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The noise levels at which the teacher is run, descending from 1."""
        return grid(self.nodes, self.shift)

    @torch.no_grad()
    def __call__(self, teacher: FlowModel, batch: Batch, draw: Draw) -> Trajectory:
        """The trajectories that start from the noise of the draw's keys, one for every row of ``batch``.

        A causal teacher denoises each block of frames against the blocks before it in ``batch.x0``; of any other, the
        ground truth tells the shape alone. Raises ValueError where guidance has no unconditional input.
        """
        assert batch.x0 is not None
        velocity = self._against_history(teacher, batch) if _is_causal(teacher) else self._of_whole(teacher, batch)
        x_t = draw.normal("noise", tuple(batch.x0.shape[1:]), dtype=batch.x0.dtype)
        states = []
        for sigma, following in pairwise((*self.sigmas, 0.0)):
            if sigma in self.keep:
                states.append(x_t)
            level, next_level = (_level(value, x_t) for value in (sigma, following))
            x_t = solvers.ode(x_t, velocity(x_t, level), level, next_level)
        return Trajectory(draw.key, torch.stack(states, 1), x_t)

    def _of_whole(self, teacher: FlowModel, batch: Batch) -> Velocity:
        return partial(guided_velocity, teacher, cond=batch.cond, uncond=batch.uncond, scale=self.guidance_scale)

    def _against_history(self, teacher: Any, batch: Batch) -> Velocity:
        """All blocks at once, each against the clean blocks before it; with and without the condition in one call."""
        scale, cond, clean = self.guidance_scale, batch.cond, batch.x0
        assert clean is not None
        if scale != 1.0:
            if batch.uncond is None:
                raise ValueError(f"guidance_scale {scale} needs the unconditional input, and the batch has none")
            cond, clean = concat([cond, batch.uncond]), torch.cat([clean, clean])
        told = teacher.tell(cond)
        history = teacher.prefill(clean, told)

        def velocity(x_t: Latents, sigma: Sigma) -> Latents:
            if scale == 1.0:
                return teacher.velocity_given(x_t, sigma, told, history, 0)
            both = teacher.velocity_given(torch.cat([x_t, x_t]), torch.cat([sigma, sigma]), told, history, 0)
            with_cond, without_cond = both.chunk(2)
            return guide(with_cond, without_cond, scale)

        return velocity

    def _advice(self) -> str:
        steps = len(self.keep)
        nodes = steps * max(1, round(self.nodes / steps))
        if set(self.keep) <= set(grid(nodes, self.shift)):
            return f"write method.nodes: {nodes}, or any other multiple of {steps}"
        return (
            f"write the shift of sampling as method.shift and a multiple of {steps} as method.nodes, or "
            "sampling.sigmas that are nodes of the grid to the last digit"
        )


def _is_causal(teacher: FlowModel) -> bool:
    return getattr(teacher, "causal", None) is not None


def _level(sigma: float, x_t: Latents) -> Sigma:
    return torch.full(x_t.shape[:2], sigma, dtype=torch.promote_types(x_t.dtype, torch.float32), device=x_t.device)


def _listed(sigmas: tuple[float, ...] | list[float]) -> str:
    return ", ".join(f"{sigma:.6g}" for sigma in sigmas)

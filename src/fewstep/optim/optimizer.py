"""The optimizer of one role: clipping, its own schedule, and the skip of updates that are not finite.

Nothing here waits for the device: learning rate, counters and the decision to skip live there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fewstep.optim.clip import clip_, total_norm
from fewstep.optim.schedule import ScheduleSection, factor
from fewstep.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Section):
    """AdamW of one role."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(gt=0)
    """Full learning rate; the schedule scales it."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of the first and the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    clip: float = Field(default=10.0, gt=0)
    """Largest norm of the role's gradient."""


class RoleOptimizer:
    """AdamW over the named parameters of one role.

    updates, skipped: 0-dim int64 counters on the device. A skipped update changes neither weights nor moments nor the
    progress of the learning rate.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], section: OptimizerSection, schedule: ScheduleSection, total: int
    ):
        self.parameters, self.section, self.schedule, self.total = dict(parameters), section, schedule, total
        some = next(iter(self.parameters.values()))
        self.updates = torch.zeros((), dtype=torch.int64, device=some.device)
        self.skipped = torch.zeros_like(self.updates)
        wide = some.dtype == torch.float64 and some.device.type == "cpu"  # the kernel of CUDA reads float32 alone
        self._lr = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=some.device)
        self._adamw = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=self._lr,
            betas=section.betas,
            eps=section.eps,
            weight_decay=section.weight_decay,
            fused=True,
        )

    def norm(self) -> Tensor:
        """The norm of the gradients that the role holds; 0 where it holds none."""
        gradients = self._gradients()
        return total_norm(gradients) if gradients else torch.zeros((), device=self._lr.device)

    def step(self, norm: Tensor, finite: Tensor) -> dict[str, Tensor]:
        """One update where ``finite`` (0-dim bool) holds, else none; the gradients are gone afterwards.

        Returns the norm before clipping, the learning rate used, and the counters, all still on the device.
        """
        gradients = self._gradients()
        self._lr.copy_(self.section.lr * factor(self.schedule, self.updates, self.total))
        if gradients:
            clip_(gradients, norm, self.section.clip)
            self._adamw.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
            self._adamw.grad_scale = None  # type: ignore[attr-defined]
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.updates += finite
        self.skipped += ~finite
        return {
            "grad_norm": norm,
            "lr": self._lr.clone(),
            "updates": self.updates.clone(),
            "skipped": self.skipped.clone(),
        }

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by parameter name."""
        tensors = {"updates": self.updates, "skipped": self.skipped}
        for name, parameter in self.parameters.items():
            for key, value in self._adamw.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`state`. Raises KeyError if a name is not one of this role's parameters."""
        self.updates.copy_(tensors["updates"])
        self.skipped.copy_(tensors["skipped"])
        self._adamw.state.clear()
        for name, value in tensors.items():
            if name not in ("updates", "skipped"):
                key, _, parameter = name.partition("/")
                home = self.parameters[parameter]
                self._adamw.state[home][key] = value.to(home.device, copy=True)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters.values() if p.grad is not None]

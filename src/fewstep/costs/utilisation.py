"""How fast a run could be at the peak of its devices: what the MFU of a run is measured by."""

from __future__ import annotations

import warnings

import torch

from fewstep.costs.estimate import Planner
from fewstep.costs.sizes import sizes_of_plan
from fewstep.devices import kind_titled
from fewstep.plan import Plan


def full_speed(plan: Plan) -> float | None:
    """Samples per second at which all ranks do nothing but the model's operations, at their peak in bfloat16.

    None on a CPU, on a GPU whose peak is not known, and in another precision. A method from outside that cannot be
    counted is told of in a warning.
    """
    if plan.device.type != "cuda" or plan.precision != torch.bfloat16:
        return None
    kind = kind_titled(torch.cuda.get_device_name(plan.device))
    if kind is None:
        return None
    try:
        flops = Planner(sizes_of_plan(plan), kind).model_flops
    except Exception as error:
        warnings.warn(f"the MFU is not known, since the method cannot be counted: {error}", stacklevel=2)
        return None
    return plan.recipe.data.batch * kind.bf16_flops_per_s * num_devices(plan) / flops


def num_devices(plan: Plan) -> int:
    """Devices that the run has to itself."""
    sizes = [group.size for group in plan.groups] or [plan.ranks.world]
    engine = plan.recipe.engine
    return max(sizes) if getattr(engine, "layout", None) == "colocated" else sum(sizes)

"""Roles whose weights are cut over the ranks by FSDP2: each rank keeps a part of every weight, and gathers a block of
the network only while it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from fewstep.checkpoint.tensor_file import Later
from fewstep.engines.mesh import Mesh
from fewstep.engines.offload import Sleeper
from fewstep.engines.roles import Part, Role, span
from fewstep.models.wan.model import Wan
from fewstep.models.wan.parallelize import divide_tokens, shard_blocks


class ShardedRole(Role):
    """A role of which this rank holds a part.

    Optimizer, clipping and EMA work on :meth:`parameters`, plain tensors that are this rank's parts themselves, and
    need not know of ranks. After every call of the network all weights are parts again, but inside :meth:`gathered`.
    """

    def __init__(self, name: str, network: nn.Module, precision: torch.dtype, mesh: Mesh):
        """network: cut by :func:`shard`, and no longer on the meta device."""
        super().__init__(name, network, precision)
        self.mesh = mesh
        self._sharded: dict[str, Any] = dict(network.named_parameters())
        self._parts = {
            name: nn.Parameter(whole.detach().to_local(), requires_grad=whole.requires_grad)
            for name, whole in self._sharded.items()
        }
        self.weights = Sleeper(self._parts.values)

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's part of every trainable parameter, by name."""
        return {name: part for name, part in self._parts.items() if part.requires_grad}

    def parts(self) -> dict[str, Part]:
        axis = self.mesh.axes["shard"]
        place = axis.size(), axis.get_local_rank()
        shapes = {name: tuple(whole.shape) for name, whole in self._sharded.items()}
        return {
            name: Part(part.detach(), span(shapes[name][0], *place)[0], shapes[name])
            for name, part in self._parts.items()
        }

    def take_gradients(self) -> None:
        """Gives every part its gradient, which FSDP2 has averaged over the ranks."""
        for name, whole in self._sharded.items():
            if whole.grad is not None:
                self._parts[name].grad, whole.grad = whole.grad.to_local(), None

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Sets every weight from its whole value on any device, one after the other.

        Raises RuntimeError if a weight is missing, unknown, or of another shape.
        """
        missing = set(self._parts)
        for name, value in values:
            if name not in missing or value.shape != self._sharded[name].shape:
                raise RuntimeError(f"'{name}' of shape {list(value.shape)} does not fit the network of {self.name}")
            self._parts[name].copy_(self._part(value))
            missing.remove(name)
        if missing:
            raise RuntimeError(f"{self.name}: no values for {', '.join(sorted(missing)[:5])}")

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, what a call without gradient gathers stays whole for the calls that follow; weights must not change.
        Afterwards all are parts again."""
        cut = [module for module in self.network.modules() if isinstance(module, FSDPModule)]
        try:
            for module in cut:
                module.set_reshard_after_forward(False, recurse=False)
            yield
        finally:
            for module in cut:
                module.set_reshard_after_forward(True, recurse=False)
                module.reshard()

    def state(self) -> dict[str, Any]:
        return self.whole({name: self.weights.value(part) for name, part in self._parts.items()})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.fill(tensors.items())

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Tensors that belong to parameters, gathered one by one when they are asked for."""
        return {
            name: tensor if self._owner(name, tensor) is None else self._later(self._owner(name, tensor), tensor)
            for name, tensor in tensors.items()
        }

    def cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of tensors that belong to parameters."""
        return {
            name: tensor if self._owner(name, tensor) is None else self._part(tensor)
            for name, tensor in tensors.items()
        }

    def _owner(self, name: str, tensor: Tensor) -> Any:
        """The parameter that a tensor, such as ``exp_avg/blocks.0.modulation``, is as large as; None: no parameter."""
        return self._sharded.get(name.rpartition("/")[2]) if tensor.ndim else None

    def _part(self, whole: Tensor) -> Tensor:
        axis = self.mesh.axes["shard"]
        parts, mine = whole.chunk(axis.size()), axis.get_local_rank()
        return parts[mine] if mine < len(parts) else whole[:0]

    def _later(self, owner: Any, part: Tensor) -> Later:
        return Later(tuple(owner.shape), part.dtype, partial(joined, owner, part))


def joined(owner: Any, part: Tensor) -> Tensor:
    """The whole of which every rank hands in its part, cut like ``owner``."""
    whole = DTensor.from_local(
        part.detach().to(owner.device),
        owner.device_mesh,
        owner.placements,
        run_check=False,
        shape=owner.shape,
        stride=owner.stride(),
    )
    return whole.full_tensor()


def shard(network: nn.Module, mesh: Mesh) -> None:
    """Cuts every weight of the network over the ranks, in place, and the tokens that it works on where ranks share
    them; on the meta device nothing is allocated."""
    if isinstance(network, Wan):
        if mesh.division:
            divide_tokens(network, mesh.division)
        shard_blocks(network, mesh.axes)
    else:
        fully_shard(network, mesh=mesh.axes, reshard_after_forward=True)

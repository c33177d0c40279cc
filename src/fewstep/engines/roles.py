"""Roles: the views on networks that a method's phases are handed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from fewstep.engines.offload import Sleeper
from fewstep.models.api import Geometry
from fewstep.models.blocks import CausalSection
from fewstep.models.families import ModelSection
from fewstep.models.kv_cache import KVCache
from fewstep.optim.ema import EMA
from fewstep.optim.optimizer import OptimizerSection
from fewstep.optim.schedule import ScheduleSection
from fewstep.section import Section
from fewstep.shapes import Latents, Sigma, Tokens


class FrozenSection(Section):
    """A role that is never trained."""

    init: str
    """A run, a checkpoint, an export or a diffusers folder."""
    weights: Literal["ema", "raw"] = "ema"
    """Which weights of the run named in ``init``: the average, or the trained weights themselves."""


class StudentSection(Section):
    """The network that is trained to be used."""

    init: str = "teacher"
    """``teacher``, ``random`` (with ``model``), or a run, a checkpoint, an export or a diffusers folder."""
    weights: Literal["ema", "raw"] | None = None
    """Which weights of the run named in ``init``; the average (``ema``) when left out."""
    model: ModelSection | None = None
    """The network, where ``init`` is ``random``; else it is that of ``init``."""
    causal: CausalSection | None = None
    """What makes the network causal, on the weights of ``init`` and in place of what that says; left out, the network
    sees as that of ``init`` does."""
    optimizer: OptimizerSection
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)


class CriticSection(Section):
    """The network that learns the score of what the student makes."""

    init: str = "teacher"
    """``teacher``, ``student``, ``random`` (with ``model``), or a run, a checkpoint, an export, a diffusers folder."""
    weights: Literal["ema", "raw"] | None = None
    """Which weights of the run named in ``init``; the average (``ema``) when left out."""
    model: ModelSection | None = None
    """The network, where ``init`` is ``random``."""
    optimizer: OptimizerSection | None = None
    """The student's when left out."""
    schedule: ScheduleSection | None = None
    """The student's when left out."""


class DiscriminatorRoleSection(Section):
    """The head of the adversarial term."""

    optimizer: OptimizerSection | None = None
    """The critic's when left out."""
    schedule: ScheduleSection | None = None
    """The critic's when left out."""


class Part(NamedTuple):
    """What a process holds of a weight of this ``shape``: ``rows`` along its first axis, from row ``first`` on."""

    rows: Tensor
    first: int
    shape: tuple[int, ...]

    @property
    def num_whole(self) -> int:
        """Rows of the whole weight; a number alone is one row."""
        return self.shape[0] if self.shape else 1


class Role:
    """A network as a phase sees it: the model contract, computed in the engine's precision.

    Float32 masters compute in bfloat16 under autocast, frozen weights are bfloat16 themselves; both give float32 back.

    weights: all of them, which may sleep, and wake when the role is called.
    """

    def __init__(self, name: str, network: nn.Module, precision: torch.dtype):
        self.name, self.network, self.precision = name, network, precision
        self.weights = Sleeper(lambda: (*network.parameters(), *network.buffers()))

    @property
    def geometry(self) -> Geometry:
        return self.network.geometry  # type: ignore[return-value]

    @property
    def num_layers(self) -> int:
        return self.network.num_layers  # type: ignore[return-value]

    @property
    def width(self) -> int:
        return self.network.width  # type: ignore[return-value]

    @property
    def causal(self) -> CausalSection | None:
        """How the network cuts clips into blocks; None for one that sees the whole clip."""
        return getattr(self.network, "causal", None)

    def velocity(self, x_t: Latents, sigma: Sigma, cond: Any, **forced: Any) -> Latents:
        with self._computing():
            return self.network.velocity(x_t, sigma, cond, **forced)  # type: ignore[operator]

    def features(self, x_t: Latents, sigma: Sigma, cond: Any, layers: tuple[int, ...]) -> tuple[Tokens, ...]:
        with self._computing():
            return self.network.features(x_t, sigma, cond, layers)  # type: ignore[operator]

    def tell(self, cond: Any) -> Any:
        with self._computing():
            return self.network.tell(cond)  # type: ignore[operator]

    def prefill(self, x0: Latents, cond: Any, sigma: Sigma | None = None, history: KVCache | None = None) -> KVCache:
        with self._computing():
            return self.network.prefill(x0, cond, sigma, history)  # type: ignore[operator]

    def velocity_given(
        self, x_t: Latents, sigma: Sigma, cond: Any, history: KVCache | None, first_block: int, **how: Any
    ) -> Latents:
        with self._computing():
            return self.network.velocity_given(x_t, sigma, cond, history, first_block, **how)  # type: ignore[operator]

    def append(self, history: KVCache | None, x0: Latents, cond: Any, sigma: Sigma | None = None) -> KVCache:
        with self._computing():
            return self.network.append(history, x0, cond, sigma)  # type: ignore[operator]

    def __call__(self, features: tuple[Tokens, ...]) -> Tensor:
        """What a discriminator says of features."""
        self.weights.wake()
        return self.network(features)

    def gathered(self) -> AbstractContextManager[None]:
        """Around many calls without gradient, between which no weight changes: what ranks have parts of is gathered
        once for all of them."""
        return nullcontext()

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trainable parameters by name."""
        return {name: p for name, p in self.network.named_parameters() if p.requires_grad}

    def parts(self) -> dict[str, Part]:
        """What this process holds of every weight, trainable or not; the rows are the weight's own memory."""
        return {
            name: Part(torch.atleast_1d(weight.detach()), 0, tuple(weight.shape))
            for name, weight in self.network.named_parameters()
        }

    def take_gradients(self) -> None:
        """After the last backward pass before an update; gradients already stand on the parameters."""

    def state(self) -> dict[str, Any]:
        """All weights by name, as a checkpoint holds them; those of a role that is asleep are in host memory."""
        return {name: self.weights.value(tensor) for name, tensor in self.network.state_dict().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`state`. Raises RuntimeError where a name or a shape does not fit."""
        self.network.load_state_dict(tensors)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Tensors that belong to :meth:`parameters` and end in their names, as a checkpoint holds them."""
        return dict(tensors)

    def cut(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inverse of :meth:`whole`."""
        return tensors

    def _computing(self) -> AbstractContextManager[Any]:
        self.weights.wake()
        if self.precision != torch.bfloat16:
            return nullcontext()
        return torch.autocast(next(self.network.parameters()).device.type, dtype=torch.bfloat16)


class AveragedRole(Role):
    """The student under its averaged weights: no second network, and no gradient."""

    def __init__(self, student: Role, ema: EMA):
        super().__init__("ema", student.network, student.precision)
        self._ema, self.weights = ema, student.weights

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self.weights.wake()
        with torch.no_grad(), self._ema.swapped(), super()._computing():
            yield


def freeze(network: nn.Module, device: torch.device, precision: torch.dtype) -> nn.Module:
    """The network as a frozen role: its weights in the precision it computes in, none of them trainable, for ever."""
    return network.requires_grad_(False).to(device, precision).eval()


def span(num: int, parts: int, index: int) -> tuple[int, int]:
    """First row and end of what one of ``parts`` processes holds of ``num`` rows, as FSDP2 cuts them: all parts but the
    last ones are of one size, and these may be empty."""
    size = -(-num // parts)
    return min(index * size, num), min((index + 1) * size, num)

"""Engines that run real tiny Wan networks on real batches, for tests that look at what an engine does with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fewstep.data.api import Items
from fewstep.data.batches import BatchSource
from fewstep.data.order import BatchOrder
from fewstep.engines.mesh import Mesh
from fewstep.engines.process import ProcessEngine
from fewstep.engines.roles import AveragedRole, Role, freeze
from fewstep.engines.shards import ShardedRole, shard
from fewstep.methods.api import Method
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.gan import GANSection
from fewstep.methods.ode_init import OdeInit
from fewstep.methods.sft import SFT, SFTSection
from fewstep.models.blocks import CausalSection
from fewstep.models.codec import IdentityCodec, IdentitySection
from fewstep.models.discriminator import Discriminator
from fewstep.models.families import build
from fewstep.models.wan.model import Wan
from fewstep.optim.ema import EMA, EMASection
from fewstep.optim.optimizer import OptimizerSection, RoleOptimizer
from fewstep.optim.schedule import ScheduleSection
from fewstep.records import Batch, Trajectory
from fewstep.rng import Draw
from fewstep.rollout.few_step import FewStep
from fewstep.rollout.self_forcing import SelfForcing
from tests.models.tiny import LABELS, randomise, tiny_section

SHAPE = (1, 4, 6, 8)
NUMEL = 4 * 6 * 8
BATCH = 5
LADDER = (1.0, 0.9, 0.6)
STREAMING = CausalSection(block_frames=1, window=3, sink=1)
"""How a student sees whose rollouts go on."""
CPU = torch.device("cpu")


class Tiles:
    """13 small images of 4 channels in 5 classes; or clips of them."""

    classes = ("a", "b", "c", "d", "e")

    def __init__(self, num_frames: int = 1) -> None:
        self.shape = (num_frames, *SHAPE[1:])
        generator = torch.Generator().manual_seed(5)
        self.pixels = torch.randint(0, 256, (13, *self.shape), generator=generator, dtype=torch.uint8)
        self.labels = torch.arange(13) % 5

    def __len__(self) -> int:
        return 13

    def items(self, ids: Sequence[int] | Tensor) -> Items:
        index = torch.as_tensor(ids)
        return Items(self.pixels[index], self.labels[index])


class TracedBatches(BatchSource):
    """Batches with trajectories whose values are drawn at random, by item."""

    def batch(self, iteration: int, slot: int = 0) -> Batch:
        found, ids = super().batch(iteration, slot), self.order.ids(iteration, slot)
        assert found.x0 is not None
        shape = (len(LADDER) + 1, *found.x0.shape[1:])
        path = Draw(0, "trajectories", 0, ids).normal("path", shape, dtype=found.x0.dtype)
        return replace(found, trajectory=Trajectory(ids, path[:, :-1], path[:, -1]))


def sft(**settings: Any) -> SFT:
    """Half of the rows lose their condition, so that both cases are met."""
    return SFT(SFTSection(**({"cond_dropout": 0.5} | settings)))


def dmd2(dtype: torch.dtype = torch.float32, **settings: Any) -> DMD2:
    """Two critic updates, a guided teacher, the adversarial term unless ``gan`` is None; every weight large enough to
    be seen."""
    gan = GANSection(student_weight=0.3, discriminator_weight=0.7, r1_weight=0.2)
    values: dict[str, Any] = {"critic_updates": 2, "guidance_scale": 3.0, "gan": gan} | settings
    return DMD2(DMD2Section(**values), FewStep(LADDER, "renoise", SHAPE, dtype=dtype))


def streams(
    kind: type[DMD2] = DMD2,
    dtype: torch.dtype = torch.float32,
    sigmas: tuple[float, ...] = LADDER,
    **settings: Any,
) -> DMD2:
    """Rollouts of three chunks of 3 frames, the first of which, in the later two, is the last of the one before."""
    rollout = SelfForcing(sigmas, "renoise", (3, *SHAPE[1:]), dtype=dtype, stream_chunks=3, overlap_frames=1)
    values: dict[str, Any] = {"critic_updates": 2, "guidance_scale": 3.0} | settings
    return kind(kind.Section(**values), rollout)


def network(seed: int, layers: int = 2, causal: CausalSection | None = None, heads: int = 3) -> Wan:
    """2 layers, 3 heads, 48 wide, classes with a null; nothing in it is zero."""
    made = build(tiny_section(LABELS, layers=layers, causal=causal, heads=heads))
    randomise(made, seed)
    return made


def networks(method: Method, *, same: Sequence[str] = (), heads: int = 3) -> dict[str, nn.Module]:
    """A network for every role of the method, each with weights of its own; those of ``same`` are alike."""
    found: dict[str, nn.Module] = {}
    causal = CausalSection(block_frames=1) if needs_clips(method) else None
    for seed, name in enumerate(name for name in method.roles if name != "ema"):
        sees = STREAMING if name == "student" and chunks_of(method) > 1 else causal
        found[name] = network(0 if name in same else seed, causal=sees, heads=heads)
        if name == "discriminator":
            reads = method.gan.section.layers or (0,)  # type: ignore[union-attr]
            found[name] = randomise(Discriminator(48, len(reads)), seed)
    return found


def needs_clips(method: Method) -> bool:
    return getattr(method, "needs_causal", False)


def chunks_of(method: Method) -> int:
    """Iterations for which the method's rollouts go on."""
    return getattr(getattr(method, "rollout_of", None), "stream_chunks", 1)


def engine(
    method: Method,
    *,
    dtype: torch.dtype = torch.float32,
    micro_batch: int | None = None,
    batch: int = BATCH,
    iterations: int = 6,
    made: dict[str, nn.Module] | None = None,
    optimizer: OptimizerSection | None = None,
    ema: EMASection | None = None,
    seed: int = 3,
    mesh: Mesh | None = None,
    device: torch.device = CPU,
    offload: bool = False,
    only: Sequence[str] | None = None,
    rolls: bool = False,
) -> ProcessEngine:
    """A new engine; every one of the same arguments is equal to the last bit. ``only``: of the roles. ``rolls``:
    whether it only makes samples, with a student of other weights until it is sent the right ones."""
    rank, world = mesh.ranks.rows(mesh.sequence) if mesh else (0, 1)
    optimizer = optimizer or OptimizerSection(lr=1e-3, betas=(0.5, 0.9), clip=1.0)
    schedule = ScheduleSection(name="cosine", warmup_updates=2, final=0.1)
    masters = torch.promote_types(dtype, torch.float32)
    roles: dict[str, Role] = {}
    drawn = made or networks(method)
    conditioner: Any = drawn["student"].conditioner
    for name, net in ((name, net) for name, net in drawn.items() if only is None or name in only):
        placed = net.to(device, masters) if name in method.trained else freeze(net, device, dtype)
        if rolls:
            placed = freeze(randomise(placed, 99), device, masters)
        if mesh:
            shard(placed, mesh)
        roles[name] = ShardedRole(name, placed, dtype, mesh) if mesh else Role(name, placed, dtype)
    optimizers = {
        name: RoleOptimizer(roles[name].parameters(), optimizer, schedule, updates)
        for name, updates in updates_of(method, iterations).items()
        if name in roles and not rolls
    }
    codec = IdentityCodec(IdentitySection(mean=(0.1, -0.2, 0.3, 0.0), std=(0.5, 0.6, 0.7, 0.8)))
    data = Tiles(3 if needs_clips(method) or chunks_of(method) > 1 else 1)
    source = (TracedBatches if isinstance(method, OdeInit) else BatchSource)(
        data,
        BatchOrder(seed, len(data), batch, method.num_batches, hold=chunks_of(method), rank=rank, world=world),
        lambda pixels: codec.encode(pixels).to(masters),
        lambda labels: (conditioner.condition(labels), conditioner.null(len(labels), labels.device)),
        device,
    )
    section = ema or EMASection(decay=0.8, start=1)
    average = EMA(roles["student"].parameters(), section) if "student" in roles and not rolls else None
    if average is not None and "ema" in method.roles:
        roles["ema"] = AveragedRole(roles["student"], average)
    return ProcessEngine(
        method, roles, optimizers, average, source, seed=seed, micro_batch=micro_batch, mesh=mesh, offload=offload
    )


def updates_of(method: Method, iterations: int) -> dict[str, int]:
    """How often each trained role is updated in all."""
    phases = [phase for iteration in range(iterations) for phase in method.phases(iteration)]
    return {name: sum(name in phase.trains for phase in phases) for name in method.trained}


def run(made: ProcessEngine, iterations: Sequence[int]) -> list[dict[str, Tensor]]:
    return [made.run(iteration) for iteration in iterations]


def copied(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {group: {name: tensor.detach().clone() for name, tensor in named.items()} for group, named in state.items()}


def assert_same_bits(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    """Every tensor of every group, NaN included."""
    assert found.keys() == expected.keys()
    for group, named in expected.items():
        assert found[group].keys() == named.keys(), group
        for name, tensor in named.items():
            assert found[group][name].dtype == tensor.dtype
            assert torch.equal(found[group][name].nan_to_num(7.5), tensor.nan_to_num(7.5)), f"{group}: {name}"

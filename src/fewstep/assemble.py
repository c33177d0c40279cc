"""From a plan to an engine: networks with their weights, optimizers, the average and the data, in their places."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fewstep.data.batches import BatchSource
from fewstep.data.order import BatchOrder
from fewstep.engines.mesh import Mesh
from fewstep.engines.process import ProcessEngine
from fewstep.engines.roles import AveragedRole, Role, freeze
from fewstep.methods.ode_init import OdeInit
from fewstep.models.wan.parallelize import compile_blocks, compile_whole
from fewstep.optim.ema import EMA
from fewstep.optim.optimizer import RoleOptimizer
from fewstep.plan import Plan
from fewstep.rng import generator
from fewstep.trajectories import trajectory_batches

COMPILERS = {"blocks": compile_blocks, "graphs": compile_whole}
Weights = dict[tuple[Any, str], dict[str, Tensor]]


def assemble(
    plan: Plan, mesh: Mesh | None = None, only: Collection[str] | None = None, rolls: bool = False
) -> ProcessEngine:
    """The engine of the plan, on its device; with ``mesh`` every role is cut over the ranks, and each of them reads its
    own parts of the weights: no rank ever holds more of a network than its part and one whole tensor. ``only``: the
    roles that the engine is to have; all of the method's, if left out. ``rolls``: whether it only makes the student's
    samples, on weights that come from elsewhere before the first of them."""
    recipe, totals = plan.recipe, plan.total_updates()
    weights: Weights = {}
    offline = getattr(plan.method, "offline", ())  # roles that no iteration needs
    wanted = [name for name in only or plan.method.roles if name not in offline]
    networks = plan.networks("meta" if mesh else "cpu", wanted)
    roles: dict[str, Role] = {}
    optimizers: dict[str, RoleOptimizer] = {}
    ema: EMA | None = None
    for name in networks:
        role, network = plan.roles[name], networks[name]
        if rolls:
            roles[name] = copy(plan, name, network, mesh)
            continue
        roles[name] = cut(plan, name, network, weights, mesh) if mesh else whole(plan, name, network, weights)
        if role.optimizer:
            assert role.schedule is not None
            optimizers[name] = RoleOptimizer(roles[name].parameters(), role.optimizer, role.schedule, totals[name])
        if name == "student":
            ema = EMA(roles[name].parameters(), recipe.ema)
        if recipe.engine.offload:
            roles[name].weights.sleep()
    if ema is not None and "ema" in plan.method.roles:
        roles["ema"] = AveragedRole(roles["student"], ema)
    return ProcessEngine(
        plan.method,
        roles,
        optimizers,
        ema,
        batch_source(plan, next(role for name, role in roles.items() if name != "discriminator")),
        seed=recipe.seed,
        micro_batch=recipe.engine.micro_batch,
        mesh=mesh,
        offload=recipe.engine.offload,
        gather_once=recipe.engine.gather_once,
    )


def whole(plan: Plan, name: str, network: Any, weights: Weights) -> Role:
    """The role of a network whose storage is on the CPU, all of it in this process."""
    role, masters = plan.roles[name], torch.promote_types(plan.precision, torch.float32)
    if role.source is None:
        network.initialise(generator(plan.recipe.seed, role.drawn_for))
    else:
        network.to(masters).load_state_dict(dict(values_of(plan, name, network, weights)))  # nothing is rounded
    network = network.to(plan.device, masters) if role.optimizer else freeze(network, plan.device, plan.precision)
    settle(plan, name, network)
    return Role(name, network, plan.precision)


def cut(plan: Plan, name: str, network: Any, weights: Weights, mesh: Mesh) -> Role:
    """The role of a network without storage, of which this rank gets its part: the weights of one process."""
    from fewstep.engines.shards import ShardedRole, shard

    role, masters = plan.roles[name], torch.promote_types(plan.precision, torch.float32)
    network = network.to(masters) if role.optimizer else freeze(network, torch.device("meta"), plan.precision)
    settle(plan, name, network)
    shard(network, mesh)
    made = ShardedRole(name, network.to_empty(device=plan.device), plan.precision, mesh)
    made.fill(values_of(plan, name, network, weights))
    return made


def copy(plan: Plan, name: str, network: Any, mesh: Mesh | None) -> Role:
    """A role for computing alone, without weights yet, in whose precision a trained one computes: that of the masters,
    which autocast rounds. With ``mesh`` the network is without storage."""
    masters = torch.promote_types(plan.precision, torch.float32)
    network = freeze(network, torch.device("meta") if mesh else plan.device, masters)
    settle(plan, name, network)
    if mesh is None:
        return Role(name, network, plan.precision)
    from fewstep.engines.shards import ShardedRole, shard

    shard(network, mesh)
    return ShardedRole(name, network.to_empty(device=plan.device), plan.precision, mesh)


def values_of(plan: Plan, name: str, network: Any, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """The first weights of a role, whole: drawn one by one, or mapped from their file."""
    role = plan.roles[name]
    if role.source is None:
        yield from network.drawn(generator(plan.recipe.seed, role.drawn_for))
        return
    origin = (role.source.path, role.weights)
    if origin not in weights:
        weights[origin] = role.source.weights(role.weights)
    yield from weights[origin].items()


def settle(plan: Plan, name: str, network: nn.Module) -> None:
    """Recomputation and compilation, as the recipe has them."""
    if name == "discriminator":
        return
    network.recompute = plan.recipe.engine.recompute  # type: ignore[assignment]
    if plan.recipe.engine.compile:
        COMPILERS[plan.recipe.engine.compile](network)  # type: ignore[arg-type]


def batch_source(plan: Plan, role: Role) -> BatchSource:
    """This process's rows of the batches of the run, in the precision of the masters. ``role``: any that is told of a
    sample what the student is told, as all of them are."""
    conditioner = plan.conditioner(role.network)
    dtype, recipe, (rank, world) = plan.sampler.dtype, plan.recipe, plan.rows

    def condition(told: Tensor) -> tuple[Any, Any]:
        return conditioner.condition(told), conditioner.null(len(told), told.device)

    def encode(items: Tensor) -> Tensor:
        return plan.codec.encode(items).to(dtype)

    if isinstance(plan.method, OdeInit):
        return trajectory_batches(plan, encode, condition)
    order = BatchOrder(
        recipe.seed,
        len(plan.dataset),
        recipe.data.batch,
        plan.method.num_batches,
        hold=recipe.sampling.stream_chunks,
        rank=rank,
        world=world,
    )
    return BatchSource(plan.dataset, order, encode, condition, plan.device)

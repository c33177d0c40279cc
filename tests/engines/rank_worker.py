"""What each rank of ``test_ranks.py`` and ``test_sequence.py`` runs:
``python -m tests.engines.rank_worker DEVICE FOLDER JOB ...``, started as torchrun starts it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fewstep.checkpoint.save import CheckpointSection, load_checkpoint, save_checkpoint, take_part
from fewstep.engines.mesh import Mesh, Ranks, join
from fewstep.engines.process import ProcessEngine
from fewstep.engines.roles import Role
from fewstep.engines.shards import ShardedRole, shard
from fewstep.methods.api import Method
from fewstep.methods.consistency import Consistency, ConsistencySection
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.methods.gan import GANSection
from fewstep.methods.sid import SiD, SiDSection
from fewstep.methods.teacher_forcing import TeacherForcing, TeacherForcingSection
from fewstep.models.attention import MASKED_KERNEL
from fewstep.models.blocks import CausalSection
from fewstep.models.wan.conditioner import LabelCond
from fewstep.models.wan.parallelize import compile_blocks, divide_tokens
from fewstep.rollout.few_step import FewStep
from fewstep.rollout.self_forcing import SelfForcing
from tests.engines.worlds import LADDER, SHAPE, dmd2, engine, network, networks, sft, streams

DOUBLE, CPU = torch.float64, torch.device("cpu")
ITERATIONS, BATCH, CLIP = 3, 4, (3, *SHAPE[1:])
TIMEOUT_S = 20.0
KEEP = CheckpointSection(every=1, keep_last=9)


def self_forcing() -> Method:
    """Student, teacher and critic see blocks of one frame."""
    made: Any = DMD2(
        DMD2Section(critic_updates=2, guidance_scale=3.0), SelfForcing(LADDER, "renoise", CLIP, dtype=DOUBLE)
    )
    made.needs_causal = True
    return made


METHODS: dict[str, Callable[[], Method]] = {
    "sft": sft,
    "dmd2_fresh_gan": lambda: dmd2(DOUBLE),
    "dmd2_shared": lambda: dmd2(DOUBLE, gan=None, critic_batches="shared"),
    "sid_gan_on_teacher": lambda: SiD(
        SiDSection(critic_updates=1, gan=GANSection(features="teacher", student_weight=0.3)),
        FewStep(LADDER, "renoise", SHAPE, dtype=DOUBLE),
    ),
    "teacher_forcing": lambda: TeacherForcing(TeacherForcingSection(history_sigma_max=0.4)),
    "consistency": lambda: Consistency(ConsistencySection(nodes=7)),
    "self_forcing": self_forcing,
    "streams": lambda: streams(dtype=DOUBLE),
}
"""Methods at tiny size, by name."""
OFFLOADED = ("dmd2_fresh_gan", "consistency")
"""Those whose idle roles sleep on ranks, where they are shards."""


def made(name: str, mesh: Mesh | None = None, device: torch.device = CPU, heads: int = 3) -> ProcessEngine:
    """Micro-batches of one row on ranks, whole batches in one process; there nothing sleeps."""
    micro_batch, method = 1 if mesh and name == "sft" else None, METHODS[name]()
    return engine(
        method,
        made=networks(method, heads=heads),
        dtype=DOUBLE,
        batch=BATCH,
        mesh=mesh,
        micro_batch=micro_batch,
        device=device,
        offload=mesh is not None and name in OFFLOADED,
    )


def run(job: str, folder: Path, mesh: Mesh, device: torch.device) -> None:
    """Trains from the start, or from what one process left in ``folder``; leaves a checkpoint and what it saw."""
    running = made(job, mesh, device, 3 * mesh.sequence)
    before = {name: copies(role) for name, role in running.roles.items()}
    first = 0
    if (folder / "begun").is_dir():
        begun = load_checkpoint(next((folder / "begun").iterdir()))
        running.load({group: begun.tensors(group) for group in begun.groups})
        save(running, folder / "again", begun.iteration, mesh)
        first = begun.iteration
    rows = [running.run(iteration) for iteration in range(first, ITERATIONS)]
    save(running, folder, ITERATIONS, mesh)
    seen = {
        "rows": [{name: float(value) for name, value in row.items()} for row in rows],
        "unmoved": [name for name, role in running.roles.items() if same(copies(role), before[name])],
        "gathered": [
            f"{name}: {weight}"
            for name, role in running.roles.items()
            for weight, parameter in role.network.named_parameters()
            if not isinstance(parameter, DTensor)
        ],
        "moved_away": [
            name
            for name, role in running.roles.items()
            if isinstance(role, ShardedRole) and not role.weights.asleep
            for weight, parameter in role.network.named_parameters()
            if role._parts[weight].data_ptr() != parameter.detach().to_local().data_ptr()  # type: ignore[attr-defined]
        ],
        "asleep": [name for name, sleeper in running.sleepers.items() if sleeper.asleep],
        "trainable": [
            name
            for name, role in running.roles.items()
            if name != "ema" and {parameter.requires_grad for parameter in role.network.parameters()} == {True}
        ],
        "parts": {name: list(part.shape) for name, part in running.roles["student"].parameters().items()},
    }
    (folder / f"seen-{mesh.ranks.rank}.json").write_text(json.dumps(seen))


def save(running: ProcessEngine, folder: Path, iteration: int, mesh: Mesh) -> None:
    state = running.state()
    if mesh.ranks.first:
        save_checkpoint(folder, iteration, state, {}, KEEP)
    else:
        take_part(state)


def copies(role: Role) -> dict[str, Tensor]:
    """This rank's parts of all weights."""
    parts: Any = {name: p.detach().to_local() for name, p in role.network.named_parameters()}  # type: ignore[attr-defined]
    return {name: role.weights.value(part).clone() for name, part in parts.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor.cpu(), other[name].cpu()) for name, tensor in one.items())


def toggled(folder: Path, mesh: Mesh) -> None:
    """What FSDP2 says where a network runs while it is frozen and is trained later, or that its gradient is right."""
    frozen, sound = network(0).double().requires_grad_(False), network(0).double()
    shard(frozen, mesh)
    x_t, cond = torch.zeros(2, *SHAPE, dtype=DOUBLE), LabelCond(torch.zeros(2, dtype=torch.int64))
    with torch.no_grad():
        frozen.velocity(x_t, torch.ones(2, 1), cond)
    frozen.requires_grad_(True)
    sound.velocity(x_t, torch.ones(2, 1), cond).sum().backward()
    try:
        frozen.velocity(x_t, torch.ones(2, 1), cond).sum().backward()
        found = {name: parameter.grad.full_tensor() for name, parameter in frozen.named_parameters()}
        wrong = [n for n, p in sound.named_parameters() if not torch.allclose(found[n], p.grad)]
        said = f"wrong: {wrong}" if wrong else "right"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    folder.mkdir(exist_ok=True)
    (folder / f"said-{mesh.ranks.rank}.txt").write_text(said)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("device")
    made.add_argument("folder", type=Path)
    made.add_argument("jobs", nargs="+")
    made.add_argument("--sequence", type=int, default=1)
    made.add_argument("--replicas", type=int, default=1)
    return made


def first_calls(folder: Path, mesh: Mesh) -> None:
    """What becomes of each public method when it is the first that a network cut by FSDP2 runs; of one that has run
    without gradient, when it is trained; and of the weights afterwards."""
    causal, said = CausalSection(block_frames=1), {}
    x_t, sigma = torch.ones(2, *CLIP, dtype=DOUBLE), torch.full((2, CLIP[0]), 0.5, dtype=DOUBLE)
    cond = LabelCond(torch.zeros(2, dtype=torch.int64))
    calls: dict[str, Callable[[Any], Any]] = {
        "velocity": lambda net: net.velocity(x_t, sigma, cond),
        "features": lambda net: net.features(x_t, sigma, cond, (1,)),
        "tell": lambda net: net.tell(cond),
        "prefill": lambda net: net.prefill(x_t, cond),
        "velocity_given": lambda net: net.velocity_given(x_t[:, :1], sigma[:, :1], cond, None, 0),
        "append": lambda net: net.append(None, x_t[:, :1], cond),
    }
    for name, call in calls.items():
        whole, cut = (network(0, causal=causal).double() for _ in range(2))
        shard(cut, mesh)
        try:
            with torch.no_grad():
                same = torch.allclose(leaf(call(cut)), leaf(call(whole)), rtol=1e-12, atol=1e-12)
            leaf(call(cut)).sum().backward(), leaf(call(whole)).sum().backward()
            found = {n: p.grad.full_tensor() for n, p in cut.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
            known = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
            close = found.keys() == known.keys() and all(torch.allclose(found[n], known[n]) for n in known)
            parts = all(isinstance(parameter, DTensor) for parameter in cut.parameters())
            said[name] = "right" if same and close and parts else f"same {same}, gradients {close}, parts {parts}"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    folder.mkdir(exist_ok=True)
    (folder / f"said-{mesh.ranks.rank}.json").write_text(json.dumps(said))


def compiled(folder: Path, mesh: Mesh) -> None:
    """How many graphs the blocks of a network have that divides tokens, and whether they equal the eager ones."""
    graphs, found = [], []
    x_t, sigma = torch.ones(2, *CLIP, dtype=DOUBLE), torch.full((2, CLIP[0]), 0.5, dtype=DOUBLE)

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for compiles in (False, True):
        net = network(0, causal=CausalSection(block_frames=1), heads=3 * mesh.sequence).double()
        divide_tokens(net, mesh.division)
        if compiles:
            compile_blocks(net, backend=count, dynamic=False)
        velocity = net.velocity(x_t, sigma, LabelCond(torch.zeros(2, dtype=torch.int64)), clean=2 * x_t)
        velocity.sum().backward()
        found.append([velocity, *(parameter.grad for parameter in net.parameters())])
    same = all(torch.allclose(one, other, rtol=1e-12, atol=1e-12) for one, other in zip(*found, strict=True))
    folder.mkdir(exist_ok=True)
    (folder / f"said-{mesh.ranks.rank}.json").write_text(json.dumps([len(graphs), same]))


def leaf(result: Any) -> Tensor:
    """Some tensor that a network returned."""
    if isinstance(result, Tensor):
        return result
    return result[0] if isinstance(result[0] if isinstance(result, tuple) else None, Tensor) else result.layers[-1].keys


def main() -> None:
    torch.set_num_threads(1)
    arguments = parser().parse_args()
    ranks, device, folder, jobs = Ranks.launched(), torch.device(arguments.device), arguments.folder, arguments.jobs
    if device.type == "cuda":
        device = torch.device("cuda", ranks.local)
        MASKED_KERNEL["cuda"] = "dense"  # Triton multiplies no float64
    how = {"sequence": arguments.sequence, "replicas": arguments.replicas}
    with join(ranks, device, timeout_s=TIMEOUT_S, **how) as mesh:
        assert mesh is not None
        for job in jobs:
            if job == "toggled":
                toggled(folder / job, mesh)
            elif job == "compiled":
                compiled(folder / job, mesh)
            elif job == "first_calls":
                first_calls(folder / job, mesh)
            elif job == "copies":
                axes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
                run("sft", folder / job, Mesh(mesh.ranks, axes, mesh._store), device)
            elif job == "raises":
                if mesh.ranks.rank == 1:
                    raise ValueError("no more rows")
                mesh.any(False)
            else:
                run(job, folder / job, mesh, device)


if __name__ == "__main__":
    main()

"""Ranks: processes that a launcher such as torchrun started to train one run together. Nothing of this file runs where
there is one process.

Every rank makes the same calls in the same order. What they exchange in bulk, weights and gradients, is FSDP2's affair
(``shards.py``); here stand the group itself, the device of each rank, and small agreements.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fewstep.engines.pulse import heartbeat, tell_launcher
from fewstep.engines.sequence import DividedTokens
from fewstep.errors import UserError

GRACE_S = 5.0
"""How long a rank whose partner is gone waits to learn which one it was, and why."""
AGENT = "TORCHELASTIC_RUN_ID"
"""Set in every process that torchrun started, whose agent on the first machine then keeps the ranks' addresses."""
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this one is: in the run, and on its machine (``local``)."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @property
    def first(self) -> bool:
        """Whether this process writes what a run writes."""
        return self.rank == 0

    @classmethod
    def launched(cls) -> Ranks:
        """What torchrun says in the environment; one process where nothing is said.

        Raises UserError where only a part is said, or what is no number.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        try:
            rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        except (KeyError, ValueError) as error:
            raise UserError(
                f"WORLD_SIZE is set, RANK or LOCAL_RANK is not, or is no number ({error}); start the ranks by torchrun "
                "--nproc-per-node N -m fewstep train ..., or unset WORLD_SIZE"
            ) from None
        if not 0 <= rank < world or local < 0:
            raise UserError(
                f"RANK = {rank}, WORLD_SIZE = {world}, LOCAL_RANK = {local}: ranks count from 0 to below WORLD_SIZE; "
                "start them by torchrun --nproc-per-node N -m fewstep train ..., or unset all three"
            )
        return cls(rank, world, local)

    @property
    def launcher(self) -> str:
        """What stands before ``fewstep`` in a command that starts as many processes again; nothing for one."""
        if self.world == 1:
            return ""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.world))
        machines = f"--nnodes {self.world // local} ... " if local < self.world else ""
        return f"torchrun {machines}--nproc-per-node {local} -m "

    def rows(self, sequence: int) -> tuple[int, int]:
        """(i, n): this process has rows i, i + n, ... of every batch, as have all that share its rows, ``sequence`` in
        all."""
        return self.rank // sequence, self.world // sequence

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world} on {socket.gethostname()}"


class RankError(RuntimeError):
    """Another rank failed, or no longer answers; the message names it."""


class Mesh:
    """The group of all ranks. Made by :func:`join`.

    axes: the device mesh that weights are cut along; its last axis is ``shard``, and before it stands ``replicate``
    where ranks hold copies. division: of the tokens of a row, over the ranks that share its rows, one after the other;
    None where each has rows of its own.
    """

    def __init__(self, ranks: Ranks, axes: DeviceMesh, store: dist.Store, division: DividedTokens | None = None):
        self.ranks, self.axes, self.division, self._store = ranks, axes, division, store
        self._messages = 0

    @property
    def sequence(self) -> int:
        """Ranks that share a row."""
        return self.division.ranks if self.division else 1

    @property
    def replicas(self) -> int:
        return self.ranks.world // self.axes["shard"].size()

    def mean(self, values: Mapping[str, Tensor]) -> Values:
        """The mean of each 0-dim value over the ranks; the host does not wait."""
        return self.agreed(values, {})[0]

    def agreed(self, values: Mapping[str, Tensor], norms: Mapping[str, Tensor]) -> tuple[Values, Values]:
        """The mean of each of ``values`` over the ranks, and for each norm of a rank's shards that of all shards.

        One collective for all of them, the same bits on every rank, and what is not finite on one rank is finite on
        none. The host does not wait.
        """
        if not values and not norms:
            return {}, {}
        shares = [value / self.ranks.world for value in values.values()]
        shares += [norm.square() / self.replicas for norm in norms.values()]
        wide = torch.promote_types(torch.float32, max((share.dtype for share in shares), key=lambda d: d.itemsize))
        sums = torch.stack([share.to(wide) for share in shares])
        dist.all_reduce(sums)
        found = sums.unbind()
        means = {name: total.to(value.dtype) for (name, value), total in zip(values.items(), found, strict=False)}
        roots = zip(norms.items(), found[len(values) :], strict=True)
        return means, {name: total.sqrt().to(norm.dtype) for (name, norm), total in roots}

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true on one rank; the hosts wait for each other, their devices do not."""
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def told(self, text: str = "") -> str:
        """What rank 0 says."""
        self._messages += 1
        key = f"said/{self._messages}"
        if self.ranks.first:
            self._store.set(key, text)
        return self._store.get(key).decode()

    def heard(self, text: str) -> list[str]:
        """What every rank says, in their order, on rank 0; nothing on the others."""
        self._messages += 1
        key = f"heard/{self._messages}"
        self._store.set(f"{key}/{self.ranks.rank}", text)
        if not self.ranks.first:
            return []
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self.ranks.world)]

    def all_rows(self, tensor: Tensor, *, per_head: bool = False) -> Tensor:
        """The rows of the global batch, of which :meth:`Ranks.rows` says which a rank holds. per_head: of tensors
        [b n h e] each rank holds the heads that it has where tokens are divided."""
        parts = [torch.empty_like(tensor) for _ in range(self.ranks.world)]
        dist.all_gather(parts, tensor.contiguous())
        groups = [parts[first : first + self.sequence] for first in range(0, self.ranks.world, self.sequence)]
        return torch.stack([torch.cat(g, 2) if per_head else g[0] for g in groups], 1).flatten(0, 1)

    def my_rows(self, tensor: Tensor, *, per_head: bool = False) -> Tensor:
        """The inverse of :meth:`all_rows`."""
        mine, num = self.ranks.rows(self.sequence)
        own = tensor[mine::num]
        return self.division.own(own, 2) if per_head and self.division else own

    def explained(self, error: BaseException) -> BaseException:
        """The error, told to the other ranks; or, where it only says that one of them is gone, a RankError that says
        which, and why it went."""
        me = self.ranks
        if not _is_lost_partner(error):
            with suppress(dist.DistError):  # nobody is left to be told
                self._store.set(f"failed/{me.rank}", f"{me} failed: {type(error).__name__}: {error}")
            return error
        try:
            self._store.set(f"waiting/{me.rank}", "")
            return RankError(f"{me} stops: {self._why() or error}")
        except dist.DistError:
            gone = "rank 0 is" if os.environ.get(AGENT) is None else "the launcher of the first machine is"
            return RankError(f"{me} stops: {gone} gone, through which the ranks find each other: {error}")

    def gone(self, other: int, advice: str) -> None:
        """Ends this process, whose own code waits for a rank that gives no sign of life any more."""
        words = f"{self.ranks} stops: rank {other} gives no sign of life: its process is stopped, or its machine gone"
        with suppress(dist.DistError):
            self._store.set(f"failed/{self.ranks.rank}", words)
        error = RankError(words)
        error.add_note(advice)
        tell_launcher(error)
        sys.stderr.write(f"\nrank {self.ranks.rank}: error: {words}\n{advice}\n")
        sys.stderr.flush()
        os._exit(1)

    def _why(self) -> str:
        """What became of the others, of whom those that wait too are given the time to say so."""
        silent = [rank for rank in range(self.ranks.world) if rank != self.ranks.rank]
        until = time.monotonic() + GRACE_S
        while silent and time.monotonic() < until:
            for rank in silent:
                if self._store.check([f"failed/{rank}"]):
                    return self._store.get(f"failed/{rank}").decode()
            silent = [rank for rank in silent if not self._store.check([f"waiting/{rank}"])]
            time.sleep(0.1)
        names = ", ".join(f"rank {rank}" for rank in silent)
        return names and f"{names} no longer answers: killed, or stalled"


@contextmanager
def join(
    ranks: Ranks,
    device: torch.device,
    *,
    timeout_s: float,
    replicas: int = 1,
    sequence: int = 1,
    store: dist.Store | None = None,
    advice: str = "",
) -> Iterator[Mesh | None]:
    """Inside, this process is one of a group; None where it is the only one.

    device: of this rank; nccl moves what lies on GPUs, gloo what lies in the host's memory. timeout_s: how long a rank
    waits for the others. replicas: groups of ranks that each hold all weights. sequence: ranks that share the tokens of
    a row. store: through which the ranks find each other; left out, that of the launcher, and then they give signs of
    life. An error inside is told to the other ranks, which raise RankError with this rank's name; so does a rank that
    waited in vain. advice: what is said where nothing can be raised, since this rank's own code waits for one that
    gives no sign of life.
    """
    if ranks.world == 1:
        yield None
        return
    timeout = timedelta(seconds=timeout_s)
    launched = store is None
    if store is None:
        store = _meet(ranks, timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # what was on its way is written down at a timeout
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=timeout)
    names, sizes = ("shard",), (ranks.world,)
    if replicas > 1:
        names, sizes = ("replicate", "shard"), (replicas, ranks.world // replicas)
    axes, division = init_device_mesh(device.type, sizes, mesh_dim_names=names), None
    groups = [dist.group.WORLD, *axes.get_all_groups()]
    if sequence > 1:
        rows = init_device_mesh(device.type, (ranks.world // sequence, sequence), mesh_dim_names=("rows", "sequence"))
        division = DividedTokens(rows.get_group("sequence"))
        groups += rows.get_all_groups()
    mesh = Mesh(ranks, axes, store, division)
    for group in groups:
        _limit(group, timeout_s)
    parent = os.getppid() if AGENT in os.environ else None
    signs = (
        heartbeat(store, ranks.rank, ranks.world, partial(mesh.gone, advice=advice), parent)
        if launched
        else nullcontext()
    )
    try:
        with signs:
            yield mesh
    except Exception as error:
        explained = mesh.explained(error)
        for text in getattr(error, "__notes__", ()) if explained is not error else ():
            explained.add_note(text)
        tell_launcher(explained)
        if device.type == "cuda":  # or the process would wait at its end for what is still on its way
            with suppress(Exception):
                distributed_c10d._abort_process_group()
        if explained is error:
            raise
        raise explained from error
    dist.destroy_process_group()


def _limit(group: Any, timeout_s: float) -> None:
    """Bounds every collective of a group. Groups of an axis would else have PyTorch's own bounds, which are longer.

    The hosts wait for each other by gloo, and say whom they miss; NCCL's watchdog ends a process without such words, so
    it waits longer by what they take.
    """
    for kind, extra_s in (("cpu", 0.0), ("cuda", 3 * GRACE_S)):
        with suppress(RuntimeError):  # of a kind for which the group has no backend
            backend: Any = group._get_backend(torch.device(kind))
            backend._set_default_timeout(timedelta(seconds=timeout_s + extra_s))


def _meet(ranks: Ranks, timeout: timedelta) -> dist.Store:
    """Where all ranks find each other, as the launcher says. Raises UserError if they do not."""
    try:
        return next(dist.rendezvous("env://", timeout=timeout))[0]
    except (ValueError, RuntimeError) as error:
        place = f"{os.environ.get('MASTER_ADDR', '(unset)')}:{os.environ.get('MASTER_PORT', '(unset)')}"
        raise UserError(
            f"{ranks} does not find the others at MASTER_ADDR:MASTER_PORT = {place} within {timeout.total_seconds():g} "
            f"s: {error}; start all ranks by torchrun, and see that this address is reached from every machine"
        ) from None


def _is_lost_partner(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))

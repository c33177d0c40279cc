"""Weights that stay whole between the calls of a rollout, on a group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fewstep.engines.shards import ShardedRole
from fewstep.models.wan.parallelize import shard_blocks
from tests.models.tiny import inputs, tiny_section, tiny_wan

pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@pytest.fixture
def role() -> Iterator[ShardedRole]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network = tiny_wan(tiny_section(), seed=0)
        shard_blocks(network, init_device_mesh("cpu", (1,)))
        nothing: Any = None
        yield ShardedRole("student", network, torch.float32, nothing)
    finally:
        dist.destroy_process_group()


def whole(role: ShardedRole) -> list[str]:
    return [name for name, weight in role.network.named_parameters() if not isinstance(weight, DTensor)]


@torch.no_grad()
def test_what_a_call_gathers_stays_whole_inside_and_is_parts_again_afterwards(role: ShardedRole):
    x_t, sigma, cond = inputs()
    alone = role.velocity(x_t, sigma, cond)
    assert whole(role) == []
    with role.gathered():
        first = role.velocity(x_t, sigma, cond)
        assert len(whole(role)) == len(role.parameters())
        again = role.velocity(x_t, sigma, cond)
    assert whole(role) == []
    assert torch.equal(first, alone)
    assert torch.equal(again, alone)
    role.velocity(x_t, sigma, cond)
    assert whole(role) == [], "and calls gather for themselves again"

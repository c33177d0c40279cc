"""Counted operations against torch's own count of what the real networks compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fewstep.costs.counted import pairs_of
from fewstep.costs.trace import Setting, Sized, trace
from fewstep.costs.work import Work, attention_flops, flops, matmul_flops
from fewstep.methods.dmd2 import DMD2, DMD2Section
from fewstep.models.attention import Mask, Part, dense
from fewstep.models.blocks import CausalSection
from fewstep.models.wan.sizes import SIZES
from fewstep.rng import Draw
from fewstep.rollout.self_forcing import SelfForcing
from tests.contract.test_methods import CASES
from tests.engines.worlds import BATCH, SHAPE, engine, needs_clips, network
from tests.models.tiny import LABELS, tiny_section

WHOLE_RUNS = True


def sizes(method: Any, causal: CausalSection | None = None) -> dict[str, Sized]:
    """Those of the networks that ``worlds.engine`` makes; causal: of the student alone, as in self-forcing."""
    everywhere = CausalSection(block_frames=1) if needs_clips(method) else None
    found = {}
    for name in (name for name in method.roles if name not in ("ema", "discriminator")):
        sees = causal if causal is not None and name == "student" else everywhere
        found[name] = Sized(tiny_section(LABELS, layers=2, causal=sees), name in method.trained)
    if "discriminator" in method.roles:
        gan = method.gan.section
        found["discriminator"] = Sized(None, True, gan.features, len(gan.layers or (0,)))
    return found


def all_pairs(work: Work) -> float:
    """The operations where hidden pairs are computed too, as dense kernels do."""
    return flops(replace(work, pairs=float(work.tokens * work.keys)))


def counted(method: Any, shape: tuple[int, int, int, int], causal: CausalSection | None = None) -> float:
    """Of an iteration of one row, a mean over the stops."""
    phases = trace(method, sizes(method, causal), shape, Setting(precision=torch.float32))
    return sum(
        phase.times * phase.part * sum(all_pairs(work) * n for work, n in phase.works.items()) for phase in phases
    )


def computed(method: Any, shape: tuple[int, int, int, int], rows: int, **options: Any) -> float:
    """The same of the real engine, by torch's count, over as many iterations as there are stops, one for each."""
    rollout = getattr(method, "rollout_of", None)
    steps = 1 if rollout is None else len(rollout.sigmas)
    world = engine(method, batch=rows, **options)
    total = 0
    for iteration in iterations(method, steps):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            world.run(iteration)
        total += counter.get_total_flops()
    return total / steps / rows


def iterations(method: Any, steps: int) -> list[int]:
    """One for each stop of the rollouts, all of whose rollouts stop there."""
    key, found = torch.zeros(1, dtype=torch.int64), {}
    for iteration in range(100, 20_000):
        names = [phase.name for phase in method.phases(iteration) if phase.name.startswith("rollout")]
        stops = {Draw(3, name, iteration, key).shared_index("stop", steps) for name in names} or {0}
        if len(stops) == 1:
            found.setdefault(stops.pop(), iteration)
        if len(found) == steps:
            return list(found.values())
    raise AssertionError("no such iterations")


IMAGES = [case for case in CASES if "streams" not in case]


@pytest.mark.parametrize("case", IMAGES)
def test_an_iteration_has_as_many_operations_as_torch_counts(case):
    """Bidirectional networks, diffusion and teacher forcing, guidance, the adversarial term, gradients to inputs."""
    method = CASES[case]()
    shape = (3, *SHAPE[1:]) if needs_clips(method) else SHAPE
    rows = 6 if method.row_parts == 3 else BATCH
    assert counted(method, shape) == pytest.approx(computed(method, shape, rows), rel=2e-3)


@pytest.mark.parametrize("causal", [CausalSection(block_frames=1), CausalSection(block_frames=2, window=4, sink=1)])
@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_self_forcing_iteration_has_as_many_operations_as_torch_counts(causal, steps):
    """Blocks against histories, copies of windows, the student's update of all blocks at once."""
    shape = (6, *SHAPE[1:])
    rollout = SelfForcing((1.0, 0.9, 0.6)[:steps], "renoise", shape)
    method = DMD2(DMD2Section(critic_updates=1, guidance_scale=3.0), rollout)
    made = {name: network(seed, causal=causal if name == "student" else None) for seed, name in enumerate(method.roles)}
    assert counted(method, shape, causal) == pytest.approx(computed(method, shape, 2, made=made), rel=2e-3)


@pytest.mark.parametrize(("window", "sink"), [(None, 0), (4, 0), (5, 1)])
def test_hidden_pairs_are_not_counted(window, sink):
    """Invariant 19, by the dense mask."""
    parts = (Part("causal", 0, 4), Part("probe", 0, 4))
    mask = Mask((1, 2, 2, 2), 6, parts, 2, window, sink)
    assert pairs_of(mask) == dense(mask).sum()


def test_a_masked_forward_has_the_pairs_of_its_mask():
    """Diffusion forcing in blocks of one frame: each of three sees itself and those before it."""
    method = CASES["diffusion forcing"]()
    (phase,) = trace(method, sizes(method), (3, *SHAPE[1:]), Setting(precision=torch.float32))
    blocks = [work for work in phase.works if work.kind == "block"]
    assert {work.backward for work in blocks} == {False, True}
    for work in blocks:
        assert work.pairs == (work.tokens / 3) ** 2 * (1 + 2 + 3)


def test_a_model_is_counted_at_the_published_size():
    """Wan2.1-1.3B on 32,760 tokens and a text of 512: linear layers and attention by their closed forms."""
    shape, tokens, text = SIZES["1.3B"], 32_760, 512
    work = Work("student", "block", 1, tokens, tokens, float(tokens**2), text=text, shape=shape)
    linear = 2 * tokens * (6 * shape.dim**2 + 2 * shape.dim * shape.ffn_dim) + 2 * text * 2 * shape.dim**2
    assert matmul_flops(work) == linear
    assert attention_flops(work) == 4 * shape.dim * (tokens**2 + tokens * text)
    assert flops(replace(work, backward=True, weights=True)) == 2 * flops(work)

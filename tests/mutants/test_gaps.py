"""What a mutant showed that no other test asks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fewstep.assemble import assemble
from fewstep.prepare import prepare
from fewstep.rollout.few_step import FewStep, SamplingSection
from tests.engines.worlds import dmd2, engine
from tests.recipes.tiny_runs import World, tensors


def test_a_sampler_has_the_solver_and_the_guidance_of_its_section():
    for solver in ("renoise", "ode"):
        section = SamplingSection(steps=3, solver=solver, guidance_scale=2.5)
        made = FewStep.of(section, (1, 2, 3, 5), dtype=torch.float64)
        assert (made.solver, made.guidance_scale, made.shape, made.dtype) == (solver, 2.5, (1, 2, 3, 5), torch.float64)


def test_every_role_is_clipped_by_the_norm_of_its_own_gradient(monkeypatch):
    made, seen = engine(dmd2()), []
    for name, optimizer in made.optimizers.items():

        def step(norm: Any, finite: Any, name: str = name, plain: Any = optimizer.step) -> Any:
            gradients = [p.grad.flatten() for p in made.roles[name].parameters().values() if p.grad is not None]
            assert norm.item() == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-5)
            seen.append(name)
            return plain(norm, finite)

        monkeypatch.setattr(optimizer, "step", step)
    made.run(0)
    assert seen == ["critic", "discriminator"] * 2 + ["student"]


def test_roles_start_from_the_average_of_their_source_where_it_differs_from_the_weights(tmp_path):
    world = World.make(tmp_path / "world")
    exact = "engine.precision=float64"  # nor is anything rounded on the way
    saved = tensors(world.train("wan_nano/sft", "ema.start=0", "validation=null", exact), 3)
    made = assemble(prepare(world.recipe("wan_nano/dmd2_gan", exact)))
    for role in ("teacher", "student", "critic"):
        for name, tensor in made.roles[role].network.state_dict().items():
            assert torch.equal(tensor, saved["ema"][name])
    assert any(not torch.equal(saved["ema"][name], tensor) for name, tensor in saved["student"].items())

"""Tensors that sleep in host memory: the same objects, the same bits, and no memory of the device meanwhile."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fewstep.engines import offload
from fewstep.engines.api import EngineSection
from fewstep.engines.offload import Sleeper, keep_awake
from fewstep.methods.consistency import Consistency, ConsistencySection
from fewstep.models.wan.conditioner import LabelCond
from tests.engines.worlds import SHAPE, assert_same_bits, copied, dmd2, engine, run, sft, streams


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)).double()


def held(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind the tensors."""
    return sum({t.untyped_storage(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_a_tensor_wakes_as_the_same_object_with_the_same_bits_and_held_nothing_meanwhile():
    weights = list(network().parameters())
    before, copies = list(weights), [p.detach().clone() for p in weights]
    sleeper = Sleeper(lambda: weights)
    for _ in range(2):
        sleeper.sleep()
        assert sleeper.asleep
        assert held(weights) == 0
        sleeper.sleep()
        sleeper.wake()
        assert not sleeper.asleep
        assert held(weights) == 8 * (35 + 5 + 15 + 3)
        for weight, known, copy in zip(weights, before, copies, strict=True):
            assert weight is known
            assert torch.equal(weight, copy)
        with torch.no_grad():
            for weight, copy in zip(weights, copies, strict=True):
                weight.mul_(1.5), copy.mul_(1.5)


def test_the_state_of_an_optimizer_is_still_that_of_its_parameters():
    """Two steps, one step and a sleep before the second: the same to the last bit."""
    one, other = network(), network()
    x = torch.randn(4, 7, dtype=torch.float64)
    for asleep in (False, True):
        net = other if asleep else one
        adam = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
        sleeper = Sleeper(lambda net=net, adam=adam: [*net.parameters(), *moments(adam)])
        for _ in range(3):
            adam.zero_grad()
            net(x).square().sum().backward()
            adam.step()
            adam.zero_grad(set_to_none=True)
            if asleep:
                sleeper.sleep()
                assert held(moments(adam)) == 0
                sleeper.wake()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def moments(adam: torch.optim.Optimizer) -> list[Tensor]:
    return [t for state in adam.state.values() for t in state.values() if t.ndim]


def test_views_of_one_storage_sleep_once_and_stay_views_of_it():
    flat = torch.arange(12.0)
    front, back, part = flat[:5], flat.view(3, 4).T, flat[3:5]
    sleeper = Sleeper(lambda: [front, back])
    sleeper.sleep()
    assert held([flat]) == 0
    found = [sleeper.value(view) for view in (back, part)]
    assert torch.equal(found[0], torch.arange(12.0).view(3, 4).T)
    assert torch.equal(found[1], torch.tensor([3.0, 4.0]))
    sleeper.wake()
    flat[0] = 9
    assert front[0] == back[0, 0] == 9


def test_counters_and_empty_parts_stay_awake_and_what_is_asked_for_awake_is_itself():
    count, nothing, some = torch.tensor(3), torch.empty(0, 6), torch.ones(2).bfloat16()
    sleeper = Sleeper(lambda: [count, nothing, some])
    assert sleeper.value(some) is some
    sleeper.sleep()
    assert count == 3
    assert sleeper.value(count) is count
    assert sleeper.value(some).dtype == torch.bfloat16
    assert sleeper.value(some).tolist() == [1, 1]


def test_values_lie_in_slabs_that_are_kept_from_one_sleep_to_the_next(monkeypatch):
    monkeypatch.setattr(offload, "SLAB", 256)
    tensors = [torch.full((n,), float(n)) for n in (10, 33, 100, 1)]
    sleeper = Sleeper(lambda: tensors)
    sleeper.sleep()
    slabs = list(sleeper._slabs)
    assert [len(slab) for slab in slabs] == [256, 448, 64], "64 and 192, one too large for a slab, the last one"
    sleeper.wake(), sleeper.sleep()
    assert all(slab is known for slab, known in zip(sleeper._slabs, slabs, strict=True))
    tensors.append(torch.full((3,), 3.0))
    sleeper.wake(), sleeper.sleep()
    sleeper.wake()
    assert [t.unique().tolist() for t in tensors] == [[10], [33], [100], [1], [3]]


def test_those_that_are_not_wanted_go_to_sleep_before_the_others_wake(monkeypatch):
    one, two, three = ([torch.full((4,), float(n))] for n in range(3))
    sleepers = {"one": Sleeper(lambda: one), "two": Sleeper(lambda: two), "three": Sleeper(lambda: three)}
    keep_awake(sleepers, ["one"])
    assert [s.asleep for s in sleepers.values()] == [False, True, True]
    woken = []
    plain = Sleeper.wake
    monkeypatch.setattr(Sleeper, "wake", lambda self: (woken.append(held([*one, *two])), plain(self)))
    keep_awake(sleepers, ["two"])
    assert woken == [0], "nothing was held when the second woke"
    assert [s.asleep for s in sleepers.values()] == [True, False, True]
    assert two[0].tolist() == [1] * 4


# --- in the engine ----------------------------------------------------------------------------------------------------

METHODS = {
    "sft": sft,
    "dmd2": dmd2,
    "streams": streams,
    "consistency": lambda: Consistency(ConsistencySection(nodes=7)),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_run_whose_idle_roles_sleep_is_one_in_which_all_are_awake(method):
    """Losses, weights, moments and average to the last bit; the second half goes on from the state of a run asleep."""
    awake, first, second = (engine(METHODS[method](), offload=offload) for offload in (False, True, True))
    expected = run(awake, range(3))
    found = run(first, range(2))
    assert any(sleeper.asleep for sleeper in first.sleepers.values()) == (method != "sft")
    first.sleep()
    second.load(copied(first.state()))
    found += run(second, [2])
    for row, other in zip(found, expected, strict=True):
        assert_same_bits({"row": row}, {"row": other})
    second.sleep()
    assert_same_bits(copied(second.state()), copied(awake.state()))
    assert held([*second.ema.shadows.values(), *second.roles["student"].parameters().values()]) == 0
    with awake.averaged() as one, second.averaged() as other:
        assert_same_bits({"student": dict(other.network.state_dict())}, {"student": dict(one.network.state_dict())})


def test_in_a_phase_nothing_is_awake_but_what_it_uses(monkeypatch):
    """The critic's losses are handed the teacher, and do not call it."""
    made, seen = engine(dmd2(), offload=True), {}
    made.run(0)

    def watched(plain):
        def watching(phase, *arguments):
            result = plain(phase, *arguments)
            seen[phase.name] = {name for name, sleeper in made.sleepers.items() if not sleeper.asleep}
            return result

        return watching

    for name in ("_record", "_train"):
        monkeypatch.setattr(made, name, watched(getattr(made, name)))
    made.run(1)
    critic = {"critic", "critic.optimizer", "discriminator", "discriminator.optimizer"}
    assert seen == {
        "rollout.0": {"student"},
        "critic.0": critic,
        "rollout.1": {"student"},
        "critic.1": critic,
        "scores": {"teacher", "critic", "discriminator"},
        "student": {"student", "student.optimizer", "ema"},
    }


def test_a_role_that_is_asleep_wakes_when_it_is_called():
    made = engine(dmd2(), offload=True)
    x_t, sigma, cond = torch.zeros(2, *SHAPE), torch.ones(2, 1), LabelCond(torch.zeros(2, dtype=torch.int64))
    calls = {
        "student": lambda: made.roles["student"].velocity(x_t, sigma, cond),
        "discriminator": lambda: made.roles["discriminator"]((torch.ones(2, 4, 48),)),
    }
    for name, call in calls.items():
        expected = call()
        made.sleep()
        assert held(list(made.roles[name].parameters().values())) == 0
        assert torch.equal(call(), expected)
        assert [other for other, sleeper in made.sleepers.items() if not sleeper.asleep and sleeper._slabs] == [name]


def test_an_engine_whose_roles_all_sleep_wakes_those_that_it_needs():
    """Without ``offload`` all of them, at the next phase."""
    made, other = engine(dmd2()), engine(dmd2())
    for iteration in range(2):
        assert_same_bits({"row": made.run(iteration)}, {"row": other.run(iteration)})
        made.sleep()
        assert all(sleeper.asleep for sleeper in made.sleepers.values())
    made.run(2)
    assert not any(sleeper.asleep for sleeper in made.sleepers.values())


def test_replayed_graphs_keep_addresses_so_that_nothing_may_sleep():
    with pytest.raises(ValidationError, match="leave out 'offload'"):
        EngineSection(compile="graphs", offload=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_memory_is_free_and_values_survive_work_queued_on_either_side():
    """Writes that are still queued when the tensors go to sleep, and reads queued right after they wake."""
    device = torch.device("cuda")
    tensors = [torch.zeros(64, 1024, 1024, device=device) for _ in range(4)]
    sleeper = Sleeper(lambda: tensors)
    for turn in range(1, 4):
        for tensor in tensors:
            for _ in range(20):
                tensor.add_(1)
        sleeper.sleep()
        other = torch.full((4, 64, 1024, 1024), -1.0, device=device)
        del other
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() < 2**20
        assert sleeper.value(tensors[3])[0, 0, 0] == 20 * turn
        assert sleeper.value(tensors[0]).is_pinned()
        sleeper.wake()
        sums = [tensor.double().sum() for tensor in tensors]
        assert [s.item() for s in sums] == [20 * turn * 64 * 2**20] * 4

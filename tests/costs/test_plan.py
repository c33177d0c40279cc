"""The command ``fewstep plan``, and what it is made of: layouts, their memory and time."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from fewstep.cli.shipped import run_recipe, shipped_recipes
from fewstep.config import load_recipe
from fewstep.costs.estimate import GIB, Planner
from fewstep.costs.layouts import Layout, layouts, ranked
from fewstep.costs.links import Links
from fewstep.costs.sizes import sizes_of
from fewstep.costs.speed import Machine, coefficients, seconds
from fewstep.costs.work import Work
from fewstep.devices import KINDS, kind_of, kind_titled
from fewstep.errors import UserError
from fewstep.models.wan.sizes import SIZES
from tests.test_cli import call

WHOLE_RUNS = True
launcher = import_module("fewstep.cli.plan").launcher  # the package has a command of that name
H200 = kind_of("h200")


def planner(name: str, *overrides: str) -> Planner:
    return Planner(sizes_of(load_recipe(shipped_recipes()[name], list(overrides)), find=run_recipe), H200)


@pytest.fixture(scope="module")
def video() -> Planner:
    """Diffusion forcing at 1.3B: one phase."""
    return planner("wan_1_3b_video/diffusion_forcing")


def test_a_recipe_is_planned_without_weights_and_data():
    output = call("plan", "wan_1_3b_video/diffusion_forcing", "--gpus", "8")
    for text in (
        "models/Wan2.1-T2V-1.3B-Diffusers is not there",
        "FSDP 8",
        "together, at the peak",
        "planned is a network of size 1.3B that reads texts",
    ):
        assert text in output


def test_a_plan_ends_with_the_command_that_starts_its_best_layout():
    output = call("plan", "wan_1_3b_video/diffusion_forcing", "data.batch=32", "--gpus", "8")
    assert (
        "Start it: torchrun --nproc-per-node 8 -m fewstep train wan_1_3b_video/diffusion_forcing data.batch=32"
        in output
    )
    assert "each thing beside the plain one counts as 2% slower) layout" in output


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(1), ""),
        (Layout(8, "split", 4), ""),
        (Layout(8), "torchrun --nproc-per-node 8 -m "),
        (
            Layout(12),
            "torchrun --nnodes 2 --nproc-per-node 6 --rdzv-backend c10d --rdzv-endpoint FIRST-MACHINE:29500 -m -- ",
        ),
    ],
)
def test_the_launcher_is_that_of_so_many_machines(layout, words):
    assert launcher(layout, host_gpus=8) == words


def test_the_json_of_a_plan_is_the_same_every_time():
    first, second = (call("plan", "wan_nano/dmd2", "--gpus", "2", "--json") for _ in range(2))
    assert first == second
    told = json.loads(first)
    assert {"recipe", "kind", "gpus", "roles", "layouts", "flops_per_iteration"} <= told.keys()
    best = next(one for one in told["layouts"] if one["layout"]["engine"] == "process")
    assert best["fits"]
    assert {phase["name"] for phase in best["phases"]} == {"rollout", "critic", "scores", "student"}
    assert best["seconds"] == pytest.approx(sum(phase["seconds"] for phase in best["phases"]), rel=1e-4)


def test_every_recipe_at_full_size_can_be_sized():
    names = [name for name in shipped_recipes() if name.startswith("wan_1_3b_video/")]
    for name in names:
        found = sizes_of(load_recipe(shipped_recipes()[name]), find=run_recipe)
        assert found.shape == (21, 16, 60, 104)
        assert {role.section.size for role in found.roles.values() if role.section} == {"1.3B"}
        assert found.roles["student"].section.causal is not None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--kind", "b200"), "h200, h100, a100-80g"),
        (("--gpus", "7"), "does not divide"),
        (("--shape", "21x16x60"), "FRAMESxCHANNELSxHEIGHTxWIDTH"),
        (("student.init=models/some-net",), "--size"),
        (("student.init=models/some-net", "--size", "2B"), "nano, small, 1.3B, 14B"),
    ],
)
def test_what_cannot_be_planned_is_one_clean_line(words, told):
    output = call("plan", "wan_1_3b_video/diffusion_forcing", *words, code=2)
    assert told in output
    assert "Traceback" not in output


def test_weights_are_cut_and_activations_are_not(video):
    one, eight = (video.estimate(Layout(gpus, recompute=True, micro_batch=1)) for gpus in (1, 8))
    assert eight.roles["student"].kept == one.roles["student"].kept / 8
    assert eight.parts["activations"] == pytest.approx(one.parts["activations"], rel=0.15)
    assert eight.parts["gathered blocks"] > one.parts["gathered blocks"] == 0


def test_recomputing_takes_less_memory_and_more_time(video):
    kept, again = (video.estimate(Layout(8, recompute=flag, micro_batch=1)) for flag in (False, True))
    assert again.parts["activations"] < 0.3 * kept.parts["activations"]
    assert 1.2 < again.seconds / kept.seconds < 1.5
    assert again.mfu < kept.mfu


def test_what_is_computed_again_is_no_work_of_the_model():
    """MFU counts nothing twice."""
    kept, again = (planner("wan_nano/sft", f"engine.recompute={flag}") for flag in ("false", "true"))
    assert again.model_flops == pytest.approx(kept.model_flops, rel=1e-12)
    assert any(work.again for phase in again.traced(True) for work in phase.works)


def test_ranks_that_share_a_clip_divide_its_activations(video):
    whole, shared = (video.estimate(Layout(8, sequence=n, recompute=True, micro_batch=1)) for n in (1, 4))
    assert shared.parts["activations"] == pytest.approx(whole.parts["activations"] / 4, rel=0.05)


def test_replicas_hold_more_and_send_less_between_hosts():
    """HSDP: 16 GPUs of two hosts."""
    shared = Links(H200, 8, 16).gather_s(GIB)
    apart = Links(H200, 8, 8, replicas=2)
    assert apart.gather_s(GIB) < shared
    assert apart.agree_s(GIB / 8) == pytest.approx(GIB / 8 / (50e9 * 0.7), rel=0.01)


def test_idle_roles_leave_the_gpu():
    plan = planner("wan_small/dmd2_4step", "engine.compile=null")
    here, away = (plan.estimate(Layout(1, offload=flag, micro_batch=1)) for flag in (False, True))
    assert away.tensors_gib < here.tensors_gib
    assert away.seconds > here.seconds


def test_two_groups_at_once_take_as_long_as_the_slower():
    plan = planner("wan_small/dmd2_4step", "engine.compile=null")
    turn, both = (plan.estimate(Layout(2, "split", 1, overlap)) for overlap in (False, True))
    seconds = {phase.name: phase.seconds for phase in both.phases}
    first = seconds["rollout"] / next(phase.times for phase in both.phases if phase.name == "rollout")
    critics, student = seconds["critic"] + seconds["scores"], seconds["rollout"] + seconds["student"]
    assert both.seconds == pytest.approx(max(critics, student))
    learnt = max(first + seconds["critic"], seconds["rollout"])
    assert turn.seconds == pytest.approx(learnt + seconds["scores"] + seconds["student"])
    assert both.seconds < turn.seconds < critics + student


def test_what_fits_comes_first_and_the_fastest_of_it(video):
    found = ranked(video, 8)
    fits = [one.fits for one in found]
    assert fits[0]
    assert all(one.memory_gib <= H200.memory_gib for one in found if one.fits)
    assert min(one.seconds for one, good in zip(found, fits, strict=True) if good) > 0.8 * found[0].seconds


def test_thousands_of_gpus_can_be_planned(video):
    """More ranks than rows are refused, unless several share a clip."""
    big = Planner(replace(video.sizes, recipe=video.sizes.recipe), H200)
    big.batch = 4096
    found = ranked(big, 4096)
    assert found[0].fits
    assert any(one.layout.replicas == 512 for one in found)
    assert big.estimate(Layout(8192)).problem


def test_a_layout_says_what_to_write(video):
    assert Layout(8, recompute=False, micro_batch=None).overrides(video.sizes.recipe) == [
        "engine.recompute=false",
        "engine.micro_batch=null",
    ]
    split = Layout(8, "split", 2, overlap=True, recompute=True, micro_batch=1)
    assert split.overrides(video.sizes.recipe) == [
        "engine.name=ray",
        "engine.layout=split",
        "'engine.groups={critic: {gpus: 2}, student: {gpus: 6}}'",
        "engine.overlap=true",
    ]
    assert all(layout.gpus == 4 for layout in layouts(video, 4))


def test_a_plan_offers_nothing_that_train_refuses():
    """CUDA graphs on ranks, overlap of streams, asynchronous saves and leftover groups of Ray, tokens that do not
    divide."""
    small = planner("wan_small/dmd2_4step")
    assert Layout(2).overrides(small.sizes.recipe) == ["engine.compile=blocks"]
    assert not small.graphs(Layout(2))
    streams = planner("wan_nano_video/long_tuning")
    assert {layout.overlap for layout in layouts(streams, 2)} == {False}
    saving = planner("wan_small/dmd2_4step", "checkpoint.asynchronous=true")
    assert {layout.engine for layout in layouts(saving, 4)} == {"process"}
    groups = "engine={name: ray, layout: split, micro_batch: 2, groups: {critic: {gpus: 1}, student: {gpus: 1}}}"
    grouped = planner("wan_nano/dmd2", groups)
    assert Layout(1, micro_batch=2).overrides(grouped.sizes.recipe) == ["engine='{micro_batch: 2}'"]
    name, shape = "wan_1_3b_video/diffusion_forcing", (21, 16, 30, 52)
    odd = Planner(sizes_of(load_recipe(shipped_recipes()[name]), shape=shape, find=run_recipe), H200)
    assert "390 tokens of a frame" in odd.estimate(Layout(4, sequence=4)).problem
    assert not odd.estimate(Layout(4, sequence=2)).problem


def test_a_batch_that_no_number_of_ranks_can_share_is_refused_before_anything_is_counted():
    text = call("plan", "wan_1_3b_video/self_forcing", "--gpus", "1024", code=2)
    assert "a batch of 64 does not divide" in text
    assert "data.batch=1024" in text


def test_a_plan_is_of_the_precision_of_the_recipe():
    half, single = (
        json.loads(call("plan", "wan_nano/sft", f"engine.precision={name}", "--gpus", "1", "--json"))
        for name in ("bfloat16", "float32")
    )
    assert half["layouts"][0]["memory_gib"] < single["layouts"][0]["memory_gib"]


def test_a_rollout_gathers_all_weights_once_unless_the_recipe_says_otherwise():
    name, layout = "wan_small/dmd2_4step", Layout(8)
    once, often = (planner(name, f"engine.gather_once={word}").estimate(layout) for word in ("true", "false"))
    network = [{phase.name: phase.network_s for phase in one.phases} for one in (once, often)]
    assert network[0]["rollout"] < network[1]["rollout"] / 2
    for phase in ("critic", "scores", "student"):
        assert network[0][phase] == network[1][phase]


def test_time_grows_with_the_work_and_the_host_counts_where_it_is_slow():
    machine = Machine(H200, coefficients())
    work = Work("student", "block", 1, 4096, 4096, 4096.0**2, text=512, shape=SIZES["small"])
    busy, host = seconds({work: 2}, machine)
    more, same = seconds({work: 2}, machine, rows=8)
    assert more > busy
    assert same == host
    assert seconds({work: 2}, replace(machine, graphs=True))[1] == 0


def test_kinds_are_found_by_what_torch_calls_them():
    assert kind_titled("NVIDIA H200") is H200
    assert kind_titled("NVIDIA A100-SXM4-80GB").name == "a100-80g"
    assert kind_titled("NVIDIA H100 PCIe") is None
    assert kind_titled("NVIDIA H200 NVL") is None
    assert kind_titled("AMD Radeon") is None
    assert [kind.name for kind in KINDS] == ["h200", "h100", "a100-80g"]
    with pytest.raises(UserError, match="h100"):
        kind_of("tpu")


def test_the_plan_of_a_precision_keeps_more_in_float32():
    sizes = sizes_of(load_recipe(shipped_recipes()["wan_nano/sft"]))
    half, single = (Planner(sizes, H200, precision=precision) for precision in (torch.bfloat16, torch.float32))
    assert half.estimate(Layout(1)).tensors_gib < single.estimate(Layout(1)).tensors_gib

"""Training from a recipe to a checkpoint: what is refused before it begins, and what an interruption leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fewstep.assemble import assemble
from fewstep.checkpoint.run_folder import RunFolder
from fewstep.checkpoint.save import load_checkpoint, newest_complete
from fewstep.cli.shipped import shipped_recipes
from fewstep.engines.process import ProcessEngine
from fewstep.errors import UserError, UserErrors
from fewstep.evaluate.validation import Validator
from fewstep.observe.sinks import read_rows
from fewstep.prepare import prepare
from fewstep.train import StopRequest, train
from tests.recipes.tiny_runs import World, tensors, values

WHOLE_RUNS = True

SFT, DMD2 = "wan_nano/sft", "wan_nano/dmd2_gan"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Six iterations of a teacher and of its student."""
    made = World.make(tmp_path_factory.mktemp("train") / "world")
    before = torch.random.get_rng_state()
    made.train(SFT, iterations=6)
    made.train(DMD2, "method.critic_updates=2", iterations=6)
    assert torch.equal(torch.random.get_rng_state(), before), "training draws nothing from the global generator"
    return made


def assert_same_bits(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for group, named in expected.items():
        assert found[group].keys() == named.keys(), group
        for name, tensor in named.items():
            assert torch.equal(found[group][name], tensor), f"{group}: {name}"


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), [(SFT, ()), (DMD2, ("method.critic_updates=2",))])
def test_six_iterations_are_three_a_crash_and_three_more(world: World, name: str, settings: tuple[str, ...]):
    """PITFALLS, resume and tracking: every tensor of the checkpoint and every row of metrics, bit for bit; rows that
    were written after the checkpoint are superseded, none is lost."""
    whole, crashed = world.run(name), world.run(f"{name}-crashed")
    shutil.copytree(whole.path, crashed.path)
    shutil.rmtree(crashed.checkpoints / "iteration-000006")
    torch.manual_seed(99)
    world.train(name, *settings, iterations=6, into=f"{name}-crashed", resume=True)
    assert_same_bits(tensors(crashed, 6), tensors(whole, 6))
    assert values(crashed) == values(whole)
    assert {row.kind for row in read_rows(crashed.metrics)} == {"train", "validation", "resume"}
    assert {"student", "student.optimizer", "ema"} <= set(tensors(whole, 6))


def test_a_run_goes_on_with_idle_roles_asleep_as_it_would_with_all_awake(world: World):
    """``engine.offload``: loading, phases, validation and the checkpoint."""
    shutil.copytree(world.run(DMD2).path, world.path / "offloaded")
    shutil.rmtree(world.path / "offloaded" / "checkpoints" / "iteration-000006")
    run = world.train(
        DMD2, "method.critic_updates=2", "engine.offload=true", iterations=6, into="offloaded", resume=True
    )
    assert_same_bits(tensors(run, 6), tensors(world.run(DMD2), 6))
    assert values(run) == values(world.run(DMD2))


def test_every_trained_role_its_optimizer_and_the_average_are_in_the_checkpoint(world: World):
    groups = set(tensors(world.run(DMD2), 6))
    roles = ("student", "critic", "discriminator")
    assert groups == {*roles, *(f"{role}.optimizer" for role in roles), "ema"}
    meta = load_checkpoint(world.run(DMD2).checkpoints / "iteration-000006").meta
    assert meta["counters"] == {"student": 6, "critic": 12, "discriminator": 12}
    assert meta["iteration"] == 6
    assert meta["time_s"] > 0


def test_a_finished_run_that_is_resumed_changes_nothing(world: World):
    run = world.run(SFT)
    before = (newest_complete(run.checkpoints), values(run))
    marker = (run.checkpoints / "iteration-000006" / "complete.json").stat().st_mtime_ns
    assert train(prepare(world.recipe(SFT, iterations=6)), run, resume=True)
    assert (newest_complete(run.checkpoints), values(run)) == before
    assert (run.checkpoints / "iteration-000006" / "complete.json").stat().st_mtime_ns == marker


def test_iterations_is_the_total_however_often_a_run_is_resumed(world: World):
    """PITFALLS, resume."""
    shutil.copytree(world.run(SFT).path, world.path / "longer")
    run = world.train(SFT, iterations=7, into="longer", resume=True)
    assert newest_complete(run.checkpoints) == run.checkpoints / "iteration-000007"
    assert values(run)["train", 7]["student/updates"] == 7


def test_a_run_goes_on_with_the_networks_that_it_has(world: World):
    shutil.copytree(world.run(SFT).path, world.path / "other")
    with pytest.raises(UserError, match=r"student\.model\.layers = 3: it was"):
        world.train(SFT, "student.model.layers=3", iterations=7, into="other", resume=True)


def test_a_run_without_a_checkpoint_starts_over(world: World):
    shutil.copytree(world.run(SFT).path, world.path / "empty")
    shutil.rmtree(world.path / "empty" / "checkpoints")
    run = world.train(SFT, iterations=6, into="empty", resume=True)
    assert_same_bits(tensors(run, 6), tensors(world.run(SFT), 6))


def test_a_second_process_cannot_train_into_the_same_run(world: World):
    run = world.run(SFT)
    with run.lock(), pytest.raises(UserError, match="another process trains into this run"):
        train(prepare(world.recipe(SFT, iterations=6)), run, resume=True)


# --- saving beside the training --------------------------------------------------------------------------------------

BESIDE = ("checkpoint.asynchronous=true", "checkpoint.keep_last=9", "validation=null")


def test_checkpoints_that_are_written_beside_the_training_are_those_of_a_run_that_waits(world: World):
    run = world.train(DMD2, "method.critic_updates=2", "checkpoint.every=1", *BESIDE, iterations=6, into="beside")
    assert len(list(run.checkpoints.iterdir())) == 6
    for iteration in (3, 6):
        assert_same_bits(tensors(run, iteration), tensors(world.run(DMD2), iteration))


def test_an_error_while_a_checkpoint_is_written_ends_the_run_at_the_next_iteration(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    plain, place, ran = ProcessEngine.run, world.path / "unwritable", []

    def watched(self: ProcessEngine, iteration: int) -> dict[str, Tensor]:
        ran.append(iteration)
        if iteration == 1:
            (place / "checkpoints").write_text("no folder")
        for writer in (thread for thread in threading.enumerate() if "_write" in thread.name):
            writer.join()
        return plain(self, iteration)

    monkeypatch.setattr(ProcessEngine, "run", watched)
    with pytest.raises(UserError, match=r"iteration-000002: the checkpoint could not be written"):
        world.train(SFT, "checkpoint.every=2", *BESIDE, iterations=1000, into="unwritable")
    assert ran == [0, 1, 2]


# --- what must not change training ------------------------------------------------------------------------------------


def test_training_is_the_same_with_and_without_validation(world: World):
    """PITFALLS, validation: bit for bit, with the averaged weights swapped in after every iteration."""
    often = world.train(DMD2, "method.critic_updates=1", "validation.every=1", iterations=2, into="often")
    never = world.train(DMD2, "method.critic_updates=1", "validation=null", iterations=2, into="never")
    assert_same_bits(tensors(often, 2), tensors(never, 2))
    assert [key for key in values(often) if key[0] == "validation"] == [("validation", 1), ("validation", 2)]
    trained = {key: row for key, row in values(often).items() if key[0] == "train"}
    assert trained["train", 2]["student/updates"] == values(never)["train", 2]["student/updates"] == 2


def test_the_averaged_weights_are_those_that_are_validated(world: World, monkeypatch: pytest.MonkeyPatch):
    """PITFALLS, EMA: judged = exported; and the live weights are back afterwards."""
    seen: list[dict[str, Tensor]] = []
    plain = Validator.__call__

    def watched(self: Validator, iteration: int, model: Any) -> dict[str, float]:
        seen.append({name: tensor.clone() for name, tensor in model.network.state_dict().items()})
        return plain(self, iteration, model)

    monkeypatch.setattr(Validator, "__call__", watched)
    run = world.train(SFT, "ema.start=0", "ema.decay=0.5", "validation.every=2", iterations=2, into="watched")
    (judged,) = seen
    assert same(judged, tensors(run, 2)["ema"])
    assert not same(judged, tensors(run, 2)["student"])


def test_the_engine_cuts_batches_as_the_recipe_says(world: World):
    assert assemble(prepare(world.recipe(SFT, "engine.micro_batch=2"))).micro_batch == 2


# --- stopping ---------------------------------------------------------------------------------------------------------


def start(world: World, place: Path) -> subprocess.Popen[str]:
    """`fewstep train` in a process of its own, for more iterations than anybody waits for."""
    overrides = [*world.overrides(SFT, 1_000_000), "checkpoint.every=1000000", "validation=null", "observe.every=1"]
    program = "import torch; torch.set_num_threads(1); from fewstep.cli import main; main()"
    command = [sys.executable, "-c", program, "train", str(shipped_recipes()[SFT]), *overrides, "--run", str(place)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_ctrl_c_and_sigterm_leave_a_checkpoint_and_say_how_to_go_on(world: World):
    started = {
        number: (start(world, world.path / number.name), number.name) for number in (signal.SIGINT, signal.SIGTERM)
    }
    for number, (process, name) in started.items():
        run = RunFolder(world.path / name)
        waiting_until = time.monotonic() + 120
        while not (run.metrics.exists() and len(read_rows(run.metrics)) >= 3):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < waiting_until
            time.sleep(0.05)
        process.send_signal(number)
    for process, name in started.values():
        output, _ = process.communicate(timeout=120)
        run = RunFolder(world.path / name)
        assert process.returncode == 130, output
        assert f"Go on with: fewstep train --resume {run.path}" in output.replace("\n", " ").replace("  ", " ")
        assert "Traceback" not in output
        newest = newest_complete(run.checkpoints)
        assert newest is not None
        last = max(row.iteration for row in read_rows(run.metrics))
        assert load_checkpoint(newest).iteration == last >= 3, "the last finished iteration is in the checkpoint"


def test_a_run_that_was_interrupted_goes_on_to_the_same_end(world: World, monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C at an iteration that no checkpoint was due at."""
    plain = ProcessEngine.run

    def interrupted(self: ProcessEngine, iteration: int) -> dict[str, Tensor]:
        if iteration == 3:
            signal.raise_signal(signal.SIGINT)
        return plain(self, iteration)

    place = RunFolder.create(world.path / "interrupted")
    with monkeypatch.context() as patched:
        patched.setattr(ProcessEngine, "run", interrupted)
        assert not train(prepare(world.recipe(SFT, iterations=6)), place)
    assert newest_complete(place.checkpoints) == place.checkpoints / "iteration-000004"
    world.train(SFT, iterations=6, into="interrupted", resume=True)
    assert_same_bits(tensors(place, 6), tensors(world.run(SFT), 6))


def test_an_error_in_training_is_not_reported_as_a_saved_checkpoint(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(self: ProcessEngine, iteration: int) -> dict[str, Tensor]:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ProcessEngine, "run", broken)
    place = RunFolder.create(world.path / "broken")
    with pytest.raises(RuntimeError, match="the device is gone") as caught:
        train(prepare(world.recipe(SFT, "validation=null")), place)
    assert caught.value.__notes__[-1].endswith(f"Go on with: fewstep train --resume {place.path}")
    assert "Checkpoint saved" not in capsys.readouterr().out
    assert newest_complete(place.checkpoints) is None
    with place.lock():
        pass  # it was given back


def test_the_first_signal_asks_and_the_second_one_stops():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest() as stop:
        assert not stop.asked
        signal.raise_signal(signal.SIGTERM)
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_signals_stay_as_they_are():
    found: list[Any] = []

    def inside() -> None:
        with StopRequest() as stop:
            found.append((stop.asked, signal.getsignal(signal.SIGINT)))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [(False, before)]


# --- where weights come from ------------------------------------------------------------------------------------------


def weights(engine: ProcessEngine, role: str) -> dict[str, Tensor]:
    return dict(engine.roles[role].network.state_dict())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_student_and_critic_start_as_the_averaged_teacher(world: World):
    """PITFALLS, EMA: what is judged is what is used."""
    engine = assemble(prepare(world.recipe(DMD2)))
    for role in ("teacher", "student", "critic"):
        assert same(weights(engine, role), tensors(world.run(SFT), 6)["ema"]), role
    assert same(engine.ema.shadows, weights(engine, "student"))
    places = {name: parameter.data_ptr() for name, parameter in engine.roles["student"].network.named_parameters()}
    for other in ("teacher", "critic"):
        for name, parameter in engine.roles[other].network.named_parameters():
            assert parameter.data_ptr() != places[name], "each role has weights of its own"


def test_the_raw_weights_of_a_teacher_can_be_asked_for(world: World):
    shutil.copytree(world.run(DMD2).path, world.path / "raw")
    engine = assemble(prepare(world.recipe(DMD2, f"teacher.init={world.path / 'raw'}", "teacher.weights=raw")))
    assert same(weights(engine, "teacher"), tensors(world.run(DMD2), 6)["student"])
    assert not same(weights(engine, "teacher"), tensors(world.run(DMD2), 6)["ema"])


def test_the_critic_may_be_smaller_than_the_teacher(world: World):
    own = "{family: wan, size: nano, dim: 32, layers: 1, heads: 2, ffn_dim: 40, text_dim: 12, freq_dim: 16, "
    own += "conditioner: {name: class_label, classes: 10}}"
    recipe = world.recipe(DMD2, "critic.init=random", f"critic.model={own}", "method.gan.features=teacher")
    engine = assemble(prepare(recipe))
    assert engine.roles["critic"].width == 32
    assert engine.roles["student"].width == 48
    metrics = engine.run(0)
    assert all(value.isfinite() for value in metrics.values())


def test_a_critic_that_starts_as_a_student_of_random_weights_is_like_it_and_else_has_its_own(world: World):
    model = "{family: wan, size: nano, dim: 32, layers: 1, heads: 2, ffn_dim: 40, text_dim: 12, freq_dim: 16, "
    model += "conditioner: {name: class_label, classes: 10}}"
    student = ["student.init=random", f"student.model={model}"]
    alike = assemble(prepare(world.recipe(DMD2, *student, "critic.init=student")))
    assert same(weights(alike, "critic"), weights(alike, "student"))
    own = assemble(prepare(world.recipe(DMD2, *student, "critic.init=random", f"critic.model={model}")))
    assert same(weights(own, "student"), weights(alike, "student"))
    assert not torch.equal(*(weights(own, role)["blocks.0.ffn.hidden.weight"] for role in ("student", "critic")))


def test_new_weights_depend_on_the_seed_alone(world: World):
    torch.manual_seed(5)
    one = assemble(prepare(world.recipe(SFT)))
    torch.manual_seed(6)
    again, other = assemble(prepare(world.recipe(SFT))), assemble(prepare(world.recipe(SFT, "seed=1")))
    assert same(weights(one, "student"), weights(again, "student"))
    assert not same(weights(one, "student"), weights(other, "student"))


def test_schedules_count_the_updates_that_their_role_will_make(world: World):
    plan = prepare(world.recipe(DMD2, "method.critic_updates=5", "method.critic_warmup_updates=7", iterations=4))
    assert plan.total_updates() == {"student": 2, "critic": 17, "discriminator": 17}
    assert {name: optimizer.total for name, optimizer in assemble(plan).optimizers.items()} == plan.total_updates()


# --- what is refused before training ----------------------------------------------------------------------------------


def refused(world: World, name: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        prepare(world.recipe(name, *overrides))
    return list(caught.value.errors) if isinstance(caught.value, UserErrors) else [str(caught.value)]


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        (
            SFT,
            ["student.model.channels=3"],
            ["student", "3 latent channels, the data 1", "student.model.channels=1"],
        ),
        (
            SFT,
            ["student.model.conditioner.classes=7"],
            ["student", "7 classes", "has 10; write student.model.conditioner.classes=10,"],
        ),
        (SFT, ["student.model.conditioner={name: embedding}"], ["student", "no classes (embedding)"]),
        (SFT, ["student.model.patch=[1, 5, 4]"], ["student", "16x16", "5x4"]),
        (
            SFT,
            ["codec.mean=[0.1, 0.2]", "codec.std=[1, 1]"],
            ["codec", "2 channels", "write codec='{name: identity, mean: [0], std: [1]}'"],
        ),
        (SFT, ["data.batch=68"], ["data.batch = 68", "67 items"]),
        (SFT, ["engine.device=gpu"], ["engine.device = gpu", "'auto'"]),
        (SFT, ["data.path=/nowhere"], ["data.path", "/nowhere"]),
        (DMD2, ["codec.mean=[0.1]"], ["codec", "teacher", "codec='{name: identity, mean: [0.0], std: [1.0]}'"]),
        (DMD2, ["method.gan.layers=[0, 2]"], ["method.gan.layers = [0, 2]", "from 0 to 1"]),
        (DMD2, ["method.gan.layers=[1, 0]"], ["method.gan.layers = [1, 0]", "ascending"]),
        (DMD2, ["teacher.init=/nowhere/run"], ["teacher.init = /nowhere/run", "does not exist"]),
        (
            DMD2,
            ["student.model={size: nano, conditioner: {name: class_label, classes: 10}}"],
            ["student.model differs"],
        ),
        (
            DMD2,
            [
                "critic.init=random",
                "critic.model={size: nano, conditioner: {name: class_label, classes: 10, tokens: 2}}",
            ],
            ["critic: its conditioning is", "tokens: 2}"],
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_does_not_fit_is_refused_by_its_name(world: World, name: str, overrides: list[str], words: list[str]):
    errors = refused(world, name, *overrides)
    assert any(all(word in error for word in words) for error in errors), errors


def test_all_sources_that_are_missing_are_told_at_once(world: World):
    errors = refused(world, DMD2, "teacher.init=/nowhere/teacher", "student.init=/nowhere/student", "critic.init=/no")
    for word in ("teacher.init = /nowhere/teacher", "student.init = /nowhere/student", "critic.init = /no:"):
        assert sum(word in error for error in errors) == 1, (word, errors)


def test_everything_that_does_not_fit_is_told_at_once(world: World):
    errors = refused(world, DMD2, "codec.mean=[0.1]", "method.gan.layers=[5]", "data.batch=100", "data.size=32")
    for word in ("teacher: codec", "method.gan.layers", "data.batch = 100"):
        assert sum(word in error for error in errors) == 1, (word, errors)


def test_a_plan_takes_no_memory_for_its_networks(world: World):
    plan = prepare(world.recipe(DMD2))
    for network in plan.networks("meta").values():
        assert {parameter.device.type for parameter in network.parameters()} == {"meta"}


def test_guidance_by_a_teacher_that_never_learnt_the_null_condition_is_refused(world: World):
    """PITFALLS, row "guidance"."""
    taught = world.train(SFT, "method.cond_dropout=0.0", into="untaught", iterations=1)
    (message,) = refused(world, DMD2, f"teacher.init={taught.path}", "method.guidance_scale=2.0")
    assert "method.guidance_scale" in message
    assert "cond_dropout" in message


def test_a_run_goes_on_with_its_own_recipe_and_refuses_another_value_by_value(world: World):
    """PITFALLS, row "resume starts over": what was trained and what is trained stay one recipe."""
    run = world.train(SFT, into="own-recipe", iterations=1)
    for change in ("seed=7", "method.cond_dropout=0.5", "student.optimizer.lr=0.1"):
        plan = prepare(world.recipe(SFT, change, iterations=2))
        with pytest.raises(UserErrors) as caught:
            train(plan, run, resume=True)
        key, _, value = change.partition("=")
        assert any(key in line and value in line and "it was" in line for line in caught.value.errors)
    assert train(prepare(world.recipe(SFT, "checkpoint.keep_last=3", iterations=2)), run, resume=True)


def test_a_run_that_cannot_begin_leaves_no_run_behind(world: World):
    place = world.path / "never-begun"
    with pytest.raises(UserError, match="samples"):
        world.train(SFT, "validation.samples=3", into="never-begun")
    assert not RunFolder(place).holds_a_run()


def test_a_teacher_of_other_images_is_refused(world: World):
    world.train(SFT, into="of-16", iterations=1)
    (message,) = refused(world, DMD2, f"teacher.init={world.path / 'of-16'}", "data.size=32")
    assert message.startswith("teacher: ")
    assert "[1, 1, 16, 16]" in message


def test_a_run_whose_updates_were_all_skipped_is_no_success(world: World):
    with pytest.raises(UserError, match="every update was skipped"):
        world.train(SFT, "codec.std=[1.0e-38]", "validation=null", into="barren", iterations=1)
    rows = read_rows(world.path / "barren" / "metrics.jsonl")
    assert any(row.kind == "warning" and "skipped 1 updates" in row.message for row in rows)


def test_a_run_does_not_go_on_from_a_teacher_that_went_on(world: World):
    teacher = world.train(SFT, into="moving", iterations=1)
    name = {"into": "its-student", "iterations": 1}
    world.train(DMD2, f"teacher.init={teacher.path}", "validation=null", **name)
    world.train(SFT, into="moving", iterations=2, resume=True)
    more = {"into": "its-student", "iterations": 2, "resume": True}
    with pytest.raises(UserErrors, match="stood at"):
        world.train(DMD2, f"teacher.init={teacher.path}", "validation=null", **more)
    kept = teacher.checkpoints / "iteration-000001"
    world.train(DMD2, f"teacher.init={kept}", "validation=null", **more)


def test_fewer_iterations_than_are_done_are_refused(world: World):
    world.train(SFT, "validation=null", into="done", iterations=2)
    with pytest.raises(UserErrors, match=r"iterations = 1: 2 are done"):
        world.train(SFT, "validation=null", into="done", iterations=1, resume=True)


def test_a_validation_that_was_cut_off_is_made_up_for_at_resume(world: World):
    run = world.train(SFT, into="cut-off", iterations=1)
    kept = [line for line in run.metrics.read_text().splitlines() if '"validation"' not in line]
    run.metrics.write_text("\n".join(kept) + "\n")
    world.train(SFT, into="cut-off", iterations=1, resume=True)
    assert [row.iteration for row in read_rows(run.metrics) if row.kind == "validation"] == [1]


def test_a_schedule_of_a_billion_iterations_is_counted_at_once(world: World):
    plan = prepare(world.recipe(DMD2, "method.critic_warmup_updates=7", "method.critic_updates=5", iterations=10**9))
    assert plan.total_updates() == {
        "student": 10**9 - 2,
        "critic": 5 * (10**9 - 2) + 7,
        "discriminator": 5 * (10**9 - 2) + 7,
    }

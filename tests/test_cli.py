"""The command line: what it prints, where it writes, how it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import typer
import yaml
from PIL import Image
from pydantic import TypeAdapter
from typer.testing import CliRunner

import fewstep
from fewstep.checkpoint.source import open_source
from fewstep.cli import app
from fewstep.cli.console import Commands
from fewstep.cli.doctor import EXTRAS, Finding, memory, packages, recipes, verdict
from fewstep.cli.pictures import changes
from fewstep.cli.reference import pages
from fewstep.cli.shipped import find_recipe, recipes_folder, shipped_recipes
from fewstep.errors import UserError
from fewstep.evaluate.evaluation import load_evaluations
from fewstep.methods import METHODS
from fewstep.models.families import build
from fewstep.models.wan.sizes import WanSection

WHOLE_RUNS = True

demo = import_module("fewstep.cli.demo")  # the package has a command of that name

ROOT = Path(fewstep.__file__).parents[2]
PROGRAM = [sys.executable, "-c", "from fewstep.cli import main; main()"]


def call(*arguments: object, code: int = 0) -> str:
    """Runs a command in this process; returns all that it printed, on one line of words."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def start(*arguments: object, cwd: Path) -> subprocess.Popen:
    """Runs a command in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    return subprocess.Popen(
        [*PROGRAM, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


# Every command


def commands(group=None, words=()):
    group = group or typer.main.get_command(app)
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


@pytest.mark.parametrize(
    ("words", "command"), list(commands()), ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_every_command_and_every_parameter_says_what_it_is_for(words, command):
    assert command.help
    assert command.help.splitlines()[0].endswith((".", ":"))
    assert [parameter.name for parameter in command.params if not parameter.help] == []
    assert "Usage" in call(*words, "--help")


def test_the_commands_that_the_readme_of_a_newcomer_needs_are_there():
    names = {" ".join(words) for words, _ in commands()}
    assert names == {
        "train", "trajectories", "sample", "stream", "eval", "export", "report", "doctor", "demo", "demo-video", "plan",
        "recipes list", "recipes copy", "config check", "config explain",
    }  # fmt: skip


def test_waiting_threads_give_the_cores_back_unless_the_user_says_otherwise():
    code = "import os; from fewstep.cli import main\ntry: main()\nfinally: print(os.environ['GOMP_SPINCOUNT'])"
    for given, expected in (({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        others = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        environment = others | {"PYTHONPATH": str(ROOT / "src")} | given
        words = [sys.executable, "-c", code, "--version"]
        ran = subprocess.run(words, env=environment, check=True, text=True, capture_output=True)
        assert ran.stdout.split()[-1] == expected


def test_help_imports_neither_torch_nor_pydantic():
    """So that it answers at once."""
    code = "import sys, fewstep.cli; print([name for name in ('torch', 'pydantic', 'numpy') if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout == "[]\n"
    )


def test_the_program_tells_its_version():
    assert call("--version") == f"fewstep {fewstep.__version__}"


def test_a_users_error_is_one_line_on_stderr_with_exit_code_2():
    result = CliRunner().invoke(app, ["train", "wan_nano/stf"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        "error: wan_nano/stf: there is no such recipe file, and no shipped recipe of that name; "
        "did you mean wan_nano/sft?\n"
    )


@pytest.mark.parametrize("arguments", [["--debug", "train", "nothing"], ["train", "nothing", "--debug"]])
def test_debug_brings_the_traceback_back_wherever_it_stands(arguments):
    assert isinstance(CliRunner().invoke(app, arguments).exception, UserError)


def _interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("cause", "code", "message"),
    [
        (lambda: TypeAdapter(int).validate_python("x"), 2, "error: Input should be a valid integer"),
        (lambda: Path("/absent/file").read_text(), 2, "error: /absent/file: No such file or directory\n"),
        (_interrupt, 130, "Stopped by Ctrl-C.\n"),
        (lambda: 1 / 0, 1, ""),
    ],
)
def test_an_error_ends_a_command_with_its_exit_code(cause, code, message):
    group = typer.Typer(cls=Commands, pretty_exceptions_enable=False)
    group.command("first")(cause)
    group.command("second")(lambda: None)
    result = CliRunner().invoke(group, ["first"])
    assert result.exit_code == code
    assert result.stderr.startswith(message)
    assert isinstance(result.exception, ZeroDivisionError) == (code == 1)


def test_an_unknown_option_or_command_has_exit_code_2():
    assert "No such option" in call("train", "wan_nano/sft", "--itrations", "3", code=2)
    assert "No such command" in call("trian", code=2)


def test_several_errors_are_a_line_each():
    result = CliRunner().invoke(app, ["config", "check", "wan_nano/sft", "lr=3", "iterations=0"])
    assert result.exit_code == 2
    first, second = result.stderr.splitlines()
    assert first.endswith("iterations = 0: is out of range; write a number at least 1")
    assert second.endswith("lr = 3: no such key; it is read two levels lower: write student.optimizer.lr")


# Recipes


def test_recipes_list_names_every_recipe_with_method_and_purpose():
    text = call("recipes", "list")
    for name, path in shipped_recipes().items():
        assert name in text
        assert yaml.safe_load(path.read_text())["method"]["name"] in {method.Section().name for method in METHODS}
    assert "A teacher for CPUs" in text


def test_a_recipe_is_found_by_name_and_by_path(tmp_path):
    expected = recipes_folder() / "wan_nano" / "sft.yaml"
    assert find_recipe("wan_nano/sft") == find_recipe("wan_nano/sft.yaml") == find_recipe(str(expected)) == expected


def test_recipes_copy_keeps_the_comments_and_overwrites_only_when_asked(tmp_path):
    target = tmp_path / "new" / "mine.yaml"
    call("recipes", "copy", "wan_nano/sft", target)
    assert target.read_text() == find_recipe("wan_nano/sft").read_text()
    target.write_text("changed")
    assert "exists; write another file, or --overwrite" in call("recipes", "copy", "wan_nano/sft", target, code=2)
    assert target.read_text() == "changed"
    call("recipes", "copy", "wan_nano/sft", target, "--overwrite")
    assert target.read_text() != "changed"
    call("recipes", "copy", "wan_nano/dmd2", tmp_path)
    assert (tmp_path / "dmd2.yaml").is_file()


def test_config_check_judges_every_recipe_and_fails_if_one_does(tmp_path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: x\n")
    text = call("config", "check", broken, "wan_nano/sft", code=2)
    assert "sft.yaml: fine (sft, 4000 iterations)" in text
    assert f"{broken}:1: iterations: is missing; write iterations: <whole number>" in text
    assert "fine (sft, 5 iterations)" in call("config", "check", "wan_nano/sft", "iterations=5")


def test_config_explain_shows_value_source_and_meaning():
    text = call("config", "explain", "wan_nano/sft", "student.optimizer.lr=1e-4")
    assert "student.optimizer.lr = 0.0001 (override; > 0) Full learning rate" in text
    assert "student.schedule.warmup_updates = 50 (line 13; updates, >= 0)" in text
    assert "student.optimizer.eps = 1e-08 (default; > 0)" in text
    assert "Not read: none." in text


# Doctor


def test_doctor_says_what_is_there_and_how_to_get_the_rest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = call("doctor")
    for extra in EXTRAS:
        assert f"extra {extra}" in text
    assert "Ready." in text


def test_the_verdict_of_doctor_counts_what_is_missing_apart_from_what_is_for_gpus():
    found = [Finding("", state, "") for state in ("ok", "missing", "gpu", "gpu", "later", "gpu")]
    assert verdict(found) == (
        "Ready. 1 thing is missing; each line says what for. 3 recipes are for a GPU. 1 thing can wait or come after "
        "another."
    )
    assert verdict(found[:1]) == "Ready for everything."


@pytest.mark.parametrize(
    ("recipe", "starts", "message"),
    [
        (
            "wan_nano_video/teacher_forcing",
            [],
            "student.init = runs/nano-video-teacher: it is not there; what recipe wan_nano_video/sft makes comes with "
            "fewstep: write student.init={shipped}/wan_nano_video/teacher, or train it: fewstep train "
            "wan_nano_video/sft",
        ),
        (
            "wan_nano/dmd2",
            [],
            "teacher.init = runs/nano-teacher: it is not there; what recipe wan_nano/sft makes comes with fewstep: "
            "write teacher.init={shipped}/wan_nano/teacher, or train it: fewstep train wan_nano/sft",
        ),
        (
            "wan_nano_video/self_forcing",
            ["teacher.init={shipped}/wan_nano_video/teacher"],
            "student.init = runs/nano-video-consistency: it is not there; recipe wan_nano_video/consistency makes it: "
            "fewstep train wan_nano_video/consistency",
        ),
    ],
)
def test_a_missing_run_of_a_shipped_recipe_names_what_comes_along_or_the_recipe(
    recipe, starts, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    starts = [start.format(shipped=recipes_folder()) for start in starts]
    assert call("train", recipe, *starts, "--dry-run", code=2) == f"error: {message.format(shipped=recipes_folder())}"


def test_the_run_that_the_recipe_itself_writes_is_never_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("nano-student", "nano-studies"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    text = call("train", "wan_nano/dmd2", "teacher.init=runs/nano-studen", "--dry-run", code=2)
    assert "did you mean runs/nano-studies?" in text
    assert "runs/nano-student" not in text.replace("runs/nano-studen ", "")


def test_a_missing_model_that_comes_along_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"write {recipes_folder()}/wan_nano/teacher, or train it" in call("sample", "runs/nano-teacher", code=2)


def test_doctor_names_missing_extras_and_installs_from_the_checkout(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = {finding.topic: finding for finding in packages()}
    for extra in EXTRAS:
        assert found[f"extra {extra}"].state == "missing"
        assert found[f"extra {extra}"].remedy == f"pip install -c constraints.txt -e '.[{extra}]'"


def test_doctor_says_that_a_compiled_recipe_needs_a_gpu(tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = {finding.topic: finding for finding in recipes()}
    assert (found["wan_small/sft"].state, found["wan_small/sft"].detail) == ("gpu", "needs a GPU")
    assert found["wan_nano_video/consistency"].detail == "starts from runs/nano-video-causal, not trained yet"
    assert found["wan_nano_video/consistency"].remedy == "first fewstep train wan_nano_video/teacher_forcing"
    taught, teacher = found["wan_nano/dmd2"], recipes_folder() / "wan_nano/teacher"
    assert taught.state == "missing" or taught.detail == f"can run: fewstep train wan_nano/dmd2 teacher.init={teacher}"
    assert found["wan_1_3b_video/sid"].remedy == "how many of which kind: fewstep plan wan_1_3b_video/sid"
    assert found["wan_nano_video/sft"].state == "gpu"  # uncompiled, and yet hours of a CPU
    assert "fewstep train wan_small/sft engine.compile=null" in found["wan_small/sft"].remedy
    assert "GPU" not in found["wan_nano/sft"].detail


def test_doctor_knows_exactly_the_extras_that_can_be_installed():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = {name: needs for name, needs in project["optional-dependencies"].items() if name != "dev"}
    assert set(EXTRAS) == set(optional)
    for extra, (names, _) in EXTRAS.items():
        assert set(names) <= {need.split(">")[0] for need in optional[extra]}


def test_the_memory_that_is_free_is_part_of_all_there_is():
    available, total = memory()
    assert 0 < available < total


# A run, from training to export


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Fifty grey images of 8x8 in each of three classes."""
    folder, generator = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for name in ("bag", "cap", "hat"):
        (folder / name).mkdir()
        for index in range(50):
            Image.fromarray(generator.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / name / f"{index}.png")
    return folder


def tiny(images: Path, tmp_path: Path) -> list[str]:
    """Overrides that make a shipped recipe of images tiny."""
    return [
        f"data={{name: image_folder, path: {images}, size: 8, channels: 1, batch: 5, cache: {tmp_path / 'cache'}}}",
        "iterations=3",
        "checkpoint={every: 2}",
        f"validation={{every: 3, samples: 66, steps: [4], extractor: {{updates: 3, cache: {tmp_path / 'judge'}}}}}",
        "observe={every: 1, tensorboard: false}",
    ]


TINY_MODEL = (
    "student.model={family: wan, size: nano, patch: [1, 2, 2], dim: 24, layers: 2, heads: 3, ffn_dim: 32, text_dim: 8, "
    "freq_dim: 16, conditioner: {name: class_label, classes: 3}}"
)


@pytest.fixture(scope="module")
def run(images, tmp_path_factory) -> Path:
    """A tiny teacher, trained by the command."""
    folder = tmp_path_factory.mktemp("runs")
    text = call("train", "wan_nano/sft", *tiny(images, folder), TINY_MODEL, "--run", folder / "teacher")
    assert "finished after 3 of 3 iterations" in text
    return folder / "teacher"


@pytest.fixture(scope="module")
def student(images, run) -> Path:
    """Its student of 4 steps."""
    place = run.parent / "student"
    call(
        "train",
        "wan_nano/dmd2_gan",
        *tiny(images, run.parent),
        f"teacher.init={run}",
        "method.critic_updates=2",
        "--run",
        place,
    )
    return place


def test_a_dry_run_shows_the_plan_and_writes_nothing(images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = call("train", "wan_nano/sft", *tiny(images, tmp_path), TINY_MODEL, "--dry-run")
    network = build(WanSection.model_validate(yaml.safe_load(TINY_MODEL.partition("=")[2])), "meta")
    assert f"student {sum(parameter.numel() for parameter in network.parameters()):,} " in text
    assert "phases of the last iteration: student" in text
    assert not (tmp_path / "runs").exists()


def test_a_run_is_never_overwritten_and_a_finished_one_can_be_made_longer(images, run):
    text = call("train", "wan_nano/sft", *tiny(images, run.parent), TINY_MODEL, "--run", run, code=2)
    assert "already holds a run" in text
    assert "go on with it by" in call("train", run, code=2)
    assert "finished after 5 of 5 iterations" in call("train", "--resume", run, "iterations=5")
    assert (run / "checkpoints" / "iteration-000005" / "complete.json").is_file()


def test_resume_without_a_run_is_an_error(tmp_path):
    assert "holds no run" in call("train", "wan_nano/sft", "--run", tmp_path / "none", "--resume", code=2)


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_go_on(images, tmp_path):
    arguments = [*tiny(images, tmp_path), TINY_MODEL, "iterations=100000", "--run", tmp_path / "long"]
    process = start("train", "wan_nano/sft", *arguments, cwd=tmp_path)
    metrics = tmp_path / "long" / "metrics.jsonl"
    end = time.monotonic() + 120
    while not (metrics.is_file() and metrics.stat().st_size) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
    assert f"fewstep train --resume {tmp_path / 'long'}" in out
    assert len(list((tmp_path / "long" / "checkpoints").glob("iteration-*/complete.json"))) >= 1


def test_report_writes_one_page(run):
    assert f"Wrote {run / 'report.html'}" in call("report", run)
    assert "is not the folder of a run" in call("report", run.parent, code=2)


# Sampling


def test_sample_needs_no_option_and_says_where_it_wrote(student, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = call("sample", student)
    assert "24 samples" in text
    assert "4 steps (renoise), guidance 1, 4 network calls" in text
    assert "Wrote samples/student-steps4-seed0.png" in text
    assert "warning" not in text
    with Image.open(tmp_path / "samples" / "student-steps4-seed0.png") as grid:
        assert grid.width > 8 * 48
        assert grid.height > 3 * 48


def test_every_setting_that_is_asked_for_has_a_picture_of_its_own(student, tmp_path):
    for options in ([], ["--steps", 4], ["--raw"], ["--guidance", 1], ["--guidance", 1.5], ["--num", 5]):
        call("sample", student, "--out", tmp_path, *options)
    call("sample", student, "--out", tmp_path, "--label", "bag", "--raw", "--steps", 2, "--seed", 7)
    assert {path.name for path in tmp_path.iterdir()} == {
        "student-steps4-seed0.png",
        "student-steps4-seed0-raw.png",
        "student-steps4-seed0-guidance1.5.png",
        "student-steps4-seed0-num5.png",
        "student-steps2-seed7-label-bag-raw.png",
    }
    assert changes(["T-shirt/top"], raw=False, guidance=None, num=None) == ["label-T-shirt_top"]


def test_run_checkpoint_and_export_give_the_same_samples(student, tmp_path):
    """PITFALLS, row 'sampling differs from training': what runs without flags is what was trained and exported."""
    call("export", student, tmp_path / "exported")
    models = {
        "run": student,
        "checkpoint": student / "checkpoints" / "iteration-000003",
        "export": tmp_path / "exported",
    }
    for name, model in models.items():
        call("sample", model, "--out", tmp_path / f"{name}.png", "--seed", 3, "--batch", 5 if name == "run" else 100)
    pictures = {name: (tmp_path / f"{name}.png").read_bytes() for name in models}
    assert pictures["run"] == pictures["checkpoint"] == pictures["export"]
    call("sample", student, "--out", tmp_path / "other.png", "--seed", 4)
    assert (tmp_path / "other.png").read_bytes() != pictures["run"]


def test_samples_are_those_of_the_averaged_weights_unless_raw(student, tmp_path):
    import torch

    source = open_source(student)
    ema, raw = source.weights("ema"), source.weights("raw")
    assert any(not torch.equal(ema[name], raw[name]) for name in ema)
    call("sample", student, "--out", tmp_path / "ema.png")
    assert "raw weights" in call("sample", student, "--raw", "--out", tmp_path / "raw.png")
    call("export", student, tmp_path / "exported", "--raw")
    call("sample", tmp_path / "exported", "--out", tmp_path / "exported.png")
    assert (tmp_path / "exported.png").read_bytes() == (tmp_path / "raw.png").read_bytes()


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        (["--steps", 20], "sampled in 20 steps"),
        (["--guidance", 5], "sampled with guidance_scale 5.0; the network was trained for 1.0"),
        (["--steps", 4, "--guidance", 1], None),
    ],
)
def test_a_setting_that_departs_from_the_trained_one_warns(student, tmp_path, options, warning):
    """PITFALLS, row 'sampling knobs'."""
    result = CliRunner().invoke(app, ["sample", str(student), "--out", str(tmp_path / "x.png"), *map(str, options)])
    assert result.exit_code == 0, result.output
    if warning is None:
        assert "warning" not in result.stderr
    else:
        assert f"warning: {warning}" in result.stderr
        assert "trained for" in result.stderr


def test_an_option_without_effect_says_so_and_an_impossible_one_is_refused(run, tmp_path):
    call("export", run, tmp_path / "raw", "--raw")
    assert "--raw has no effect" in call("sample", tmp_path / "raw", "--raw", "--out", tmp_path / "x.png")
    call("export", run, tmp_path / "ema")
    assert "holds the averaged weights" in call(
        "sample", tmp_path / "ema", "--raw", "--out", tmp_path / "x.png", code=2
    )
    assert "no such device; write cpu" in call("sample", run, "--device", "cuda:7", code=2)


def test_labels_are_chosen_by_name_or_number_and_single_files_are_named(run, tmp_path):
    text = call("sample", run, "--label", "Hat", "--label", 0, "--num", 5, "--single-files", "--out", tmp_path / "s")
    assert "5 samples" in text
    names = sorted(path.name for path in (tmp_path / "s" / "teacher-steps20-seed0-label-hat-bag-num5").iterdir())
    assert names == ["00000-hat.png", "00001-bag.png", "00002-hat.png", "00003-bag.png", "00004-hat.png"]
    assert "no such class; did you mean 'cap'? (or a number from 0 to 2)" in call(
        "sample", run, "--label", "cup", code=2
    )


def test_every_sample_is_in_the_grid(run, tmp_path):
    call("sample", run, "--label", "cap", "--num", 35, "--out", tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.height > 3 * 48
        assert grid.width > 16 * 48


def test_what_is_no_model_is_refused(tmp_path):
    assert "does not exist" in call("sample", tmp_path / "nothing", code=2)
    assert "is not a model" in call("sample", tmp_path, code=2)


# Export


def test_export_writes_what_sample_reads_and_overwrites_only_when_asked(student, tmp_path):
    assert "Exported" in call("export", student, tmp_path / "out")
    assert (tmp_path / "out" / "fewstep.json").is_file()
    assert "--overwrite" in call("export", student, tmp_path / "out", code=2)
    call("export", student, tmp_path / "out", "--overwrite", "--dtype", "bfloat16")


# Evaluation


def test_eval_measures_models_on_the_same_noise_and_keeps_the_numbers(run, student, tmp_path):
    place = tmp_path / "evaluation.json"
    text = call(
        *("eval", student, "--compare", run, "--num-samples", 70, "--steps", 1, "--steps", 4, "--seeds", 2),
        *("--per-stop", "--out", place),
    )
    rows = load_evaluations(place)
    assert [(row.name, row.num_steps) for row in rows] == [
        ("real data", 0),
        ("teacher", 20),
        ("student", 1),
        ("student", 4),
    ]
    assert [row.network_calls for row in rows] == [0, 20, 1, 4]
    assert [len(row.stops) for row in rows] == [0, 0, 1, 4]
    assert rows[3].seeds == (0, 1)
    assert rows[3].sigmas == (1.0, 0.75, 0.5, 0.25)
    assert len({row.extractor for row in rows}) == 1
    assert "predictions of x0 at every step" in text
    assert "--num-samples = 10: " in call("eval", student, "--num-samples", 10, code=2)


def test_too_few_items_to_judge_by_are_found_before_a_judge_is_trained(images, run, tmp_path):
    """A judge needs one item more than it has 64 features, and twice that where data are compared with themselves."""
    few = tmp_path / "few"
    for name in ("bag", "cap", "hat"):
        (few / name).mkdir(parents=True)
        for index in range(20):
            shutil.copy(images / name / f"{index}.png", few / name)
    cache = tmp_path / "cache"
    data = f"data={{name: image_folder, path: {few}, size: 8, channels: 1, batch: 5, cache: {cache}}}"
    words = ["train", "wan_nano/sft", data, "student.model.conditioner.classes=3", "--dry-run"]
    words += ["--run", tmp_path / "r", f"validation.extractor.cache={cache}"]
    assert (
        "data: 60 items are too few to judge samples by; give 65 or more in a folder that data.test_path names, or "
        "write validation=null" in call(*words, code=2)
    )
    assert f"data.test_path = {few}: 60 items" in call(*words, f"data.test_path={few}", code=2)
    assert "60 items" in call(*words, "validation=null")
    assert "validation.samples = 64: " in call(*words, f"data.test_path={images}", "validation.samples=64", code=2)
    recipe = tmp_path / "few.yaml"
    recipe.write_text((run / "recipe.yaml").read_text().replace(str(images), str(few)))
    refused = call("eval", run, "--recipe", recipe, code=2)
    assert f"{few}: 60 items are too few to judge samples by; 130 or more are needed, or a recipe" in refused
    assert not list(cache.glob("*classifier*"))


def test_eval_of_an_export_asks_for_the_data_and_refuses_others(student, tmp_path):
    call("export", student, tmp_path / "exported")
    assert "name a recipe of that data by --recipe" in call("eval", tmp_path / "exported", code=2)
    assert "10 of shape" in call("eval", tmp_path / "exported", "--recipe", "wan_nano/sft", code=2)
    place = tmp_path / "evaluation.json"
    call("eval", tmp_path / "exported", "--recipe", student / "recipe.yaml", "--num-samples", 70, "--out", place)
    assert [row.num_steps for row in load_evaluations(place)] == [0, 4]


def test_the_demo_ends_with_a_table_pictures_and_a_report(run, student):
    """The last third of the demo, on tiny models."""
    picture = demo.compare(run, student, num_samples=70)
    rows = load_evaluations(student / "evaluation.json")
    assert [row.num_steps for row in rows] == [0, 20, 4, 2, 1, 4]
    assert {row.num_samples for row in rows} == {70}
    assert "real data" in (student / "report.html").read_text()
    with Image.open(picture) as shown:
        assert shown.height > 7 * 48


def test_a_demo_that_is_begun_again_says_where_it_goes_on(images, tmp_path, capsys):
    words = [*tiny(images, tmp_path), TINY_MODEL, "validation=null"]
    for iterations, told in ((2, ""), (3, "goes on from iteration 2 of 3"), (3, "is finished")):
        demo.train("wan_nano/sft", tmp_path / "teacher", [*words, f"iterations={iterations}"], "fewstep demo")
        text = " ".join(capsys.readouterr().out.split())
        assert (f"{tmp_path / 'teacher'} is there already: it {told}." in text) == bool(told)


def test_an_interrupted_demo_names_the_command_that_goes_on():
    assert demo.command("demo", Path("my runs"), False) == "fewstep demo --out 'my runs'"
    assert demo.command("demo-video", Path("a"), True) == "fewstep demo-video --out a --train-teacher"


# The reference pages


@pytest.mark.parametrize("name", ["cli.md", "config.md", "hooks.md"])
def test_the_reference_page_is_what_the_code_says(name):
    page = ROOT / "docs" / "reference" / name
    assert page.read_text(encoding="utf-8") == pages()[name], "run `python -m fewstep.cli.reference`"

"""The commands on clips: a tiny causal chain, sampled, streamed and judged by the command line."""

from __future__ import annotations

import json
import signal
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from PIL import Image

from fewstep.checkpoint.source import open_source
from fewstep.cli.model import load_model
from fewstep.errors import UserErrors
from fewstep.evaluate.evaluation import load_evaluations
from fewstep.rng import Draw
from fewstep.rollout.stream import Stream
from tests.recipes.tiny_runs import World
from tests.test_cli import call, start

WHOLE_RUNS = True

demo_video = import_module("fewstep.cli.demo_video")  # the package has a command of that name
SELF_FORCING = "wan_nano_video/self_forcing"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    made = World.make(tmp_path_factory.mktemp("video") / "world")
    for name in ("sft", "teacher_forcing", "consistency", "self_forcing"):
        made.train(f"wan_nano_video/{name}", "sampling.shift=2.0")
    return made


@pytest.fixture(scope="module")
def student(world: World) -> Path:
    return world.run(SELF_FORCING).path


def frames_in(path: Path) -> int:
    with Image.open(path) as picture:
        return getattr(picture, "n_frames", 1)


def test_sample_writes_clips_that_play(student, tmp_path):
    text = call("sample", student, "--num", 2, "--out", tmp_path, "--single-files")
    grid = tmp_path / "self_forcing-steps3-seed0-num2.gif"
    assert frames_in(grid) == 9
    assert "network calls" in text
    assert grid.with_suffix(".png").is_file()
    assert len(list((tmp_path / grid.stem).iterdir())) == 2


def test_a_causal_model_makes_clips_of_another_length_and_a_bidirectional_one_does_not(world, student, tmp_path):
    call("sample", student, "--num", 1, "--frames", 15, "--out", tmp_path / "long.gif")
    assert frames_in(tmp_path / "long.gif") == 15
    refused = call("sample", world.run("wan_nano_video/sft").path, "--frames", 15, code=2)
    assert "--frames 15" in refused
    assert "9 frame(s) as a whole" in refused
    assert "10 latent frames cannot be cut into blocks of 3" in call("sample", student, "--frames", 10, code=2)


def test_a_file_of_the_wrong_kind_is_refused(student, tmp_path):
    assert "the model makes clips; write a folder, or a file of .gif or .mp4" in call(
        "sample", student, "--out", tmp_path / "a.png", code=2
    )


def test_stream_writes_whole_blocks_and_reports_its_speed(student, tmp_path):
    text = call("stream", student, "--frames", 20, "--label", "Bag, circle", "--out", tmp_path / "s.gif")
    assert frames_in(tmp_path / "s.gif") == 21
    assert "21 frames of" in text
    assert "first frame after" in text
    assert "frames per second" in text


def test_a_class_changes_at_its_block_and_not_before(student, tmp_path):
    call("stream", student, "--frames", 18, "--label", "0", "--out", tmp_path / "plain.gif")
    call("stream", student, "--frames", 18, "--label", "0", "--label", "7@9", "--out", tmp_path / "switched.gif")
    plain, switched = (frames(tmp_path / name) for name in ("plain.gif", "switched.gif"))
    assert plain[:9] == switched[:9]
    assert plain[9:] != switched[9:]
    assert "frame 10 is inside a block; write 9 or 12" in call("stream", student, "--label", "0@10", code=2)
    assert "the stream ends at 18" in call("stream", student, "--frames", 18, "--label", "0@999999999", code=2)
    assert "another class is shown from frame 0 on" in call("stream", student, "--label", 1, "--label", 2, code=2)
    both = call("stream", student, "--label", "No such thing", "--label", "0@10", code=2)
    assert "no such class" in both
    assert "frame 10 is inside a block" in both
    call("stream", student, "--frames", 18, "--label", "7@9", "--out", tmp_path / "later.gif")
    assert frames(tmp_path / "later.gif") == switched


def frames(path: Path) -> list[bytes]:
    found = []
    with Image.open(path) as picture:
        for number in range(getattr(picture, "n_frames", 1)):
            picture.seek(number)
            found.append(picture.convert("L").tobytes())
    return found


def test_stream_and_sample_make_the_same_clip(student):
    """A training rollout at the last step, the sampler and the stream are one loop (invariant 37)."""
    model = load_model(student)
    cond = model.conditioner.condition(torch.tensor([3]))
    draw = Draw(5, "sample", 0, torch.zeros(1, dtype=torch.int64))
    sampler = model.sampler(model.sampling)
    whole = sampler.sample(model.role, cond, None, draw).x0
    blocks = list(Stream(sampler, model.role, cond, draw, num_blocks=3))
    assert torch.equal(torch.cat(blocks, 1), whole)


def test_ctrl_c_ends_a_stream_and_keeps_what_was_made(student, tmp_path):
    pytest.importorskip("av")
    path = tmp_path / "long.mp4"
    process = start("stream", student, "--frames", 1_000_000, "--out", path, cwd=tmp_path)
    while process.poll() is None and not any(tmp_path.iterdir()):
        time.sleep(0.2)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Stopping after this block" in err
    assert "frames per second" in out
    assert path.stat().st_size > 500


def test_what_a_file_cannot_have_is_refused_before_the_stream_begins(student, tmp_path):
    text = call("stream", student, "--frames", 1_000_000, "--fps", 60, "--out", tmp_path / "a.gif", code=2)
    assert "a GIF shows at most 50 frames a second" in text
    text = call("stream", student, "--frames", 3, "--fps", 0.0001, "--out", tmp_path / "a.gif", code=2)
    assert "a frame of a GIF lasts at most 655.35 s, so that fps = 0.0001 is too low; write 0.00153 or more" in text
    assert "steps = 1001: write a number from 1 to 1000" in call("stream", student, "--steps", 1001, code=2)


@pytest.mark.parametrize("label", ["@3", "Bagg, circle@3", "99@3", "", "Bagg"])
def test_a_class_that_is_not_known_is_named_as_it_was_given(student, label):
    text = call("stream", student, "--label", label, code=2)
    assert f"--label {label or repr('')}: the model has no such class; " in text
    assert "(or a number from 0 to 19)" in text


@pytest.mark.parametrize(
    ("label", "hint"),
    [
        ("Coat", "did you mean 'Coat, bounce' or 'Coat, circle'? (or"),
        ("bag, cirkle", "did you mean 'Bag, circle'? (or"),
        ("Ankle boot", "did you mean 'Ankle boot, bounce' or 'Ankle boot, circle'? (or"),
        ("zzz", "the classes are 'T-shirt/top, bounce', 'T-shirt/top, circle', 'Trouser, bounce', "),
    ],
)
def test_classes_are_quoted_and_those_that_begin_so_are_named(student, label, hint):
    assert hint in call("sample", student, "--label", label, code=2)


def test_a_gif_and_an_mp4_of_a_stream_are_of_one_size(student, tmp_path):
    """Each scaled up by the same whole number."""
    av = pytest.importorskip("av")
    for name in ("a.gif", "a.mp4"):
        call("stream", student, "--frames", 3, "--out", tmp_path / name)
    with Image.open(tmp_path / "a.gif") as gif, av.open(str(tmp_path / "a.mp4")) as film:
        assert gif.size == (film.streams.video[0].width, film.streams.video[0].height) == (128, 128)


def test_another_number_of_steps_than_the_trained_one_warns(student, tmp_path):
    text = call("stream", student, "--frames", 6, "--steps", 1, "--out", tmp_path / "a.gif")
    assert "the network was trained for 3" in text


def test_a_run_does_not_go_on_with_another_network(world):
    """Even where the recipe says the same: weights that come from another run bring their own blocks."""
    plain, leave = "validation=null", "student.causal=null"
    frame_wise = world.train("wan_nano_video/teacher_forcing", plain, "student.causal.block_frames=1", into="one")
    first = f"student.init={world.run('wan_nano_video/consistency').path}"
    run = world.train(SELF_FORCING, plain, leave, first, into="goes-on")
    again = (plain, leave, f"student.init={frame_wise.path}")
    with pytest.raises(UserErrors, match=r"the network of student\.causal\.block_frames = 1: it was 3"):
        world.train(SELF_FORCING, *again, iterations=4, into="goes-on", resume=True)
    assert open_source(run.path).model["causal"]["block_frames"] == 3


def test_a_student_that_continues_clips_is_sampled_judged_compared_and_exported(world, tmp_path):
    run = world.train(SELF_FORCING, "sampling.given_frames=3", into="continues")
    call("sample", run.path, "--num", 2, "--out", tmp_path / "a.gif")
    call("eval", run.path, "--num-samples", 66, "--compare", world.run("wan_nano_video/sft").path)
    assert (run.samples / "compare.png").is_file()
    call("export", run.path, tmp_path / "exported")
    assert "name a recipe of that data by --recipe" in call("sample", tmp_path / "exported", "--num", 1, code=2)
    call("stream", tmp_path / "exported", "--recipe", run.recipe, "--frames", 6, "--out", tmp_path / "b.gif")
    text = call("stream", run.path, "--frames", 6, "--out", tmp_path / "c.gif")
    assert f"6 frames of {run.path} (ema weights), the first 3 of them given: 3 steps" in text
    assert frames(tmp_path / "b.gif") == frames(tmp_path / "c.gif")
    assert frames_in(tmp_path / "b.gif") == 6


def test_rolling_students_are_compared_at_steps_that_they_can_take(world):
    rolls = ("sampling.steps=4", "validation.steps=[4]", "sampling.rolling_blocks=2", "student.causal.window=9")
    run = world.train(SELF_FORCING, *rolls, into="rolls")
    call("eval", run.path, "--num-samples", 66, "--compare", world.run("wan_nano_video/sft").path)
    assert (run.samples / "compare.png").is_file()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["critic.init=student"], "teacher and critic are compared, so both see whole clips or both are causal"),
        (
            ["teacher.init={renumbers}", "student.init={renumbers}", "student.causal=null", "method.gan={{}}"],
            "method.gan.features = critic: that network renumbers what each block sees beside a sink",
        ),
    ],
)
def test_networks_that_do_not_go_together_are_refused(world, overrides, message):
    place = world.path / "renumbers"
    if not place.exists():
        causal = "student.causal={block_frames: 3, window: 4, sink: 1, positions: reindexed}"
        world.train("wan_nano_video/teacher_forcing", "validation=null", causal, into="renumbers")
    more = [text.format(renumbers=place) for text in overrides]
    refused = world.path / "refused"
    text = call("train", SELF_FORCING, *world.overrides(SELF_FORCING, 3), *more, "--run", refused, code=2)
    assert message in text


def test_a_prompt_switch_can_see_the_last_frames_anew(student, tmp_path):
    switch = ("--frames", 18, "--label", "7@9")
    call("stream", student, *switch, "--out", tmp_path / "keep.gif")
    call("stream", student, *switch, "--recache", "--out", tmp_path / "recache.gif")
    keep, recache = (frames(tmp_path / f"{name}.gif") for name in ("keep", "recache"))
    assert keep[:9] == recache[:9]
    assert keep[9:] != recache[9:]


def test_streams_of_other_settings_are_other_files(student, tmp_path):
    for more in ((), ("--label", "7"), ("--recache",), ("--frames", 6)):
        call("stream", student, "--frames", 3, *more, "--out", tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_dry_run_says_how_the_student_sees(world):
    text = call("train", SELF_FORCING, *world.overrides(SELF_FORCING, 3), "--dry-run")
    assert "student sees blocks of 3 frames, a window of 6" in text
    text = call("train", "wan_nano_video/sft", *world.overrides("wan_nano_video/sft", 3), "--dry-run")
    assert "student sees whole clips" in text


def test_a_bidirectional_model_cannot_be_streamed(world):
    teacher = world.run("wan_nano_video/sft").path
    assert (
        f"makes whole clips and cannot be streamed; make it causal: fewstep train wan_nano_video/teacher_forcing "
        f"student.init={teacher}; or sample it: fewstep sample {teacher}"
    ) in call("stream", teacher, code=2)


def test_a_method_on_rollouts_warns_of_a_student_that_never_made_a_clip_block_by_block(world):
    """It does not get anywhere from there, as docs/methods.md measured."""
    words = ["train", SELF_FORCING, *world.overrides(SELF_FORCING, 3), "--dry-run"]
    teacher = world.run("wan_nano_video/sft").path
    for init in (teacher, "teacher"):
        text = call(*words, f"student.init={init}", "student.causal={block_frames: 3}")
        assert f"warning: student.init = {init} sees whole clips, and 'dmd2' does not get anywhere" in text
    assert "warning" not in call(*words)


def test_lengths_that_cannot_be_judged_name_some_that_can(student):
    """Whole blocks of 3 frames, and one window of 9 or more."""
    for length, near in ((5, "9 or 12"), (10, "9 or 12"), (14, "12 or 15")):
        assert f"--long {length}: write {near}, or another" in call("eval", student, "--long", length, code=2)


def test_eval_judges_clips_by_their_motion_too(world, student, tmp_path):
    place = tmp_path / "evaluation.json"
    text = call("eval", student, "--num-samples", 66, "--long", 21, "--out", place)
    assert "clips of 21 frames, window by window" in text
    _, judged = load_evaluations(place)
    assert judged.motion_error is not None
    assert [row.first_frame for row in judged.drift] == [0, 9, 12]


def test_frames_that_do_not_divide_into_blocks_are_refused_before_any_weight_is_loaded(world):
    text = call(
        "train",
        "wan_nano_video/teacher_forcing",
        *world.overrides("wan_nano_video/teacher_forcing", 3),
        "student.causal={block_frames: 4}",
        "--run",
        world.path / "refused",
        code=2,
    )
    assert "9 latent frames cannot be cut into blocks of 4 frames" in text
    assert not (world.path / "refused").exists()


def test_a_causal_method_without_a_causal_student_is_refused(world):
    text = call(
        "train",
        "wan_nano_video/teacher_forcing",
        *world.overrides("wan_nano_video/teacher_forcing", 3),
        "student.causal=null",
        "--run",
        world.path / "refused",
        code=2,
    )
    assert "method 'teacher_forcing' trains a causal student; write student.causal" in text


def test_consistency_wants_a_teacher_that_sees_what_the_student_sees(world):
    text = call(
        "train",
        "wan_nano_video/consistency",
        *world.overrides("wan_nano_video/consistency", 3),
        f"teacher.init={world.run('wan_nano_video/sft').path}",
        "student.causal={block_frames: 3}",
        "--run",
        world.path / "refused",
        code=2,
    )
    assert "the student sees blocks of 3 frames, the teacher whole clips" in text


def test_an_export_of_a_causal_student_streams_as_the_run_does(student, tmp_path):
    call("export", student, tmp_path / "exported")
    said = json.loads((tmp_path / "exported" / "fewstep.json").read_text())
    assert (said["block_frames"], said["window"], said["sink"]) == (3, 6, 0)
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "fewstep stream . --label 0" in card
    assert "only fewstep runs it as it was trained" in card
    assert "library_name: fewstep" in card
    assert "which see a window of 6, a sink of 0, positions reindexed" in card
    for model, name in ((student, "run.gif"), (tmp_path / "exported", "export.gif")):
        call("stream", model, "--frames", 12, "--out", tmp_path / name)
    assert frames(tmp_path / "run.gif") == frames(tmp_path / "export.gif")


def test_the_video_demo_ends_with_tables_clips_and_reports(world, tmp_path, monkeypatch, capsys):
    recipes = {"teacher": "sft", **{name: recipe for name, recipe, *_ in demo_video.STAGES}}
    places = {name: tmp_path / name for name in recipes}
    for name, place in places.items():
        place.symlink_to(world.run(f"wan_nano_video/{recipes[name]}").path)
    for name, value in {"NUM_SAMPLES": 66, "NUM_LONG": 66, "TIMES_LONGER": 2}.items():
        monkeypatch.setattr(demo_video, name, value)
    monkeypatch.setattr(demo_video, "JUDGED", (("teacher", 3), ("causal", 3), ("student", None)))
    clips = demo_video.compare(places)
    text = " ".join(capsys.readouterr().out.split())
    assert all(word in text for word in ("Calls", "Frechet", "Motion", "From frame"))
    assert frames_in(clips[0]) == 18
    assert {clip.suffix for clip in clips} >= {".gif"}
    assert len(load_evaluations(tmp_path / "student" / "evaluation.json")) == 4
    assert "Motion error" in (tmp_path / "student" / "report.html").read_text()

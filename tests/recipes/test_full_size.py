"""The recipes of the causal chain at full size: they say what was published, and each of them runs, at tiny size."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewstep.assemble import batch_source
from fewstep.checkpoint.source import open_source
from fewstep.cli.shipped import shipped_recipes
from fewstep.config import Recipe, load_recipe
from fewstep.data.latents import LatentFolder
from fewstep.describe import activations_gib, describe
from fewstep.engines.roles import Role
from fewstep.errors import UserError, UserErrors
from fewstep.methods.sft import drop_condition
from fewstep.models.families import build
from fewstep.prepare import prepare
from fewstep.rng import Draw
from fewstep.train import train
from fewstep.trajectories import folder_of
from tests.data.latent_files import drawn, write_folder, write_shard
from tests.recipes.tiny_latents import BASE, FAMILY, RUNS, LatentWorld
from tests.recipes.tiny_runs import values
from tests.test_cli import call

WHOLE_RUNS = True

NAMES = [name.partition("/")[2] for name in shipped_recipes() if name.startswith(f"{FAMILY}/")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> LatentWorld:
    return LatentWorld.make(tmp_path_factory.mktemp("full-size"))


def shipped(name: str) -> Recipe:
    return load_recipe(shipped_recipes()[f"{FAMILY}/{name}"])


# What was published


def test_the_chain_has_a_recipe_for_every_stage():
    assert sorted(NAMES) == sorted({name for name, *_ in RUNS.values()})


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_the_latents_the_vae_and_the_batch_that_were_published(name: str):
    """METHODS.md section 3; the statistics are those of the VAE that diffusers ships."""
    import inspect

    from diffusers import AutoencoderKLWan

    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    recipe = shipped(name)
    assert list(recipe.codec.mean) == defaults["latents_mean"].default
    assert list(recipe.codec.std) == defaults["latents_std"].default
    assert len(recipe.codec.mean) == len(recipe.codec.std) == 16
    assert (recipe.data.name, recipe.codec.name, recipe.data.batch) == ("latents", "latents", 64)
    engine = recipe.engine
    assert (engine.recompute, engine.compile, engine.micro_batch) == (True, "blocks", 1)
    assert recipe.sampling.shift == 5.0
    assert recipe.student.optimizer.lr == 2e-6
    assert recipe.student.optimizer.clip == 10.0
    assert recipe.student.optimizer.weight_decay == (0.0 if name == "sid" else 0.01)
    assert recipe.student.optimizer.betas == (0.9 if name == "ode_init" else 0.0, 0.999)
    assert recipe.ema.decay == 0.99
    assert recipe.validation is None


@pytest.mark.parametrize("name", ["teacher_forcing", "diffusion_forcing"])
def test_stage_1_is_the_published_one(name: str):
    recipe = shipped(name)
    method = recipe.method
    assert (method.name, method.sigma.name, method.sigma.nodes, method.sigma.shift) == (name, "grid", 1000, 5.0)
    assert (method.weighting, method.cond_dropout, recipe.iterations) == ("bsmntw", 0.0, 2000)
    assert recipe.student.init == BASE
    assert recipe.student.causal is not None
    assert recipe.student.causal.block_frames == 3
    assert recipe.student.causal.partition(21) == (3,) * 7
    assert recipe.ema.start > recipe.iterations, "the weights themselves"


def test_stage_2_is_the_published_one():
    ode, consistency = shipped("ode_init"), shipped("consistency")
    for recipe, scale in ((ode, 6.0), (consistency, 3.0)):
        assert (recipe.method.nodes, recipe.method.shift, recipe.method.guidance_scale) == (48, 5.0, scale)
        assert recipe.teacher is not None
        assert recipe.teacher.init == f"runs/{shipped('teacher_forcing').name}"
        assert recipe.sampling.resolved() == (1.0, 0.9375, 5 / 6, 0.625)
    assert ode.method.trajectories.count == 6000
    assert (ode.method.stop_per, ode.iterations) == ("sample", 1000)
    assert (consistency.method.last_interval, consistency.ema.start, consistency.iterations) == (True, 0, 3000)


@pytest.mark.parametrize("name", ["self_forcing", "self_forcing_2step", "sid"])
def test_stage_3_is_the_published_one(name: str):
    """A step of the published code updates the critic, every fifth one the student too: 1,000 of them are 200
    iterations, and step 200 is the student's update 40. Its guidance of 3 is based on cond: 4 here."""
    recipe = shipped(name)
    method, critic = recipe.method, recipe.critic
    assert method.name == ("sid" if name == "sid" else "dmd2")
    assert (method.critic_updates, method.critic_batches, method.guidance_scale) == (5, "separate", 4.0)
    for density in (method.score_sigma, method.critic_sigma):
        assert (density.name, density.shift, density.bounds) == ("shifted", 5.0, "clamped")
        assert (density.low, density.high) == (0.02, 0.98)
    assert recipe.teacher is not None
    assert critic is not None
    assert recipe.teacher.init == critic.init == BASE
    assert critic.optimizer is not None
    assert critic.optimizer.lr == (2e-6 if name == "sid" else 4e-7)
    assert (critic.optimizer.betas, critic.optimizer.clip) == ((0.0, 0.999), 10.0)
    assert critic.optimizer.weight_decay == recipe.student.optimizer.weight_decay
    assert (recipe.iterations * 5, recipe.ema.start * 5) == (1000, 200)
    two = name == "self_forcing_2step"
    assert recipe.sampling.resolved() == ((1.0, 5 / 6) if two else (1.0, 0.9375, 5 / 6, 0.625))
    assert recipe.sampling.first_block_steps == (4 if two else None)
    assert recipe.sampling.stop == "shared"


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_passes_the_check(name: str):
    assert "fine" in call("config", "check", f"{FAMILY}/{name}")


def test_what_is_missing_is_said_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"data\.path = data/wan-latents: it does not exist; write a folder"):
        prepare(load_recipe(path_of("teacher_forcing"), ["engine.compile=null"]))
    write_folder(tmp_path / "data" / "wan-latents")
    with pytest.raises(UserError, match=rf"student\.init = {BASE}: {BASE} does not exist"):
        prepare(load_recipe(path_of("teacher_forcing"), ["engine.compile=null", "data.batch=3"]))


def path_of(name: str) -> Path:
    return shipped_recipes()[f"{FAMILY}/{name}"].resolve()


# At tiny size


@pytest.mark.parametrize("name", RUNS)
def test_two_iterations_of_every_recipe(world: LatentWorld, name: str):
    run = world.trained(name)
    assert run.path.name == name
    rows, recipe = values(run), load_recipe(run.recipe)
    trained = rows["train", 2]
    assert trained["student/updates"] == 2
    assert all(trained[key] == 0 for key in trained if key.endswith("/skipped"))
    assert all(math.isfinite(value) for value in trained.values())
    source = open_source(run.path)
    assert source.latent_shape == (6, 16, 4, 6)
    assert source.classes is None
    assert source.stage == ("teacher" if recipe.teacher is None else "student")
    assert source.codec == recipe.codec.model_dump(mode="json")
    blocks = 1 if "framewise" in name else 3
    assert source.model["causal"]["block_frames"] == blocks
    weights, start = source.weights("raw"), open_source(world.path / BASE).weights()
    assert weights.keys() == start.keys()
    assert any(not torch.equal(weights[key], start[key]) for key in weights)


def test_a_batch_of_a_run_is_the_data_normalised_with_texts_for_conditions(world: LatentWorld):
    plan = world.plan("teacher_forcing")
    network: Any = build(plan.roles["student"].model)
    source = batch_source(plan, Role("student", network, torch.float32))
    batch, ids = source.batch(1), source.order.ids(1)
    mean, std = (torch.tensor(getattr(plan.recipe.codec, name)).view(-1, 1, 1) for name in ("mean", "std"))
    assert batch.x0 is not None
    assert batch.uncond is not None
    assert torch.equal(batch.x0, (world.rows["latents"][ids].float() - mean) / std)
    assert torch.equal(batch.cond.tokens, world.rows["text"][ids])
    negative = world.rows["negative"].bfloat16()
    assert torch.equal(batch.uncond.tokens, negative.expand(3, -1, -1))
    draw = Draw(0, "student", 1, batch.key)
    dropped = drop_condition(batch, draw, 0.5).tokens
    for row, is_dropped in enumerate((draw.uniform("cond_dropout") < 0.5).tolist()):
        assert torch.equal(dropped[row], negative if is_dropped else batch.cond.tokens[row])
    assert torch.equal(drop_condition(batch, draw, 1.0).tokens, batch.uncond.tokens)


def test_trajectories_are_made_of_latents_and_of_no_others(world: LatentWorld):
    """The endpoints are the guided teacher's for the data's own texts: told of others, the folder is another."""
    world.trained("wan-1.3b-ode-init")
    folder = folder_of(world.plan("ode_init"))
    assert folder.missing() == []
    assert folder.read(torch.arange(5)).endpoint.isfinite().all()
    other = world.path / "other-latents"
    write_folder(other)
    assert folder_of(world.plan("ode_init", f"data.path={other}")).missing() == []
    write_shard(other / "part-1.safetensors", 4, 1000)
    assert folder_of(world.plan("ode_init", f"data.path={other}")).missing() == [0, 1, 2]


def test_the_plan_says_what_the_network_is_told(world: LatentWorld):
    text = describe(world.plan("self_forcing"))
    assert "data: 7 items with texts of 5 x 20 and a negative prompt, 6 frame(s) of 16 x 4 x 6" in text
    for role in ("student", "teacher", "critic"):
        assert role in text


def test_activations_that_are_computed_again_are_not_counted_for_every_block(world: LatentWorld):
    """2 blocks of width 48, feed-forward 80; 2 rows of 6 frames of 6 tokens, in float32. Inside a block are 24 x 48 +
    3 x 80 values a token, and 48 enter it."""
    tokens, inside = 2 * 6 * 6, 24 * 48 + 3 * 80
    again, kept = (world.plan("self_forcing", f"engine.recompute={on}") for on in ("true", "false"))
    assert activations_gib(again) == tokens * (2 * 48 + inside) * 4 / 2**30
    assert activations_gib(kept) == tokens * 2 * inside * 4 / 2**30


def refused(world: LatentWorld, name: str, *more: str) -> str:
    with pytest.raises(UserError) as error:
        world.plan(name, *more)
    return str(error.value)


def test_guidance_and_dropout_without_a_negative_prompt_are_refused(world: LatentWorld, tmp_path: Path):
    write_folder(tmp_path / "bare", negative=False)
    bare = f"data.path={tmp_path / 'bare'}"
    needs = f"it needs the embedding of a negative prompt, and {tmp_path / 'bare'} has no negative.safetensors"
    for name, key in (("self_forcing", "method.guidance_scale = 4.0"), ("ode_init", "method.guidance_scale = 6.0")):
        assert f"{key}: {needs}; write that file with text [l d], or 1.0" in refused(world, name, bare)
    message = refused(world, "teacher_forcing", bare, "method.cond_dropout=0.1")
    assert f"method.cond_dropout = 0.1: {needs}; write that file with text [l d], or 0" in message
    assert f"sampling.guidance_scale = 3.0: {needs}" in message
    world.plan("teacher_forcing", bare, "sampling.guidance_scale=1.0")


def test_a_network_for_other_latents_or_texts_is_refused(world: LatentWorld, tmp_path: Path):
    write_folder(tmp_path / "wide", text=(5, 24))
    message = refused(world, "teacher_forcing", f"data.path={tmp_path / 'wide'}")
    assert "student: its network reads embeddings of width 20 (model.text_dim), the texts of" in message
    assert "are 24 wide; embed them by the network's own text encoder" in message
    write_folder(tmp_path / "thin", shape=(6, 15, 4, 6))
    message = refused(world, "teacher_forcing", f"data.path={tmp_path / 'thin'}")
    assert "student: its network has 16 latent channels, the data 15 (model.channels)" in message
    assert "codec: it has mean and std of 16 channels, the data have 15" in message
    write_folder(tmp_path / "short", shape=(5, 16, 4, 6))
    message = refused(world, "teacher_forcing", f"data.path={tmp_path / 'short'}")
    assert "5 latent frames cannot be cut into blocks of 3" in message
    assert f"(the latents in {tmp_path / 'short'}, student.causal, sampling)" in message
    write_folder(tmp_path / "odd", shape=(6, 16, 5, 6))
    message = refused(world, "teacher_forcing", f"data.path={tmp_path / 'odd'}")
    assert "latents of 5x6 cannot be cut into patches of 2x2; write latents of another size, or another" in message
    write_folder(tmp_path / "swapped", shape=(16, 6, 4, 6))
    message = refused(world, "teacher_forcing", f"data.path={tmp_path / 'swapped'}")
    assert f"data.path = {tmp_path / 'swapped'}: latents [f c h w] of shape [16, 6, 4, 6], and the codec is" in message
    assert "for 16 channels: frames and channels look swapped; write .transpose(1, 2) of [n c f h w]" in message
    model = "{family: wan, size: nano, channels: 16, patch: [1, 2, 2], conditioner: {name: class_label, classes: 3}}"
    more = ("student.init=random", f"student.model={model}", "sampling.guidance_scale=1.0")
    message = refused(world, "teacher_forcing", *more)
    assert (
        "its network is told one of 3 classes, the data have texts; take a network of conditioner: {name: emb"
        in message
    )


def test_pixels_are_not_for_the_codec_of_latents_and_latents_are_not_judged(world: LatentWorld):
    for more, message in (
        (["codec={name: identity}"], "the data are latents; write codec.name: latents, with mean and std of every ch"),
        (["validation={every: 1}"], "the data are latents, and only pictures can be judged; write validation: null"),
        (["data={name: fashion_mnist, size: 16, batch: 3}"], "the data are fashion_mnist; write codec.name: identity"),
    ):
        with pytest.raises(UserError, match=message.replace("(", r"\(")):
            world.recipe("teacher_forcing", *more)


def test_a_teacher_that_began_elsewhere_may_be_guided_without_having_dropped_conditions(world: LatentWorld):
    """Published weights know their negative prompt; those that were drawn at random know what they were taught."""
    recipe = open_source(world.trained("wan-1.3b-causal").path).recipe
    assert recipe is not None
    assert recipe["method"]["cond_dropout"] == 0
    world.plan("consistency")


# Sampling


def test_samples_of_a_model_that_is_told_by_texts_are_latents_of_its_data(world: LatentWorld, tmp_path: Path):
    """The file holds what the sampler makes of the first texts, as the VAE takes it, and is a shard itself."""
    model, file = world.trained("wan-1.3b-student").path, tmp_path / "made.safetensors"
    text = call("sample", model, "--num", "3", "--out", file, "--seed", "5", "--batch", "2")
    assert "3 samples of" in text
    assert "Wrote" in text
    made = load_file(file)
    assert torch.equal(made["text"], world.rows["text"][:3])
    plan = world.plan("self_forcing")
    network: Any = build(plan.roles["student"].model)
    network.load_state_dict(open_source(model).weights("ema"))
    conds = network.conditioner.of(None).condition(world.rows["text"][:3])
    with torch.no_grad():
        x0 = plan.sampler.sample(network, conds, None, Draw(5, "sample", 0, torch.arange(3)), None).x0
    mean, std = (torch.tensor(getattr(plan.recipe.codec, name)).view(-1, 1, 1) for name in ("mean", "std"))
    assert (made["latents"] - (x0 * std + mean)).abs().max() < 1e-4
    (tmp_path / "again").mkdir()
    file.rename(tmp_path / "again" / "made.safetensors")
    data = LatentFolder(plan.recipe.data.model_copy(update={"path": str(tmp_path / "again")}))
    assert (len(data), data.shape) == (3, (6, 16, 4, 6))


def test_texts_of_ones_own_are_sampled_with_and_without_guidance(world: LatentWorld, tmp_path: Path):
    model, file = world.trained("wan-1.3b-student").path, tmp_path / "texts.safetensors"
    text = drawn(7, 2, 9, 20)
    save_file({"text": text, "negative": drawn(8, 9, 20)}, file)
    shared = ["sample", model, "--embeddings", file, "--out"]
    call(*shared, tmp_path / "plain.safetensors")
    call(*shared, tmp_path / "guided.safetensors", "--guidance", "3")
    plain, guided = load_file(tmp_path / "plain.safetensors"), load_file(tmp_path / "guided.safetensors")
    assert plain["latents"].shape == guided["latents"].shape == (2, 6, 16, 4, 6)
    assert torch.equal(plain["text"], text)
    assert not torch.allclose(plain["latents"], guided["latents"])
    save_file({"text": text}, file)
    message = call(*shared, tmp_path, "--guidance", "3", code=2)
    assert "it has no 'negative' [l d], and guidance 3 needs it; add it, or write --guidance 1" in message
    save_file({"text": drawn(7, 2, 9, 24)}, file)
    assert "the embeddings are 24 wide" in call(*shared, tmp_path, code=2)
    save_file({"texts": text}, file)
    assert "it holds texts; write text [n l d] of floats" in call(*shared, tmp_path, code=2)
    assert "there is no such file" in call("sample", model, "--embeddings", tmp_path / "no", code=2)


UNFIT: dict[str, tuple[dict[str, Tensor], str]] = {
    "no rows": ({"text": drawn(7, 0, 9, 20)}, "text has shape [0, 9, 20]; write [n l d], each at least 1"),
    "no tokens": ({"text": drawn(7, 2, 0, 20)}, "text has shape [2, 0, 20]; write [n l d], each at least 1"),
    "NaN": (
        {"text": drawn(7, 3, 9, 20).index_fill(0, torch.tensor([1]), float("nan"))},
        "text has NaN or infinite values, the first in row 1; write it again, as finite numbers",
    ),
    "infinite": (
        {"text": drawn(7, 2, 9, 20), "negative": drawn(8, 9, 20).index_fill(0, torch.tensor([4]), float("inf"))},
        "negative has NaN or infinite values, the first in row 4; write it again, as finite numbers",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_texts_that_no_sample_can_be_made_of_are_refused_and_nothing_is_written(
    world: LatentWorld, tmp_path: Path, name: str
):
    model, file = world.trained("wan-1.3b-student").path, tmp_path / "texts.safetensors"
    tensors, message = UNFIT[name]
    save_file(tensors, file)
    told = call("sample", model, "--embeddings", file, "--guidance", "3", "--out", tmp_path / "made", code=2)
    assert f"--embeddings {file}: {message}" in told
    assert not (tmp_path / "made").exists()


def test_rows_that_are_not_asked_for_may_be_anything(world: LatentWorld, tmp_path: Path):
    model, file = world.trained("wan-1.3b-student").path, tmp_path / "texts.safetensors"
    text = drawn(7, 3, 9, 20)
    text[2] = float("nan")
    save_file({"text": text}, file)
    call("sample", model, "--embeddings", file, "--num", 2, "--out", tmp_path / "made.safetensors")
    assert torch.equal(load_file(tmp_path / "made.safetensors")["text"], text[:2])


def test_more_samples_than_there_are_texts_are_refused(world: LatentWorld, tmp_path: Path):
    model, file = world.trained("wan-1.3b-student").path, tmp_path / "texts.safetensors"
    save_file({"text": drawn(7, 2, 9, 20)}, file)
    for more, place, found in (
        ([], f"data.path = {world.path / 'latents'}", 7),
        (["--embeddings", file], f"--embeddings {file}", 2),
    ):
        told = call("sample", model, *more, "--num", 100, "--out", tmp_path / "made", code=2)
        assert f"--num 100: {place} has {found} text(s), one for each sample; write {found} or less" in told
    assert not (tmp_path / "made").exists()
    call("sample", model, "--num", 7, "--out", tmp_path / "all.safetensors")
    assert len(load_file(tmp_path / "all.safetensors")["latents"]) == 7


def test_clips_that_are_continued_begin_like_those_of_the_data(world: LatentWorld, tmp_path: Path):
    more = ("name=wan-1.3b-continued", "sampling.given_frames=2", "sampling.first_block_steps=null", "iterations=1")
    run = world.train("self_forcing_2step", *more)
    call("sample", run.path, "--num", "3", "--out", tmp_path / "made.safetensors")
    made = load_file(tmp_path / "made.safetensors")["latents"]
    assert (made[:, :2] - world.rows["latents"][:3, :2].float()).abs().max() < 1e-5
    assert (made[:, 2:] - world.rows["latents"][:3, 2:].float()).abs().max() > 0.1
    save_file({"text": drawn(7, 2, 9, 20)}, tmp_path / "texts.safetensors")
    message = call("sample", run.path, "--embeddings", tmp_path / "texts.safetensors", code=2)
    assert "continues clips, and a file of texts has none; leave --embeddings out" in message


def test_the_prompts_of_the_data_travel_with_their_samples(world: LatentWorld, tmp_path: Path):
    write_folder(tmp_path / "data", (3,))
    write_shard(tmp_path / "data" / "part-0.safetensors", 3, 0, prompts=["one", "two", "three"])
    recipe = tmp_path / "recipe.yaml"
    text = world.trained("wan-1.3b-student").recipe.read_text()
    recipe.write_text(text.replace(str(world.path / "latents"), str(tmp_path / "data")))
    call("sample", world.trained("wan-1.3b-student").path, "--recipe", recipe, "--num", "2", "--out", tmp_path / "s")
    (file,) = (tmp_path / "s").iterdir()
    assert file.name == "wan-1.3b-student-steps4-seed0-num2.safetensors"
    with safe_open(file, framework="pt") as found:
        assert json.loads(found.metadata()["prompts"]) == ["one", "two"]


def test_an_export_makes_what_the_run_makes_and_says_how(world: LatentWorld, tmp_path: Path):
    model, folder = world.trained("wan-1.3b-causal").path, tmp_path / "export"
    call("export", model, folder)
    assert "fewstep sample . --embeddings texts.safetensors" in (folder / "README.md").read_text()
    save_file({"text": drawn(7, 2, 5, 20), "negative": drawn(8, 5, 20)}, tmp_path / "texts.safetensors")
    for place in (model, folder):
        out = tmp_path / f"{place.name}.safetensors"
        call("sample", place, "--embeddings", tmp_path / "texts.safetensors", "--steps", "3", "--out", out)
    made = [load_file(tmp_path / f"{place.name}.safetensors")["latents"] for place in (model, folder)]
    assert torch.equal(*made)
    assert "name a file of embeddings by --embeddings" in call("sample", folder, code=2)


def test_what_needs_pictures_or_classes_says_so(world: LatentWorld, tmp_path: Path):
    model = world.trained("wan-1.3b-student").path
    for command in ("stream", "eval"):
        message = call(command, model, code=2)
        assert "is told by embeddings of texts what to make, and makes latents" in message
        assert f"`fewstep sample {model}` writes the latents to a file" in message
    assert "makes latents of texts; leave both out" in call("sample", model, "--label", "cat", code=2)
    assert "write a folder, or a file of .safetensors" in call("sample", model, "--out", tmp_path / "a.gif", code=2)


def test_a_run_does_not_go_on_with_samples_of_another_shape(world: LatentWorld):
    """Their shape is the data's own, and stands in no recipe."""
    run, longer = world.train("teacher_forcing", "name=lengthened", "iterations=1"), world.path / "longer-latents"
    shutil.copytree(world.path / "latents", longer)
    for shard in longer.glob("part-*.safetensors"):
        tensors = load_file(shard)
        tensors["latents"] = torch.cat([tensors["latents"], tensors["latents"][:, :3]], 1)
        save_file(tensors, shard)
    plan = world.plan("teacher_forcing", "name=lengthened", f"data.path={longer}")
    with pytest.raises(UserErrors) as caught:
        train(plan, run, resume=True)
    assert "the data's samples are 9 x 16 x 4 x 6 latents, they were 6 x 16 x 4 x 6" in caught.value.errors

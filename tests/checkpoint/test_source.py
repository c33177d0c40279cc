"""What can be named as a model, and what is said of everything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fewstep.checkpoint.export import export
from fewstep.checkpoint.meta import Meta
from fewstep.checkpoint.save import save_checkpoint
from fewstep.checkpoint.source import open_source
from fewstep.checkpoint.tensor_file import write_tensors
from fewstep.errors import UserError
from fewstep.models.wan.state_dict_adapter import config_to_diffusers, to_diffusers
from fewstep.rollout.few_step import SamplingSection
from tests.checkpoint.runs import CLASSES, KEEP, PLAIN, SECTION, states, tiny_meta, write_run
from tests.models.tiny import TEXT, tiny_section, tiny_wan

LADDER = [1.0, 0.9375, 5 / 6, 0.625]


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def diffusers_folder(path: Path, files: int = 1) -> dict[str, Tensor]:
    """A folder as diffusers writes it, by hand; returns its weights by our names."""
    network = tiny_wan(tiny_section(TEXT, layers=2), seed=4)
    theirs, _ = to_diffusers(network.state_dict())
    folder = path / "transformer"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_to_diffusers(network.section)))
    shards = {
        f"diffusion_pytorch_model-{n + 1:05d}-of-{files:05d}.safetensors": sorted(theirs)[n::files]
        for n in range(files)
    }
    if files == 1:
        write_tensors(folder / "diffusion_pytorch_model.safetensors", theirs)
        return network.state_dict()
    for name, keys in shards.items():
        write_tensors(folder / name, {key: theirs[key] for key in keys})
    index = {"weight_map": {key: name for name, keys in shards.items() for key in keys}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    return network.state_dict()


def test_a_run_is_its_newest_complete_checkpoint(tmp_path: Path):
    run = write_run(tmp_path / "run", 3, 6)
    source = open_source(run.path)
    assert (source.kind, source.path, source.iteration, source.stage) == ("run", run.path, 6, "student")
    assert source.model == SECTION.model_dump(mode="json")
    assert source.sampling == {"sigmas": LADDER, "shift": 5.0, "solver": "renoise", "guidance_scale": 1.0} | PLAIN
    assert source.codec == tiny_meta().codec
    assert (source.classes, source.latent_shape, source.dtype) == (CLASSES, (1, 4, 8, 6), "float32")
    assert source.holds == ("ema", "raw")
    assert open_source(str(run.path)).iteration == 6


def test_the_sampler_of_a_source_is_the_trained_one(tmp_path: Path):
    """PITFALLS: sampling differs from training. The noise levels travel with the weights, bit for bit."""
    trained = SamplingSection(steps=3, shift=7.0, solver="renoise", guidance_scale=2.5)
    run = write_run(tmp_path / "run", 1, meta=tiny_meta(sampling=trained))
    sampling = open_source(run.path).sampling
    assert sampling is not None
    found = SamplingSection(**sampling)
    assert found.resolved() == trained.resolved()
    assert (found.solver, found.guidance_scale, found.shift) == ("renoise", 2.5, 7.0)


def test_opening_reads_no_weights(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    file = run.checkpoints / "iteration-000003" / "student.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    source = open_source(run.path)
    with pytest.raises(UserError, match="is not what was written"):
        source.weights("raw")


def test_the_average_is_the_default_and_every_role_can_be_had(tmp_path: Path):
    run, expected = write_run(tmp_path / "run", 3), states()
    source = open_source(run.path / "checkpoints" / "iteration-000003")
    assert source.kind == "checkpoint"
    assert equal(source.weights(), expected["ema"])
    assert equal(source.weights("raw"), expected["student"])
    assert equal(source.weights(role="critic"), expected["critic"])
    assert not equal(expected["ema"], expected["student"])


def test_without_an_average_the_weights_themselves_are_used(tmp_path: Path):
    expected = states()
    run = write_run(tmp_path / "run", 3, groups={"student": expected["student"]})
    source = open_source(run.path)
    assert source.chosen("ema") == "raw"
    assert equal(source.weights("ema"), expected["student"])


def test_a_role_that_was_not_saved_is_an_error_that_lists_what_was(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    with pytest.raises(UserError, match=r"no group 'teacher'; it holds critic, ema, student"):
        open_source(run.path).weights(role="teacher")


def test_a_checkpoint_that_lost_a_tensor_of_the_average_is_refused(tmp_path: Path):
    groups = states()
    del groups["ema"]["head.modulation"]
    groups["ema"]["blocks.0.ffn.hidden.bias"] = torch.zeros(3)
    groups["ema"]["blocks.9.ffn.hidden.bias"] = torch.zeros(3)
    run = write_run(tmp_path / "run", 3, groups=groups)
    with pytest.raises(UserError, match="do not fit the network") as error:
        open_source(run.path).weights()
    assert "head.modulation is missing" in str(error.value)
    assert "blocks.9.ffn.hidden.bias is not one of the network's" in str(error.value)
    assert "blocks.0.ffn.hidden.bias has shape [3] instead of [80]" in str(error.value)


def test_the_newest_complete_checkpoint_wins_with_a_warning(tmp_path: Path):
    run = write_run(tmp_path / "run", 3, 6)
    (run.checkpoints / "iteration-000006" / "ema.safetensors").unlink()
    with pytest.warns(UserWarning, match="iteration-000006: this checkpoint is broken and skipped: ema.safetensors"):
        assert open_source(run.path).iteration == 3
    with pytest.raises(UserError, match="iteration-000006: this checkpoint cannot be used"):
        open_source(run.checkpoints / "iteration-000006")


def test_an_export_knows_what_the_run_knew(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    source = open_source(run.path)
    found = open_source(export(source, tmp_path / "out"))
    assert (found.kind, found.iteration, found.holds) == ("export", 3, ("ema",))
    for name in ("model", "sampling", "codec", "stage", "classes", "latent_shape", "versions"):
        assert getattr(found, name) == getattr(source, name), name
    assert equal(found.weights(), source.weights())


@pytest.mark.parametrize("content", [b"", b"\x00" * 5, None], ids=("empty", "no header", "cut"))
def test_weights_that_were_cut_off_are_named(tmp_path: Path, content: bytes | None):
    folder = export(open_source(write_run(tmp_path / "run", 3).path), tmp_path / "out")
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-7] if content is None else content)
    with pytest.raises(UserError, match=rf"{file} is not a whole safetensors file .*copy it again"):
        open_source(folder).weights()
    (folder / "fewstep.json").unlink()
    with pytest.raises(UserError, match=rf"{file} is not a whole safetensors file"):
        open_source(folder)


def test_an_index_without_files_is_refused(tmp_path: Path):
    diffusers_folder(tmp_path / "wan", 3)
    (tmp_path / "wan/transformer/diffusion_pytorch_model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(UserError, match=r"index\.json: weight_map must give a file for every tensor"):
        open_source(tmp_path / "wan")


WRONG = {
    "no model": ({"model": {}}, ["model.size: ", "model.conditioner: "]),
    "another model": ({"model": SECTION.model_dump(mode="json") | {"heads": 0}}, ["model.heads: "]),
    "one class": ({"classes": ["shoe"]}, ["classes: there are 1 names, the conditioner of the model has 5"]),
    "everything": (
        {"classes": ["shoe"], "latent_shape": [1, 3, 9, 6]},
        ["classes: there are 1 ", "latent_shape: it has 3 channels, the model 4", "latent_shape: latents of 9x6"],
    ),
    "nothing": ({"latent_shape": [1, 4, 0, 6]}, ["latent_shape: frames, rows and columns must be positive"]),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_export_that_contradicts_itself_is_refused_with_every_field(tmp_path: Path, kind: str):
    folder = export(open_source(write_run(tmp_path / "run", 3).path), tmp_path / "out")
    changes, expected = WRONG[kind]
    file = folder / "fewstep.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError) as error:
        open_source(folder)
    lines = str(error.value).split("\n")
    assert len(lines) == len(expected)
    assert all(line.startswith(f"{file}: {start}") for line, start in zip(lines, expected, strict=True)), lines


def test_raw_weights_cannot_be_had_from_an_export_of_the_average(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    found = open_source(export(open_source(run.path), tmp_path / "out"))
    with pytest.raises(UserError, match=r"holds the averaged weights \(ema\) alone"):
        found.weights("raw")
    with pytest.raises(UserError, match="holds one network; 'critic' is in the checkpoints of the run"):
        found.weights(role="critic")


@pytest.mark.parametrize("files", [1, 3])
def test_a_plain_diffusers_folder_is_a_teacher(tmp_path: Path, files: int):
    expected = diffusers_folder(tmp_path / "wan", files)
    for path in (tmp_path / "wan", tmp_path / "wan" / "transformer"):
        source = open_source(path)
        assert (source.kind, source.stage, source.iteration) == ("diffusers", "teacher", None)
        assert (source.sampling, source.codec, source.classes, source.latent_shape) == (None, None, None, None)
        assert source.model["layers"] == 2
        assert source.model["conditioner"] == {"name": "embedding"}
        assert equal(source.weights(), expected)


def test_a_shard_that_is_missing_is_named(tmp_path: Path):
    diffusers_folder(tmp_path / "wan", 3)
    (tmp_path / "wan/transformer/diffusion_pytorch_model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"diffusion_pytorch_model-00002-of-00003\.safetensors missing"):
        open_source(tmp_path / "wan")


def test_a_model_with_two_experts_is_not_half_loaded(tmp_path: Path):
    diffusers_folder(tmp_path / "wan")
    shutil.copytree(tmp_path / "wan/transformer", tmp_path / "wan/transformer_2")
    with pytest.raises(UserError, match="two experts"):
        open_source(tmp_path / "wan")


def test_a_network_of_another_class_is_refused_by_name(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    with pytest.raises(UserError, match=f"{tmp_path}.*FluxTransformer2DModel.*WanTransformer3DModel"):
        open_source(tmp_path)


def test_pickles_are_not_opened(tmp_path: Path):
    diffusers_folder(tmp_path / "wan")
    folder = tmp_path / "wan" / "transformer"
    (folder / "diffusion_pytorch_model.safetensors").rename(folder / "diffusion_pytorch_model.bin")
    with pytest.raises(UserError, match=r"diffusion_pytorch_model\.bin, which can execute code.*safetensors"):
        open_source(tmp_path / "wan")
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.pt is a file of a kind that can execute code.*give a run folder"):
        open_source(tmp_path / "model.pt")


def test_a_wrong_path_says_what_is_there_and_what_to_give(tmp_path: Path):
    run = write_run(tmp_path / "nano-teacher", 1)
    with pytest.raises(UserError, match=r"does not exist \(did you mean .*nano-teacher\?\); give a run folder"):
        open_source(tmp_path / "nano-techer")
    with pytest.raises(UserError, match="is not a model: it holds iteration-000001; give a run folder"):
        open_source(run.checkpoints)
    with pytest.raises(UserError, match="is a file; perhaps you mean its folder"):
        open_source(run.checkpoints / "iteration-000001" / "student.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="it is empty"):
        open_source(tmp_path / "empty")


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path):
    run = write_run(tmp_path / "run")
    with pytest.raises(UserError, match="is a run without a complete checkpoint"):
        open_source(run.path)


def test_meta_is_the_same_after_json():
    meta = tiny_meta()
    read = Meta.from_json(json.loads(json.dumps(meta.to_json())), Path("meta.json"))
    assert read.to_json() == meta.to_json()
    assert read.sampling.sigmas == tuple(LADDER)
    assert read.model_copy(update={"sampling": meta.sampling}) == meta


def test_meta_names_every_key_that_is_wrong():
    values = tiny_meta().to_json() | {"colour": "blue", "time_s": "long"}
    del values["codec"]
    with pytest.raises(UserError) as error:
        Meta.from_json(values, Path("meta.json"))
    lines = str(error.value).split("\n")
    assert [line.split(": ")[:2] for line in sorted(lines)] == [
        ["meta.json", key] for key in ("codec", "colour", "time_s")
    ]


def test_a_format_from_the_future_is_refused(tmp_path: Path):
    values = tiny_meta().to_json() | {"format": 2}
    save_checkpoint(tmp_path, 1, states(), values, KEEP)
    with pytest.raises(UserError, match=r"meta\.json: its format is 2, this fewstep reads 1"):
        open_source(tmp_path / "iteration-000001")


def test_a_sampler_that_is_not_resolved_is_refused():
    values = tiny_meta().to_json()
    values["sampling"] = {"steps": 4, "shift": 5.0}
    with pytest.raises(UserError, match=r"sampling\.sigmas is missing"):
        Meta.from_json(values, Path("meta.json"))

"""The export: plain diffusers classes run it as it was trained, in a process that has never seen us."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from fewstep.checkpoint.export import export
from fewstep.checkpoint.source import open_source
from fewstep.checkpoint.tensor_file import read_tensors
from fewstep.errors import UserError
from fewstep.flow.path import x0_from_velocity
from fewstep.flow.solvers import renoise
from fewstep.models.families import build
from fewstep.models.wan.conditioner import LabelCond
from fewstep.models.wan.sizes import WanSection
from fewstep.rollout.few_step import SamplingSection
from tests.checkpoint.runs import PLAIN, states, tiny_meta, write_run
from tests.models.tiny import TEXT, tiny_section

IN_A_FRESH_PROCESS = """
import json, sys
import torch
import yaml
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

folder, given, result = sys.argv[1:]
transformer, info = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer", output_loading_info=True)
assert not any(info.values()), info
given = load_file(given)
trained = json.load(open(folder + "/fewstep.json"))
cond = load_file(folder + "/conditioner/conditioner.safetensors")["table"][given["label"]]
sigmas = trained["sampling"]["sigmas"]
x_t = given["noise.0"]
with torch.no_grad():
    for step, sigma in enumerate(sigmas):
        velocity = transformer(x_t.transpose(1, 2), torch.full((len(x_t),), 1000 * sigma), cond).sample.transpose(1, 2)
        x0 = x_t - sigma * velocity
        if step == 0:
            first = velocity.contiguous()
        if step + 1 < len(sigmas):
            x_t = (1 - sigmas[step + 1]) * x0 + sigmas[step + 1] * given[f"noise.{step + 1}"]
save_file({"first": first, "x0": x0.contiguous()}, result)
assert not any(name.startswith("fewstep") for name in sys.modules)
"""


def test_diffusers_alone_runs_it_as_trained_in_a_fresh_process(tmp_path: Path):
    """PITFALLS: exported names; sampling differs from training. The weights are those of the average."""
    run = write_run(tmp_path / "run", 3)
    folder = export(open_source(run.path), tmp_path / "out")
    label = torch.tensor([4, 0, 2])
    given = {f"noise.{step}": torch.randn(3, 1, 4, 8, 6) for step in range(4)} | {"label": label}
    from safetensors.torch import save_file

    save_file(given, tmp_path / "given.safetensors")
    arguments = [folder, tmp_path / "given.safetensors", tmp_path / "result.safetensors"]
    subprocess.run([sys.executable, "-c", IN_A_FRESH_PROCESS, *map(str, arguments)], check=True, cwd=tmp_path)
    found = read_tensors(tmp_path / "result.safetensors")

    network = build(WanSection.model_validate(tiny_meta().models["student"]))
    network.load_state_dict(states()["ema"])
    x_t, first, x0 = given["noise.0"], None, None
    sigmas = SamplingSection(steps=4, shift=5.0).resolved()
    for step, value in enumerate(sigmas):
        sigma = torch.full((3, 1), value)
        with torch.no_grad():
            velocity = network.velocity(x_t, sigma, LabelCond(label))
        first = velocity if first is None else first
        x0 = x0_from_velocity(x_t, velocity, sigma)
        if step + 1 < len(sigmas):
            x_t = renoise(x_t, velocity, sigma, torch.full((3, 1), sigmas[step + 1]), given[f"noise.{step + 1}"])
    assert first is not None
    assert x0 is not None
    torch.testing.assert_close(found["first"], first, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["x0"], x0, rtol=1e-4, atol=1e-5)


def code_of(folder: Path) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


SAMPLERS = {
    "a shifted ladder": SamplingSection(steps=4, shift=5.0),
    "one step": SamplingSection(steps=1),
    "guided Euler steps": SamplingSection(steps=6, shift=3.0, solver="ode", guidance_scale=2.5),
    "no ladder": SamplingSection(sigmas=(1.0, 0.9, 0.4, 0.2)),
}


@pytest.mark.parametrize("sampling", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_the_code_of_the_model_card_samples_as_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: SamplingSection
):
    run = write_run(tmp_path / "run", 3, meta=tiny_meta(sampling=sampling))
    folder = export(open_source(run.path), tmp_path / "out")
    monkeypatch.chdir(folder)
    ran: dict = {}
    exec(code_of(folder), ran)

    network = build(WanSection.model_validate(tiny_meta().models["student"]))
    network.load_state_dict(states()["ema"])
    generator = torch.Generator().manual_seed(0)
    x_t = torch.randn(2, 4, 1, 8, 6, generator=generator).transpose(1, 2)
    cond, uncond = LabelCond(torch.tensor([0, 1])), network.conditioner.null(2)
    levels = sampling.resolved()
    for value, value_next in zip(levels, (*levels[1:], 0.0), strict=True):
        sigma, scale = torch.full((2, 1), value), sampling.guidance_scale
        with torch.no_grad():
            velocity = network.velocity(x_t, sigma, cond)
            if scale != 1:
                without = network.velocity(x_t, sigma, uncond)
                velocity = without + scale * (velocity - without)
        if sampling.solver == "ode":
            x_t = x_t + (value_next - value) * velocity
        else:
            noise = torch.randn(2, 4, 1, 8, 6, generator=generator).transpose(1, 2)
            x_t = (1 - value_next) * (x_t - value * velocity) + value_next * noise
    torch.testing.assert_close(ran["x_t"].transpose(1, 2), x_t, rtol=1e-4, atol=1e-4)
    codec = tiny_meta().codec
    mean, std = (torch.tensor(codec[name]).view(1, 1, -1, 1, 1) for name in ("mean", "std"))
    torch.testing.assert_close(ran["pixels"].transpose(1, 2), (x_t * std + mean).clamp(-1, 1), rtol=1e-4, atol=1e-4)


def test_fewstep_json_holds_everything_that_running_it_takes(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    folder = export(open_source(run.path), tmp_path / "out")
    assert json.loads((folder / "fewstep.json").read_text()) == {
        "format": 1,
        "iteration": 3,
        "sampling": {"sigmas": [1.0, 0.9375, 5 / 6, 0.625], "shift": 5.0, "solver": "renoise", "guidance_scale": 1.0}
        | PLAIN,
        "guidance": "uncond + guidance_scale * (cond - uncond)",
        "block_frames": None,
        "window": None,
        "sink": None,
        "stage": "student",
        "codec": {"name": "identity", "mean": [0.1, 0.0, -0.2, 0.3], "std": [0.5, 0.6, 0.7, 0.9]},
        "codec_id": "identity(mean=0.1,0.0,-0.2,0.3;std=0.5,0.6,0.7,0.9)",
        "model": tiny_meta().models["student"],
        "classes": ["shirt", "shoe", "bag", "coat", "hat"],
        "latent_shape": [1, 4, 8, 6],
        "weights": "ema",
        "dtype": "float32",
        "scheduler": "num_inference_steps",
        "versions": tiny_meta().versions,
    }


def test_the_raw_weights_are_exported_when_asked_for_and_said_so(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    found = open_source(export(open_source(run.path), tmp_path / "out", "raw"))
    assert found.holds == ("raw",)
    expected = states()["student"]
    assert all(torch.equal(value, expected[name]) for name, value in found.weights("raw").items())


def test_without_an_average_an_export_says_that_it_is_raw(tmp_path: Path):
    run = write_run(tmp_path / "run", 3, groups={"student": states()["student"]})
    assert open_source(export(open_source(run.path), tmp_path / "out", "ema")).holds == ("raw",)


def test_bfloat16_rounds_every_weight_once(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    found = open_source(export(open_source(run.path), tmp_path / "out", dtype="bfloat16"))
    assert found.dtype == "bfloat16"
    expected = states()["ema"]
    assert all(torch.equal(value, expected[name].bfloat16()) for name, value in found.weights().items())


def digests(folder: Path) -> dict[str, str]:
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.rglob("*") if file.is_file()}


def test_an_export_leaves_the_run_bitwise_unchanged(tmp_path: Path):
    """Invariant 49. The weights it reads may be in use elsewhere: neither they nor their files change."""
    run = write_run(tmp_path / "run", 3)
    source = open_source(run.path)
    live, before = source.weights(), digests(run.path)
    kept: dict[str, Tensor] = {name: value.clone() for name, value in live.items()}
    export(source, tmp_path / "out", dtype="bfloat16")
    assert digests(run.path) == before
    assert all(torch.equal(live[name], value) for name, value in kept.items())


def test_an_export_reads_the_weights_it_writes_and_no_others(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    for group in ("student", "critic", "student.optimizer"):
        file = run.checkpoints / "iteration-000003" / f"{group}.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    folder = export(open_source(run.path), tmp_path / "out")
    assert open_source(folder).holds == ("ema",)
    with pytest.raises(UserError, match="is not what was written"):
        export(open_source(run.path), tmp_path / "raw", "raw")


def test_an_export_of_an_export_is_the_same(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    first = export(open_source(run.path), tmp_path / "first")
    second = export(open_source(first), tmp_path / "second")
    weights = "transformer/diffusion_pytorch_model.safetensors"
    assert (first / weights).read_bytes() == (second / weights).read_bytes()
    assert (first / "fewstep.json").read_bytes() == (second / "fewstep.json").read_bytes()


def test_nothing_is_overwritten_unasked_and_nothing_but_an_export_ever(tmp_path: Path):
    run = write_run(tmp_path / "run", 3, 6)
    folder = export(open_source(run.checkpoints / "iteration-000003"), tmp_path / "out")
    with pytest.raises(UserError, match="already holds an export; give another folder, or --overwrite"):
        export(open_source(run.path), folder)
    assert open_source(folder).iteration == 3
    export(open_source(run.path), folder, overwrite=True)
    assert open_source(folder).iteration == 6
    with pytest.raises(UserError, match="is not an export"):
        export(open_source(run.path), run.path, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_an_export_in_which_something_else_lies_is_not_overwritten(tmp_path: Path):
    source = open_source(write_run(tmp_path / "run", 3).path)
    folder = export(source, tmp_path / "out")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"out also holds \.git, notes\.txt, which an export does not write"):
        export(source, folder, overwrite=True)
    (folder / "transformer" / "old").mkdir()
    (folder / "scheduler" / "z.txt").write_text("mine")
    with pytest.raises(UserError, match=r"holds \.git, notes\.txt, scheduler/z\.txt and 1 more, which"):
        export(source, folder, overwrite=True)
    assert (folder / "notes.txt").read_text() == "mine"


def test_a_full_disk_leaves_the_old_export_and_nothing_else(tmp_path: Path):
    run = write_run(tmp_path / "run", 3, 6)
    folder = export(open_source(run.checkpoints / "iteration-000003"), tmp_path / "out")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match=r"out: the export could not be written.*nothing of it was left"):
            export(open_source(run.path), folder, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_source(folder).iteration == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_plain_diffusers_folder_cannot_be_exported(tmp_path: Path):
    run = write_run(tmp_path / "run", 3)
    folder = export(open_source(run.path), tmp_path / "out")
    (folder / "fewstep.json").unlink()
    with pytest.raises(UserError, match="plain diffusers folder already"):
        export(open_source(folder), tmp_path / "again")


def test_the_model_card_tells_recipe_classes_and_measured_quality(tmp_path: Path):
    recipe = {
        "name": "tiny",
        "lr": 0.001,
        "teacher": {"init": str(tmp_path / "teacher")},
        "student": {"init": "teacher", "betas": [0.0, 0.99]},
        "data": {"name": "fashion_mnist", "path": str(tmp_path), "cache": "~/.cache/here", "batch": 5},
    }
    run = write_run(tmp_path / "run", 3, meta=tiny_meta(recipe=recipe))
    rows = [
        {"name": "real data", "num_steps": 0, "network_calls": 0.0, "frechet": 0.5, "per_seed": [{"frechet": 0.5}]},
        {"name": "teacher", "num_steps": 20, "network_calls": 20.0, "frechet": 11.25, "reference": "abc"},
        {"name": "student", "num_steps": 4, "accuracy": 0.75},
    ]
    run.evaluation.write_text(json.dumps(rows))
    for source in (open_source(run.path), open_source(run.checkpoints / "iteration-000003")):
        card = (export(source, tmp_path / f"out-{source.kind}") / "README.md").read_text()
        for said in ("fewstep sample . --label 0 --seed 0", "shoe, bag"):
            assert said in card
        table = [line for line in card.split("## Measured quality")[1].split("## Recipe")[0].splitlines() if line]
        assert table == [
            "| Model | Steps | Network calls | Frechet distance | Accuracy |",
            "| --- | --- | --- | --- | --- |",
            "| real data |  |  | 0.5 |  |",
            "| teacher | 20 | 20 | 11.25 |  |",
            "| student | 4 |  |  | 0.75 |",
        ]
        assert yaml.safe_load(card.split("```yaml\n")[1].split("```")[0]) == {
            "name": "tiny",
            "lr": 0.001,
            "teacher": {},
            "student": {"init": "teacher", "betas": [0.0, 0.99]},
            "data": {"name": "fashion_mnist", "batch": 5},
        }
        assert "1, 0.9375, 0.833333, 0.625" in card
        assert str(tmp_path) not in card


def test_a_network_of_embeddings_runs_in_diffusers_pipeline(tmp_path: Path):
    """The pipeline's own loop, told the number of steps alone, equals ours; text encoder and VAE stay outside."""
    from diffusers import WanPipeline

    section = tiny_section(TEXT)
    meta = tiny_meta(section=section, classes=None, sampling=SamplingSection(steps=3, shift=5.0, solver="ode"))
    run = write_run(tmp_path / "run", 3, meta=meta, groups=states(section))
    folder = export(open_source(run.path), tmp_path / "out")
    assert not (folder / "conditioner").exists()
    pipeline = WanPipeline.from_pretrained(folder, text_encoder=None, tokenizer=None, vae=None)
    tokens, noise = torch.randn(1, 7, 20), torch.randn(1, 4, 2, 6, 4)
    arguments = {"num_inference_steps": 3, "guidance_scale": 1.0, "output_type": "latent", "return_dict": False}
    (found,) = pipeline(prompt_embeds=tokens, latents=noise, height=48, width=32, num_frames=5, **arguments)

    from fewstep.models.wan.conditioner import EmbeddingCond

    network = build(section)
    network.load_state_dict(states(section)["ema"])
    x_t, sigmas = noise.transpose(1, 2), meta.sampling.resolved()
    for sigma, sigma_next in zip(sigmas, (*sigmas[1:], 0.0), strict=True):
        with torch.no_grad():
            velocity = network.velocity(x_t, torch.full((1, 2), sigma), EmbeddingCond(tokens))
        x_t = x_t + (sigma_next - sigma) * velocity
    torch.testing.assert_close(found.transpose(1, 2), x_t, rtol=1e-4, atol=1e-4)

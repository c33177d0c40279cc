"""The README.md of an export: what it is, and how it is run with fewstep and with plain diffusers classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from fewstep.checkpoint.meta import Exported
from fewstep.checkpoint.source import Source

_MEASURED = {
    "name": "Model",
    "num_steps": "Steps",
    "network_calls": "Network calls",
    "frechet": "Frechet distance",
    "accuracy": "Accuracy",
    "ms_per_image": "ms per sample",
    "num_samples": "Samples",
}
_PLACES = ("path", "test_path", "cache")
"""Keys of a recipe that name places of the machine it ran on."""


_NOT_BY_DIFFUSERS = (
    "## With diffusers\n\n`WanTransformer3DModel` loads these weights, but lets every frame see every other. The "
    "network was trained to see finished blocks alone, so only fewstep runs it as it was trained."
)


def model_card(name: str, source: Source, exported: Exported, by_itself: bool) -> str:
    """Markdown. ``by_itself``: the scheduler finds the noise levels from their number."""
    parts = [
        _head(name, exported),
        _with_fewstep(exported),
        _with_diffusers(exported, by_itself) if exported.block_frames is None else _NOT_BY_DIFFUSERS,
        _quality(source),
        _recipe(source),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(name: str, exported: Exported) -> str:
    sampling, (frames, channels, height, width) = exported.sampling, exported.latent_shape
    what = "an image" if frames == 1 else f"a video of {frames} latent frames"
    steps = len(sampling.resolved())
    rows = {
        "Noise levels": ", ".join(f"{sigma:.6g}" for sigma in sampling.resolved()),
        "Solver": sampling.solver,
        "Guidance": f"{sampling.guidance_scale:g} ({exported.guidance}; 1 is off)",
        "Latents": f"{frames} x {channels} x {height} x {width} (frames, channels, rows, columns)",
        "Codec": f"`{exported.codec_id}`",
        "Weights": f"{exported.weights}, {exported.dtype}, iteration {exported.iteration}",
    }
    if exported.block_frames is not None:
        seen = f"a window of {exported.window}, a sink of {exported.sink}" if exported.window else "all before them"
        positions = exported.model["causal"]["positions"]
        rows["Blocks"] = f"{exported.block_frames} latent frames at a time, which see {seen}, positions {positions}"
    if exported.classes is not None:
        rows["Classes"] = ("; " if any("," in name for name in exported.classes) else ", ").join(exported.classes)
    library = "diffusers" if exported.block_frames is None else "fewstep"  # plain diffusers has no causal form
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    return (
        f"---\nlibrary_name: {library}\ntags: [flow-matching, fewstep]\n---\n\n# {name}\n\n"
        f"A {exported.stage} of the family {exported.model['family']} that makes {what} in {steps} "
        f"step{'s' if steps > 1 else ''}, trained with fewstep.\n\n| | |\n| --- | --- |\n{table}"
    )


def _with_fewstep(exported: Exported) -> str:
    if exported.classes is None:
        return (
            "## With fewstep\n\n```sh\nfewstep sample . --embeddings texts.safetensors --seed 0\n```\n\nruns the "
            "network as it was trained, on the embeddings of texts in that file: `text` [n l d]. It writes latents."
        )
    stream = "" if exported.block_frames is None else "fewstep stream . --label 0 --frames 96\n"
    return (
        f"## With fewstep\n\n```sh\nfewstep sample . --label 0 --seed 0\n{stream}```\n\nruns the network as it was "
        "trained; nothing else needs to be said."
    )


def _with_diffusers(exported: Exported, by_itself: bool) -> str:
    guided = exported.sampling.guidance_scale != 1.0
    by_label = exported.model["conditioner"]["name"] == "class_label"
    code = [
        "import json",
        "from pathlib import Path",
        "",
        "import torch",
        "from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel",
        *(["from safetensors.torch import load_file"] if by_label else []),
        "",
        'folder = Path(".")  # this folder',
        'transformer = WanTransformer3DModel.from_pretrained(folder, subfolder="transformer")',
        'scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")',
        'trained = json.loads((folder / "fewstep.json").read_text())',
        "",
        *_conditioning(by_label, guided),
        *_loop(exported, guided, by_itself),
    ]
    code.append('mean, std = (torch.tensor(trained["codec"][name]).view(1, -1, 1, 1, 1) for name in ("mean", "std"))')
    if exported.codec["name"] == "identity":
        code.append("pixels = (x_t * std + mean).clamp(-1, 1)  # batch, channel, frame, row, column, in [-1, 1]")
    else:
        code.append("latents = x_t * std + mean  # batch, channel, frame, row, column, as the VAE takes them")
    return "## With diffusers\n\n```python\n" + "\n".join(code) + "\n```\n\n" + _about_scheduler(exported, by_itself)


def _conditioning(by_label: bool, guided: bool) -> list[str]:
    if not by_label:
        return [
            "# cond: prompt embeddings [batch, length, width] of the text encoder that the network was trained with"
            + ("; uncond: those of the empty prompt" if guided else "")
        ]
    code = ['table = load_file(folder / "conditioner" / "conditioner.safetensors")["table"]  # the last row: no class']
    code += ["label = torch.tensor([0, 1])", "cond = table[label].to(transformer.dtype)"]
    return code + (["uncond = table[-1:].expand_as(cond).to(transformer.dtype)"] if guided else [])


def _loop(exported: Exported, guided: bool, by_itself: bool) -> list[str]:
    sampling, (frames, channels, height, width) = exported.sampling, exported.latent_shape
    levels = str(len(sampling.resolved())) if by_itself else 'sigmas=trained["sampling"]["sigmas"]'
    code = [
        "generator = torch.Generator().manual_seed(0)",
        f"x_t = torch.randn(len(cond), {channels}, {frames}, {height}, {width}, generator=generator)",
        f"scheduler.set_timesteps({levels})",
        "with torch.no_grad():",
        "    for timestep in scheduler.timesteps:",
        "        velocity = transformer(x_t, timestep.expand(len(x_t)), cond).sample",
    ]
    if guided:
        code += [
            "        without = transformer(x_t, timestep.expand(len(x_t)), uncond).sample",
            f"        velocity = without + {sampling.guidance_scale!r} * (velocity - without)",
        ]
    return [*code, "        x_t = scheduler.step(velocity, timestep, x_t, generator=generator).prev_sample"]


def _about_scheduler(exported: Exported, by_itself: bool) -> str:
    steps = len(exported.sampling.resolved())
    if not by_itself:
        return (
            "No setting of the scheduler gives these noise levels from their number: pass them, as above. A pipeline "
            "that takes `num_inference_steps` alone runs others than those trained."
        )
    guidance = exported.sampling.guidance_scale
    return (
        f"The scheduler's settings give the trained noise levels from their number: `set_timesteps({steps})`, or "
        f"`num_inference_steps={steps}` and `guidance_scale={guidance!r}` in a pipeline. Do not pass `sigmas` to it as "
        "well: it would shift them once more."
    )


def _quality(source: Source) -> str:
    file = _evaluation(source)
    if file is None:
        return ""
    rows: list[dict[str, Any]] = json.loads(file.read_text())
    rows = [row | {"num_steps": row.get("num_steps") or None} for row in rows]
    rows = [row if row["num_steps"] else row | {"network_calls": None} for row in rows]  # real data have neither
    columns = [column for column in _MEASURED if any(row.get(column) is not None for row in rows)]
    heads = [_MEASURED[column] for column in columns]
    lines = [heads, ["---"] * len(heads), *([_cell(row.get(column)) for column in columns] for row in rows)]
    return "## Measured quality\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _evaluation(source: Source) -> Path | None:
    """What `fewstep eval` wrote in the run that the source belongs to."""
    folder = source.path.resolve()
    run = {"run": folder, "checkpoint": folder.parent.parent}.get(source.kind)
    return run / "evaluation.json" if run is not None and (run / "evaluation.json").is_file() else None


def _recipe(source: Source) -> str:
    if source.recipe is None:
        return ""
    text = yaml.safe_dump(_without_places(source.recipe), sort_keys=False, allow_unicode=True)
    return f"## Recipe\n\nThe resolved recipe, without the places of files.\n\n```yaml\n{text}```"


def _without_places(value: Any) -> Any:
    """The recipe without what names a file or a folder: data, caches, and models that a role starts from."""
    if isinstance(value, (list, tuple)):
        return [_without_places(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_places(item) for key, item in value.items() if key not in _PLACES}
    if kept.get("init") not in ("random", "teacher"):
        kept.pop("init", None)
    return kept

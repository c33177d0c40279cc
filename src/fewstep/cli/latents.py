"""What ``fewstep sample`` does for models that are told by texts: latents, in the format of the data set."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Float
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

from fewstep.checkpoint.tensor_file import read_tensors
from fewstep.cli.console import say, time_of
from fewstep.cli.model import LoadedModel
from fewstep.cli.shipped import find_recipe
from fewstep.config import load_recipe
from fewstep.data.latents import LatentFolder, LatentsSection
from fewstep.data.sources import DataSection
from fewstep.errors import UserError
from fewstep.evaluate.cache import written_whole
from fewstep.evaluate.sample import generate
from fewstep.observe.loops import telling
from fewstep.rollout.few_step import SamplingSection
from fewstep.rollout.sampler import Sampler
from fewstep.shapes import Latents

DEFAULT_NUM = 8


@dataclass(frozen=True)
class Told:
    """What is asked for: embeddings of texts, the negative one, the texts themselves where they are known, and the
    frames that clips begin with."""

    text: Float[Tensor, "n l d"]
    negative: Float[Tensor, "l d"] | None
    prompts: tuple[str, ...] | None = None
    given: Latents | None = None


def write_latents(
    loaded: LoadedModel,
    sampler: Sampler,
    sampling: SamplingSection,
    out: Path | None,
    stem: str,
    *,
    num: int | None,
    seed: int,
    batch: int,
    file: Path | None,
    recipe: str | None,
) -> None:
    """Samples the texts of ``file``, else the first ones of the model's data, and writes one file: ``latents`` as the
    VAE takes them, and ``text``. Raises UserError for texts that the model cannot read, and guidance without a negative
    prompt."""
    told = of_file(file, num) if file is not None else of_data(loaded, sampling, num, recipe)
    _check(loaded, sampling, told, f"--embeddings {file}" if file else "data")
    place = _place(out, f"{stem}.safetensors")
    conditioner: Any = loaded.conditioner.of(told.negative)
    settings: dict[str, Any] = {"batch": batch, "device": loaded.device, "given": told.given}
    with telling():
        made = generate(loaded.role, sampler, conditioner, told.text, seed, **settings)
    metadata = {"format": "pt"} | ({"prompts": json.dumps(told.prompts)} if told.prompts else {})
    with written_whole(place) as part:
        latents = loaded.codec.decode(made.x0).float().contiguous()
        save_file({"latents": latents, "text": told.text.contiguous()}, part, metadata=metadata)
    say(
        f"{len(told.text)} samples of {loaded.source.path} (iteration {loaded.source.iteration}, {loaded.weights} "
        f"weights): {len(sampler.sigmas)} steps ({sampler.solver}), guidance {sampler.guidance_scale:g}, "
        f"{time_of(1000 * sum(made.batch_s) / len(told.text))} a sample on {loaded.device.type}"
    )
    say(f"Wrote {place}: latents {list(latents.shape)}, as the VAE takes them")


def of_file(file: Path, num: int | None) -> Told:
    """The first ``num`` texts of a safetensors file, all if None: ``text`` [n l d] and, for guidance, ``negative``
    [l d]. Raises UserError where there are none or fewer, and for other shapes."""
    if not file.is_file():
        raise UserError(f"--embeddings {file}: there is no such file; write a safetensors file with text [n l d]")
    tensors = read_tensors(file)
    text, negative = tensors.get("text"), tensors.get("negative")
    if text is None or text.ndim != 3 or not text.is_floating_point():
        raise UserError(f"--embeddings {file}: it holds {', '.join(sorted(tensors))}; write text [n l d] of floats")
    if 0 in text.shape:
        raise UserError(f"--embeddings {file}: text has shape {list(text.shape)}; write [n l d], each at least 1")
    _refuse_more(f"--embeddings {file}", num, len(text))
    if negative is not None and negative.shape != text.shape[1:]:
        raise UserError(f"--embeddings {file}: negative has shape {list(negative.shape)}; write {list(text.shape[1:])}")
    return Told(text[:num], negative if negative is None else negative.to(text.dtype))


def of_data(loaded: LoadedModel, sampling: SamplingSection, num: int | None, recipe: str | None) -> Told:
    """The first texts of the data set, and of clips that are continued their beginnings. Raises UserError where the
    data are not known, are no latents, or are fewer than ``num``."""
    if recipe is not None:
        section: Any = load_recipe(find_recipe(recipe)).data
    elif loaded.source.recipe is not None:
        section = TypeAdapter(DataSection).validate_python(loaded.source.recipe["data"])
    else:
        raise UserError(
            f"{loaded.source.path} does not say what it was trained on; name a file of embeddings by --embeddings, or "
            "a recipe of its data by --recipe"
        )
    if not isinstance(section, LatentsSection):
        raise UserError(f"the data are {section.name}, without texts; name a file of embeddings by --embeddings")
    folder = LatentFolder(section)
    _refuse_more(f"data.path = {section.path}", num, len(folder))
    ids = range(min(num or DEFAULT_NUM, len(folder)))
    items = folder.items(ids)
    given = loaded.codec.encode(items.latents)[:, : sampling.given_frames] if sampling.given_frames else None
    return Told(items.text, folder.negative, folder.prompts(ids), given)


def _refuse_more(place: str, num: int | None, found: int) -> None:
    if num is not None and num > found:
        raise UserError(f"--num {num}: {place} has {found} text(s), one for each sample; write {found} or less")


def _check(loaded: LoadedModel, sampling: SamplingSection, told: Told, place: str) -> None:
    """place: where the texts come from."""
    for name, tensor in (("text", told.text), ("negative", told.negative), ("latents", told.given)):
        if tensor is not None and not (finite := tensor.isfinite()).all():
            rows = (~finite.flatten(1).all(1)).nonzero().flatten().tolist()
            raise UserError(
                f"{place}: {name} has NaN or infinite values, the first in row {rows[0]}; write it again, as finite "
                "numbers"
            )
    width = loaded.role.network.section.architecture.text_dim  # type: ignore[union-attr]
    if told.text.shape[2] != width:
        raise UserError(f"the embeddings are {told.text.shape[2]} wide, {loaded.source.path} reads {width}")
    if sampling.guidance_scale != 1.0 and told.negative is None:
        what = "the data have no negative.safetensors" if place == "data" else f"{place}: it has no 'negative' [l d]"
        raise UserError(f"{what}, and guidance {sampling.guidance_scale:g} needs it; add it, or write --guidance 1")
    if sampling.given_frames and told.given is None:
        raise UserError(f"{loaded.source.path} continues clips, and a file of texts has none; leave --embeddings out")


def _place(out: Path | None, name: str) -> Path:
    if out is not None and out.suffix and out.suffix != ".safetensors":
        raise UserError(f"--out {out}: the model makes latents; write a folder, or a file of .safetensors")
    return out if out is not None and out.suffix else (out or Path("samples")) / name

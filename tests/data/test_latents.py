"""Latents and texts that were computed before: every row as it was written, and everything wrong is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fewstep.data.batches import BatchSource
from fewstep.data.latents import LatentFolder, LatentsSection
from fewstep.data.order import BatchOrder
from fewstep.data.sources import open_dataset
from fewstep.data.trajectories import data_digest
from fewstep.errors import UserError
from fewstep.models.codec import LatentsCodec, LatentsCodecSection
from fewstep.models.wan.conditioner import Texts
from tests.data.latent_files import SHAPE, TEXT, drawn, write_folder, write_shard
from tests.docs.prose import ROOT, blocks


def section(folder: Path, batch: int = 2) -> LatentsSection:
    return LatentsSection(path=str(folder), batch=batch)


def opened(folder: Path) -> LatentFolder:
    return LatentFolder(section(folder))


def told(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        opened(folder)
    return str(error.value)


def test_every_row_is_the_one_that_was_written_in_the_order_of_the_names(tmp_path: Path):
    rows = write_folder(tmp_path / "data")
    data = opened(tmp_path / "data")
    assert (len(data), data.shape, data.text_shape, data.classes) == (7, SHAPE, TEXT, ())
    for ids in ([0], [6], [2, 3], [5, 0, 3, 3]):
        items = data.items(ids)
        assert torch.equal(items.latents, rows["latents"][ids])
        assert torch.equal(items.text, rows["text"][ids])
        assert (items.latents.dtype, items.text.dtype) == (torch.float16, torch.bfloat16)
    assert torch.equal(data.items(torch.tensor([4])).latents, rows["latents"][4:5])


def test_the_negative_prompt_has_the_type_of_the_texts_and_is_no_shard(tmp_path: Path):
    rows = write_folder(tmp_path / "data")
    found = opened(tmp_path / "data").negative
    assert found is not None
    assert torch.equal(found, rows["negative"].bfloat16())
    write_folder(tmp_path / "without", negative=False)
    assert opened(tmp_path / "without").negative is None


def test_files_of_other_kinds_and_hidden_ones_are_passed_over(tmp_path: Path):
    write_folder(tmp_path / "data")
    for name in ("notes.txt", ".part-9.safetensors"):
        (tmp_path / "data" / name).write_text("no shard")
    assert len(opened(tmp_path / "data")) == 7


def test_a_batch_holds_normalised_latents_texts_and_the_negative_prompt(tmp_path: Path):
    """In a shuffled order that is a function of the seed, as for every data set."""
    rows = write_folder(tmp_path / "data")
    data: Any = open_dataset(section(tmp_path / "data"))
    mean, std = tuple(0.1 * n for n in range(16)), tuple(1 + 0.25 * n for n in range(16))
    codec, texts = LatentsCodec(LatentsCodecSection(mean=mean, std=std)), Texts(data.negative)

    def condition(text: Tensor) -> tuple[Any, Any]:
        return texts.condition(text), texts.null(len(text))

    order = BatchOrder(3, 7, 5)
    source = BatchSource(data, order, codec.encode, condition, "cpu")
    seen = []
    for iteration in range(7):
        batch, ids = source.batch(iteration), order.ids(iteration)
        wanted = (rows["latents"][ids].double() - torch.tensor(mean).double().view(-1, 1, 1)) / torch.tensor(
            std
        ).double().view(-1, 1, 1)
        assert batch.x0 is not None
        assert batch.uncond is not None
        assert batch.x0.dtype == torch.float32
        assert (batch.x0.double() - wanted).abs().max() < 1e-6
        assert torch.equal(batch.cond.tokens, rows["text"][ids])
        assert torch.equal(batch.uncond.tokens, rows["negative"].bfloat16().expand(5, -1, -1))
        seen += ids.tolist()
    assert sorted(seen) == sorted(5 * [*range(7)])


def test_the_codec_gives_latents_back_as_they_were(tmp_path: Path):
    codec = LatentsCodec(LatentsCodecSection(mean=(0.5, -1.0), std=(2.0, 0.25)))
    latents = drawn(1, 2, 3, 2, 4, 5)
    x0 = codec.encode(latents.bfloat16())
    assert torch.equal(x0[:, :, 1], (latents.bfloat16()[:, :, 1].float() + 1.0) / 0.25)
    assert (codec.decode(codec.encode(latents)) - latents).abs().max() < 1e-6
    assert codec.decode(torch.full((1, 1, 2, 1, 1), 9.0)).flatten().tolist() == [18.5, 1.25], "nothing is clamped"
    assert codec.id == "latents(mean=0.5,-1.0;std=2.0,0.25)"
    with pytest.raises(ValueError, match="has 2 channels; the data have 3"):
        codec.encode(drawn(1, 2, 3, 3, 4, 5))


def test_prompts_are_told_where_every_shard_has_them(tmp_path: Path):
    write_folder(tmp_path / "data")
    assert opened(tmp_path / "data").prompts([0]) is None
    write_shard(tmp_path / "data" / "part-0.safetensors", 3, 0, prompts=["a cat", "ein Hund", "猫"])
    write_shard(tmp_path / "data" / "part-1.safetensors", 4, 10, prompts=["d", "e", "f", "g"])
    assert opened(tmp_path / "data").prompts([4, 2]) == ("e", "猫")


@pytest.mark.parametrize("change", ["latents", "text", "negative", "order"])
def test_the_digest_tells_other_latents_texts_and_negative_prompts(tmp_path: Path, change: str):
    for name in ("before", "same", "after"):
        write_folder(tmp_path / name, negative=True)
    file = tmp_path / "after" / ("negative.safetensors" if change == "negative" else "part-1.safetensors")
    tensors = load_file(file)
    if change == "order":
        tensors = {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}
    else:
        name = "text" if change == "negative" else change
        tensors[name] = tensors[name] + 0.5
    save_file(tensors, file)
    before, same, after = (data_digest(open_dataset(section(tmp_path / name))) for name in ("before", "same", "after"))
    assert before == same != after


def test_a_folder_that_is_not_there_is_said_with_what_to_write(tmp_path: Path):
    assert f"data.path = {tmp_path / 'no'}: it does not exist; write a folder of *.safetensors" in told(tmp_path / "no")
    (tmp_path / "file").write_text("")
    assert "it is a file; write a folder" in told(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "there is no *.safetensors file; write shards with latents [n f c h w]" in told(tmp_path / "empty")
    (tmp_path / "empty" / "a.pt").write_text("")
    assert "(a.pt may execute code or have no header, and are not read)" in told(tmp_path / "empty")


def test_a_file_that_was_cut_off_is_named(tmp_path: Path):
    write_folder(tmp_path / "data")
    file = tmp_path / "data" / "part-1.safetensors"
    whole = file.read_bytes()
    for content in (whole[:-7], whole[:5], b""):
        file.write_bytes(content)
        assert f"data.path: {file} is not a whole safetensors file" in told(tmp_path / "data")


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "channels": ({"shape": (6, 15, 4, 6)}, "latents of shape [6, 15, 4, 6], those of part-0.safetensors have [6, 16"),
    "length": ({"text": (4, 20)}, "text of shape [4, 20], those of part-0.safetensors have [5, 20]; write all shards "),
    "dtype": (
        {"dtypes": (torch.float32, torch.bfloat16)},
        "latents of dtype F32, those of part-0.safetensors have F16",
    ),
    "integers": ({"dtypes": (torch.int32, torch.bfloat16)}, "latents is I32; write float16, bfloat16 or float32"),
    "images": ({"shape": (16, 4, 6)}, "latents has shape [4, 16, 4, 6]; write [n f c h w], each at least 1"),
    "no rows": ({"num": 0}, "latents has shape [0, 6, 16, 4, 6]; write [n f c h w], each at least 1"),
    "prompts": ({"prompts": ["only one"]}, "metadata 'prompts' is 1 entries; write a JSON list of 4 texts"),
    "no list": ({"prompts": "all"}, "metadata 'prompts' is no list; write a JSON list of 4 texts"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_shard_that_is_not_like_the_first_is_refused(tmp_path: Path, name: str):
    write_folder(tmp_path / "data")
    how, message = ODD[name]
    file = tmp_path / "data" / "part-1.safetensors"
    write_shard(file, **({"num": 4, "seed": 10} | how))
    assert f"data.path: {file}: {message}" in told(tmp_path / "data")


def test_missing_tensors_and_texts_that_are_too_few_are_told_all_at_once(tmp_path: Path):
    write_folder(tmp_path / "data")
    save_file({"latent": drawn(0, 4, *SHAPE)}, tmp_path / "data" / "part-1.safetensors")
    message = told(tmp_path / "data")
    assert "part-1.safetensors: there is no 'latents' (it holds latent); write latents [n f c h w]" in message
    assert "part-1.safetensors: there is no 'text' (it holds latent); write text [n l d]" in message
    tensors = {"latents": drawn(0, 4, *SHAPE).half(), "text": drawn(0, 3, *TEXT).bfloat16()}
    save_file(tensors, tmp_path / "data" / "part-1.safetensors")
    assert "part-1.safetensors: 4 latents and 3 texts; write as many of both" in told(tmp_path / "data")


def test_a_negative_prompt_of_another_shape_is_refused(tmp_path: Path):
    write_folder(tmp_path / "data")
    file = tmp_path / "data" / "negative.safetensors"
    for tensor, message in (
        (drawn(0, 4, 20), "text of shape [4, 20], the texts of the items have [5, 20]; pad or encode it like them"),
        (drawn(0, 1, 5, 20), "text has shape [1, 5, 20]; write [l d], each at least 1"),
    ):
        save_file({"text": tensor}, file)
        assert f"data.path: {file}: {message}" in told(tmp_path / "data")


@pytest.mark.parametrize("odd", [float("nan"), float("-inf")])
def test_a_negative_prompt_that_is_not_finite_is_refused_when_it_is_opened(tmp_path: Path, odd: float):
    write_folder(tmp_path / "data")
    file, text = tmp_path / "data" / "negative.safetensors", drawn(99, *TEXT)
    text[2, 7] = text[4, 0] = odd
    save_file({"text": text}, file)
    message = f"data.path: {file}: 2 value(s) of text are NaN or infinite in bfloat16, the dtype of the texts; encode"
    assert message in told(tmp_path / "data")


def test_a_negative_prompt_that_the_dtype_of_the_texts_cannot_hold_is_refused(tmp_path: Path):
    """float16 ends at 65504."""
    write_folder(tmp_path / "data", dtypes=(torch.float32, torch.float16))
    file, text = tmp_path / "data" / "negative.safetensors", drawn(99, *TEXT)
    text[0, 0] = 65504.0
    save_file({"text": text}, file)
    assert opened(tmp_path / "data").negative is not None
    text[0, 0] = 1e5
    save_file({"text": text}, file)
    assert "1 value(s) of text are NaN or infinite in float16" in told(tmp_path / "data")


def test_only_headers_and_the_negative_prompt_are_read_when_a_folder_is_opened(tmp_path: Path):
    """Files that went away do not matter until a row of them is asked for."""
    write_folder(tmp_path / "data")
    data = opened(tmp_path / "data")
    for file in (tmp_path / "data").iterdir():
        file.unlink()
    assert len(data) == 7
    with pytest.raises(UserError, match=r"part-1\.safetensors is not a whole safetensors file"):
        data.items([5])


def test_the_example_of_the_page_writes_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """docs/latents.md: the code runs as it stands, with an encoder that draws."""
    (code,) = [block.text for block in blocks(ROOT / "docs" / "latents.md") if block.language == "python"]
    monkeypatch.chdir(tmp_path)
    clips = [(drawn(n, 17, 3, 32, 48), f"prompt {n}") for n in range(3)]
    latents = {id(clip): drawn(n, 5, 16, 4, 6) for n, (clip, _) in enumerate(clips)}
    embedded = {text: drawn(n, 8, 32) for n, text in enumerate(["", *(text for _, text in clips)])}
    names = {
        "clips": clips,
        "negative_prompt": "",
        "encode_video": lambda clip: latents[id(clip)],
        "encode_text": lambda text: embedded[text],
    }
    exec(compile(code, "docs/latents.md", "exec"), names)
    data = opened(tmp_path / "data" / "wan-latents")
    assert (len(data), data.shape, data.text_shape) == (3, (5, 16, 4, 6), (8, 32))
    assert data.prompts([2]) == ("prompt 2",)
    for number, (clip, text) in enumerate(clips):
        items = data.items([number])
        assert torch.equal(items.latents[0], latents[id(clip)].bfloat16())
        assert torch.equal(items.text[0], embedded[text].bfloat16())
    assert data.negative is not None
    assert torch.equal(data.negative, embedded[""].bfloat16())

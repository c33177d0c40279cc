"""The classifier that judges: trained once for each content, kept, checked, and swapped for another."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fewstep.data.fashion_mnist import FashionMnist, FashionMnistSection, find_folder
from fewstep.data.moving_fashion_mnist import MovingFashionMnist, MovingFashionMnistSection
from fewstep.errors import UserError
from fewstep.evaluate.cache import cached, data_hash, tensor_hash
from fewstep.evaluate.classifier import as_values, classifier_for, train_classifier
from fewstep.evaluate.extractor import (
    ClassifierExtractor,
    ExtractorSection,
    FileExtractor,
    build_extractor,
    load_classifier,
    save_classifier,
)
from tests.evaluate.small import Moving, Stripes, section

TRAIN = Stripes(60, seed=0)
MOVING = Moving(400, seed=0)


@pytest.fixture(scope="module")
def moving(shared_cache: Path) -> ClassifierExtractor:
    """A classifier of clips of 6 frames."""
    extractor = build_extractor(section(shared_cache, updates=150), MOVING, "cpu")
    assert isinstance(extractor, ClassifierExtractor)
    return extractor


def test_the_classifier_tells_the_classes_of_data_it_has_not_seen(tmp_path: Path):
    extractor = build_extractor(section(tmp_path, updates=40), TRAIN, "cpu")
    items = Stripes(50, seed=1).items(range(50))
    features = extractor.features(as_values(items.pixels))
    assert features.shape == (50, 64) == (50, extractor.num_features)
    assert features.dtype == torch.float32
    logits = extractor.logits(features)
    assert logits is not None
    assert logits.shape == (50, 3) == (50, extractor.num_classes)
    assert (logits.argmax(1) == items.label).float().mean() > 0.95


def test_the_features_are_what_the_last_layer_reads_and_stay_frozen(tmp_path: Path):
    extractor = build_extractor(section(tmp_path), TRAIN, "cpu")
    assert isinstance(extractor, ClassifierExtractor)
    network = extractor.network
    pixels = as_values(TRAIN.items(range(7)).pixels)
    head = extractor.features(pixels) @ network.head.weight.T + network.head.bias
    torch.testing.assert_close(head, network(pixels))
    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())
    one_by_one = torch.cat([extractor.features(row[None]) for row in pixels])
    torch.testing.assert_close(extractor.features(pixels), one_by_one)


def test_the_same_content_gives_the_same_judge_and_is_trained_once(tmp_path: Path):
    first = build_extractor(section(tmp_path), TRAIN, "cpu")
    (file,) = tmp_path.iterdir()
    stamp = file.stat().st_mtime_ns
    second = build_extractor(section(tmp_path), Stripes(60, seed=0), "cpu")
    assert first.id == second.id
    assert file.stat().st_mtime_ns == stamp
    elsewhere = build_extractor(section(tmp_path / "other"), TRAIN, "cpu")
    assert elsewhere.id == first.id, "training is deterministic"


def test_changed_data_or_settings_give_another_judge(tmp_path: Path):
    changed = Stripes(60, seed=0)
    changed.pixels[59, 0, 0, 0, 0] ^= 1
    relabelled = Stripes(60, seed=0)
    relabelled.label[5] = 0
    ids = {
        build_extractor(section(tmp_path, **settings), data, "cpu").id
        for data, settings in (
            (TRAIN, {}),
            (changed, {}),
            (relabelled, {}),
            (TRAIN, {"seed": 1}),
            (TRAIN, {"updates": 13}),
        )
    }
    assert len(ids) == 5 == len(list(tmp_path.iterdir()))


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_in_the_cache_is_made_again_with_a_warning(tmp_path: Path, damage: str):
    first = build_extractor(section(tmp_path), TRAIN, "cpu")
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes({"cut": bytes(content[:500]), "flipped": bytes(content), "empty": b""}[damage])
    with pytest.warns(UserWarning, match="is damaged .* made again"):
        second = build_extractor(section(tmp_path), TRAIN, "cpu")
    assert second.id == first.id
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_extractor(section(tmp_path), TRAIN, "cpu")


def test_many_writers_at_once_leave_one_whole_file(tmp_path: Path):
    def make() -> dict[str, Tensor]:
        return {"x": torch.arange(50_000)}

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: cached(tmp_path, "same", make)["x"], range(24)))
    assert all(torch.equal(x, torch.arange(50_000)) for x in found)
    assert [path.name for path in tmp_path.iterdir()] == ["same.safetensors"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path):
    def fail() -> dict[str, Tensor]:
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        cached(tmp_path, "name", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"cannot be written .* name another folder"):
        cached(tmp_path / "file", "name", lambda: {"x": torch.zeros(1)})


def test_hashes_see_names_types_shapes_values_classes_and_labels():
    x = torch.arange(6.0)
    others = ({"b": x}, {"a": x.int()}, {"a": x.view(2, 3)}, {"a": -x}, {"a": x, "b": x})
    assert len({tensor_hash(tensors) for tensors in ({"a": x}, *others)}) == 6
    assert tensor_hash({"b": x, "a": x}) == tensor_hash({"a": x, "b": x})
    renamed = Stripes(60, seed=0)
    renamed.classes = ("rows", "columns", "edge")
    sets = (TRAIN, renamed, Stripes(59, seed=0), Stripes(60, seed=1))
    assert len({data_hash(dataset) for dataset in sets}) == 4
    assert data_hash(TRAIN) == data_hash(TRAIN, torch.arange(60)) != data_hash(TRAIN, torch.arange(59))


def test_training_touches_no_global_generator(tmp_path: Path):
    """PITFALLS, validation: it changes training."""
    state = torch.get_rng_state()
    build_extractor(section(tmp_path), TRAIN, "cpu")
    build_extractor(section(tmp_path), TRAIN, "cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_classifier_of_clips_tells_the_item_and_the_motion_of_clips_it_has_not_seen(moving: ClassifierExtractor):
    clips = Moving(60, seed=1)
    logits = moving.logits(moving.features(clips.values))
    assert logits is not None
    assert (logits.argmax(1) // 2 == clips.label // 2).float().mean() > 0.95
    assert (logits.argmax(1) % 2 == clips.label % 2).float().mean() > 0.75


def test_features_of_a_clip_depend_on_the_order_of_its_frames_and_on_every_frame(moving: ClassifierExtractor):
    """Motion is in the features, and a fault in one frame is too; other clips of the batch are not."""
    clips = Moving(5, seed=1).values
    features = moving.features(clips)
    assert features.shape == (5, 64)
    torch.testing.assert_close(torch.cat([moving.features(clip[None]) for clip in clips]), features)
    shuffled = moving.features(clips[:, [0, 3, 1, 5, 2, 4]])
    assert ((shuffled - features).norm(dim=1) > 0.03 * features.norm(dim=1)).all()
    for frame in range(6):
        faulty = clips.clone()
        faulty[:, frame] = -1
        assert ((moving.features(faulty) - features).norm(dim=1) > 0.02 * features.norm(dim=1)).all()


def test_clips_of_another_length_or_size_are_refused(moving: ClassifierExtractor):
    for shape in ((2, 5, 1, 16, 16), (2, 6, 1, 15, 16), (2, 6, 3, 16, 16)):
        with pytest.raises(UserError, match=r"judges samples of shape \(6, 1, 16, 16\)"):
            moving.features(torch.zeros(shape))


def test_a_classifier_of_clips_is_cached_and_read_from_a_file_like_one_of_images(
    tmp_path: Path, moving: ClassifierExtractor
):
    few = section(tmp_path, updates=3)
    first, second = (build_extractor(few, MOVING, "cpu") for _ in range(2))
    assert first.id == second.id != moving.id
    assert first.id.startswith("clip-classifier-1:")
    (file,) = tmp_path.iterdir()
    assert "32x3" in file.name, "32 clips a batch"
    save_classifier(moving.network, tmp_path / "mine.safetensors")
    read = build_extractor(ExtractorSection(name="file", path=str(tmp_path / "mine.safetensors")), MOVING, "cpu")
    clips = Moving(3, seed=2).values
    assert torch.equal(read.features(clips), moving.features(clips))
    with pytest.raises(UserError, match=r"4 classes of shape \(6, 1, 16, 16\) .*, the data are 3"):
        build_extractor(ExtractorSection(name="file", path=str(tmp_path / "mine.safetensors")), TRAIN, "cpu")


def test_a_classifier_of_ones_own_is_read_from_a_file(tmp_path: Path):
    network = train_classifier(classifier_for(TRAIN, widths=(5, 7)), TRAIN, seed=3, updates=20)
    save_classifier(network, tmp_path / "mine.safetensors")
    extractor = build_extractor(ExtractorSection(name="file", path=str(tmp_path / "mine.safetensors")), TRAIN, "cpu")
    pixels = as_values(TRAIN.items(range(5)).pixels)
    assert torch.equal(extractor.features(pixels), network.features(pixels))
    assert isinstance(extractor, FileExtractor)
    assert extractor.network.widths == (5, 7)


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path):
    with pytest.raises(UserError, match=r"there is no file .*gone"):
        load_classifier(tmp_path / "gone.safetensors")
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(UserError, match=r"text.safetensors' is no classifier"):
        load_classifier(tmp_path / "text.safetensors")
    network = train_classifier(classifier_for(TRAIN), TRAIN, updates=2)
    save_classifier(network, tmp_path / "mine.safetensors")
    wide = Stripes(9, seed=0)
    wide.shape = (1, 1, 8, 12)
    with pytest.raises(UserError, match=r"3 classes of shape \(1, 1, 8, 10\) .*, the data .* \(1, 1, 8, 12\)"):
        build_extractor(ExtractorSection(name="file", path=str(tmp_path / "mine.safetensors")), wide, "cpu")


def test_a_file_is_read_as_tensors_and_never_run(tmp_path: Path):
    """A pickle is a program; what torch.save wrote is refused, not opened."""
    torch.save({"x": torch.zeros(1)}, tmp_path / "weights.pt")
    with pytest.raises(UserError, match="no classifier"):
        load_classifier(tmp_path / "weights.pt")


def test_what_cannot_be_judged_is_refused(tmp_path: Path):
    single = Stripes(9, seed=0)
    single.classes = ("all",)
    with pytest.raises(UserError, match="two classes or more"):
        build_extractor(section(tmp_path), single, "cpu")
    extractor = build_extractor(section(tmp_path), TRAIN, "cpu")
    with pytest.raises(UserError, match=r"judges samples of shape \(1, 1, 8, 10\) .*, not \(1, 1, 9, 10\)"):
        extractor.features(torch.zeros(2, 1, 1, 9, 10))


def test_settings_that_are_not_read_are_refused():
    with pytest.raises(ValidationError, match="reads no 'path'"):
        ExtractorSection(path="somewhere")
    with pytest.raises(ValidationError, match="needs 'path'"):
        ExtractorSection(name="file")
    with pytest.raises(ValidationError, match="Extra inputs"):
        ExtractorSection(inception=True)  # type: ignore[call-arg]


def test_an_extractor_from_a_plugin_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Mean:
        name, id, num_features, num_classes = "mean", "mean:1", 2, None

        @classmethod
        def build(cls, section: ExtractorSection, dataset: Any, device: Any) -> Mean:
            return cls()

        def features(self, pixels: Tensor) -> Tensor:
            return torch.stack([pixels.mean((1, 2, 3, 4)), pixels.std((1, 2, 3, 4))], 1)

        def logits(self, features: Tensor) -> None:
            return None

    plugin = ModuleType("my_lab_extractors")
    plugin.EXTRACTORS = (Mean,)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_lab_extractors", plugin)
    chosen = ExtractorSection(name="mean", cache=str(tmp_path))
    assert isinstance(build_extractor(chosen, TRAIN, "cpu", ["my_lab_extractors"]), Mean)
    with pytest.raises(UserError, match=r"extractor.name = mean: .* one of classifier, file, or name its module"):
        build_extractor(chosen, TRAIN, "cpu")
    with pytest.raises(UserError, match="write classifier"):
        build_extractor(ExtractorSection(name="clasifier"), TRAIN, "cpu")


def test_a_little_training_already_knows_real_clothes(tmp_path: Path):
    """Fashion-MNIST, where it is on this machine: 60 of the 1,000 updates."""
    settings = FashionMnistSection(size=16, batch=64)
    try:
        find_folder(settings)
    except UserError:
        pytest.skip("Fashion-MNIST is not on this machine")
    train, test = FashionMnist(settings), FashionMnist(settings, "test")
    network = train_classifier(classifier_for(train), train, updates=60)
    items = test.items(range(0, 10_000, 5))
    assert (network(as_values(items.pixels)).argmax(1) == items.label).float().mean() > 0.75


def test_a_little_training_already_knows_real_clothes_in_motion(tmp_path: Path):
    """Moving Fashion-MNIST, where it is on this machine: 60 of the 1,000 updates."""
    settings = MovingFashionMnistSection(batch=8, frames=6)
    try:
        train, test = MovingFashionMnist(settings), MovingFashionMnist(settings, "test")
    except UserError:
        pytest.skip("Fashion-MNIST is not on this machine")
    network = train_classifier(classifier_for(train), train, updates=60)
    items = test.items(range(0, 10_000, 20))
    label = network(as_values(items.pixels)).argmax(1)
    assert (label // 2 == items.label // 2).float().mean() > 0.25
    assert (label % 2 == items.label % 2).float().mean() > 0.75

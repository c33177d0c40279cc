"""What a network is told about a sample."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fewstep.models.wan.conditioner import (
    ClassLabelConditioner,
    ClassLabelSection,
    ConditionerSection,
    EmbeddingCond,
    EmbeddingConditioner,
    EmbeddingSection,
    LabelCond,
    build_conditioner,
)
from fewstep.records import concat, leaves, rows
from tests.models.tiny import LABELS, TEXT, randomise


@pytest.fixture
def labels() -> ClassLabelConditioner:
    conditioner = build_conditioner(LABELS, 20)
    assert isinstance(conditioner, ClassLabelConditioner)
    randomise(conditioner)
    return conditioner


def test_a_label_becomes_its_row_of_the_table(labels):
    tokens = labels(labels.condition(torch.tensor([3, 0, 3])))
    assert tokens.shape == (3, 2, 20)
    assert torch.equal(tokens, labels.table[[3, 0, 3]])


def test_the_null_is_the_last_row_and_learns(labels):
    cond = labels.null(2)
    assert cond.label.tolist() == [5, 5]
    tokens = labels(cond)
    assert torch.equal(tokens, labels.table[[5, 5]])
    tokens.sum().backward()
    assert torch.equal(labels.table.grad[5], torch.full((2, 20), 2.0))
    assert not labels.table.grad[:5].any()


@pytest.mark.parametrize("label", [5, -1])
def test_labels_outside_the_classes_are_refused(labels, label):
    with pytest.raises(ValueError, match="numbered 0 to 4"):
        labels.condition(torch.tensor([1, label]))


def test_embeddings_are_handed_on():
    tokens = torch.randn(2, 7, 20)
    assert torch.equal(build_conditioner(TEXT, 20)(EmbeddingCond(tokens)), tokens)


def test_the_cond_of_another_conditioner_is_refused(labels):
    embedding = EmbeddingConditioner(TEXT, 20)
    with pytest.raises(TypeError, match=r"class_label.*LabelCond.*EmbeddingCond"):
        labels(EmbeddingCond(torch.randn(2, 7, 20)))
    with pytest.raises(TypeError, match=r"embedding.*EmbeddingCond.*LabelCond"):
        embedding(LabelCond(torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"width 21.*text_dim 20"):
        embedding(EmbeddingCond(torch.randn(2, 7, 21)))


def test_conds_are_records_with_the_sample_axis_first(labels):
    for cond in (labels.condition(torch.arange(5)), EmbeddingCond(torch.randn(5, 7, 20))):
        assert [leaf.shape[0] for leaf in leaves(cond)] == [5]
        parts = [rows(cond, slice(0, 2)), rows(cond, slice(2, 5))]
        assert torch.equal(leaves(concat(parts))[0], leaves(cond)[0])


def test_a_recipe_names_its_conditioner():
    adapter = TypeAdapter(ConditionerSection)
    assert adapter.validate_python({"name": "class_label", "classes": 10}) == ClassLabelSection(classes=10)
    assert adapter.validate_python({"name": "embedding"}) == EmbeddingSection()
    for wrong in ({"name": "text"}, {"name": "class_label"}, {"name": "embedding", "classes": 10}):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)

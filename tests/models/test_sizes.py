"""The recipe section of a Wan network."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from fewstep.models.families import ModelSection
from fewstep.models.wan.sizes import SIZES, WanSection
from tests.models.tiny import TEXT, tiny_section


def test_a_size_alone_is_its_row_of_the_table():
    for size, numbers in SIZES.items():
        assert WanSection(size=size, conditioner=TEXT).architecture == numbers


def test_an_override_changes_that_number_alone():
    section = WanSection(size="14B", conditioner=TEXT, layers=2, heads=20)
    assert (section.architecture.layers, section.architecture.heads, section.architecture.head_dim) == (2, 20, 256)
    assert section.architecture.ffn_dim == 13824


def test_a_recipe_names_a_family_and_a_size():
    given = {"family": "wan", "size": "nano", "conditioner": {"name": "class_label", "classes": 10}}
    assert TypeAdapter(ModelSection).validate_python(given).architecture == SIZES["nano"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"heads": 5}, "48 .*5 heads"),
        ({"heads": 16}, "48 .*16 heads"),
        ({"freq_dim": 31}, "freq_dim 31"),
        ({"patch": (2, 2, 2)}, "spans several frames"),
        ({"layers": 0}, "greater than 0"),
        ({"width": 3}, "Extra inputs"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change, words):
    with pytest.raises(ValidationError, match=words):
        tiny_section(**change)

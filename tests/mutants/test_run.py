"""The runner of the mutants, on a tree of two lines; and the list of mutants, against the code as it is now."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS, Mutant
from tests.mutants.run import ROOT, judge, judge_all, mutate, red_without_mutants


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package that doubles, with a test that notices whether it does."""
    package = tmp_path / "src" / "fewstep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "double.py").write_text("def double(x):\n    return x * 2\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_double.py").write_text(
        "from fewstep.double import double\n\n\ndef test_three():\n    assert double(3) == 6\n\n\n"
        "def test_two():\n    assert double(2) == 4\n"
    )
    return tmp_path


def mutant(old: str = "* 2", new: str = "+ 2", test: str = "test_three") -> Mutant:
    return Mutant("double", "double.py", old, new, (f"test_double.py::{test}",))


def test_a_mutant_is_caught_by_the_test_that_turns_red_and_a_blind_test_lets_it_survive(tree):
    caught, survived = sorted(judge_all([mutant(), mutant(test="test_two")], 2, tree), key=lambda v: not v.caught)
    assert (caught.caught, caught.by) == (True, "test_double.py::test_three")
    assert (survived.caught, survived.by) == (False, "SURVIVED")
    assert "x * 2" in (tree / "src" / "fewstep" / "double.py").read_text(), "the tree itself must stay as it is"


@pytest.mark.parametrize(("old", "count"), [("* 3", 0), ("x", 2)])
def test_a_mutant_whose_text_does_not_stand_there_once_is_not_applied(tree, old, count):
    with pytest.raises(ValueError, match=f"{count} times, not once"):
        mutate(mutant(old=old), tree)
    assert not judge(mutant(old=old), tree).caught


def test_a_test_that_does_not_exist_catches_nothing(tree):
    verdict = judge(mutant(test="test_four"), tree)
    assert not verdict.caught
    assert "pytest ended with 4" in verdict.by


def test_tests_that_are_red_on_the_sound_code_are_told(tree):
    assert red_without_mutants([mutant()], tree) == ""
    mutate(mutant(), tree)
    assert "test_three" in red_without_mutants([mutant()], tree)


def test_every_mutant_still_applies_and_its_tests_exist():
    assert max(Counter(m.name for m in MUTANTS).values(), default=1) == 1
    for m in MUTANTS:
        assert (ROOT / "src" / "fewstep" / m.file).read_text().count(m.old) == 1, m.name
        assert m.old != m.new, m.name
        for test in m.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), f"{m.name}: {test}"

"""The mutants: the code broken on purpose in one place each, and the tests that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``old``, which stands in ``file`` exactly once, becomes ``new``; one of ``tests`` (pytest's ids) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS: tuple[Mutant, ...] = ()

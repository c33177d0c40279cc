"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``old``, which stands once in ``file`` (below ``src/fewstep``), becomes ``new``; then one of ``tests`` (pytest's
    ids, below ``tests``) must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

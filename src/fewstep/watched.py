"""Loops that may take minutes say how far they are, to whoever listens; nobody does unless a command asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Listener = Callable[[str, int, int], None]
"""Is told what a loop does, how many of its turns are done, and of how many."""

_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


def watched(what: str, items: Sequence[T]) -> Iterator[T]:
    """The items, one by one; the listener hears of each before its turn, and of the end."""
    listener = _LISTENER.get()
    for done, item in enumerate(items):
        if listener is not None:
            listener(what, done, len(items))
        yield item
    if listener is not None:
        listener(what, len(items), len(items))


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Inside, loops tell ``listener``."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)

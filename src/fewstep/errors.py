"""Errors that are the user's to mend: the command line prints them without a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class UserError(ValueError):
    """Something in a recipe, a command or a file is wrong. The message names the place, the value and what to do."""


class UserErrors(UserError):
    """Several of them, reported at once."""

    def __init__(self, errors: Sequence[str]):
        super().__init__("\n".join(errors))
        self.errors = tuple(errors)

    def __reduce__(self) -> tuple[type, tuple[tuple[str, ...]]]:
        """On their way from one process to another they stay several."""
        return type(self), (self.errors,)


@contextmanager
def named(place: Path) -> Iterator[None]:
    """Inside, an OSError that does not say which file it is about says ``place``; those of a full disk never do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error

"""What every command shares: where text goes, and how an error ends a command.

Exit codes: 0 done; 1 the run failed; 2 the user can mend it (one clean line each, no traceback); 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from fewstep.errors import UserError, UserErrors

RUN_FAILED, USER_ERROR, STOPPED = 1, 2, 130
USERS_FILES = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
USERS_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP}
"""Errors of a disk that is full or read-only, and of names that it cannot hold."""

out = Console()
err = Console(stderr=True)


def say(text: str, style: str | None = None) -> None:
    """One paragraph, never broken inside a path, brackets taken as they are."""
    out.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def show(table: Table) -> None:
    """A table at its full width: figures are never cut; in a narrow terminal its lines wrap instead."""
    needed = table.__rich_measure__(out, out.options.update(max_width=1000)).maximum
    (out if needed <= out.width else Console(width=needed)).print(table)


def listed(things: Iterable[object], last: str = "and") -> str:
    """``a, b and c``."""
    *before, final = map(str, things)
    return f"{', '.join(before)} {last} {final}" if before else final


def time_of(ms: float) -> str:
    """Three digits of milliseconds, or of seconds where there are 1000 or more."""
    return f"{ms:.3g} ms" if ms < 999.5 else f"{ms / 1000:.3g} s"


def table(title: str, *columns: str, numbers: bool = False) -> Table:
    """A plain table in the one style of all commands; ``numbers`` aligns all columns but the first to the right."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if numbers and index else "left", overflow="fold")
    return made


def complaints(error: BaseException) -> list[str] | None:
    """What the user has to mend, a line for each thing; None if the error is not the user's."""
    if isinstance(error, UserErrors):
        return list(error.errors)
    if isinstance(error, UserError):
        return [str(error)]
    if isinstance(error, USERS_FILES) or (isinstance(error, OSError) and error.errno in USERS_DISK):
        return [f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)]
    if type(error).__name__ == "ValidationError":  # of pydantic, which is not imported for this
        found: list[dict[str, Any]] = error.errors()  # type: ignore[attr-defined]
        return [": ".join(filter(None, (".".join(map(str, one["loc"])), one["msg"]))) for one in found]
    return None


def complain(lines: Sequence[str]) -> None:
    """Each on a line of its own, on standard error."""
    rank = os.environ.get("RANK")  # of several processes, which one it is
    for text in lines:
        prefix = "error: " if rank is None else f"rank {rank}: error: "
        err.print(Text.assemble((prefix, "bold red"), text), highlight=False, soft_wrap=True)


def advise(error: BaseException) -> None:
    """What was noted on an error on its way, such as how to go on; last, where it is seen."""
    for text in getattr(error, "__notes__", ()):
        err.print(text, markup=False, highlight=False, soft_wrap=True)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    err.print("warning: ", style="bold yellow", end="")
    err.print(str(message), markup=False, highlight=False, soft_wrap=True)


class Commands(TyperGroup):
    """The group of all commands: ends each one cleanly. ``--debug`` may stand anywhere and brings tracebacks back."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = {"debug": "--debug" in args}
        return super().parse_args(ctx, [arg for arg in args if arg != "--debug"])

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            if not ctx.obj["debug"]:
                warnings.showwarning = _warn
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:
                err.print("Stopped by Ctrl-C.")
                advise(error)
                raise typer.Exit(STOPPED) from None
            except Exception as error:
                if (
                    type(error).__name__ in ("RankError", "WorkerError") and not ctx.obj["debug"]
                ):  # the other rank says more
                    complain([str(error)])
                    advise(error)
                    raise typer.Exit(RUN_FAILED) from None
                lines = complaints(error)
                if lines is None or ctx.obj["debug"]:
                    raise
                complain(lines)
                advise(error)
                raise typer.Exit(USER_ERROR) from None

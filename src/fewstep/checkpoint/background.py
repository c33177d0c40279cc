"""Saving beside the training: what is saved is copied to host memory, and a thread writes it while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any

from fewstep.checkpoint.save import CheckpointSection, save_checkpoint
from fewstep.checkpoint.tensor_file import Later, Named, in_file_order


class Saver:
    """Saves one checkpoint after the other, each of them beside the training where it is to be ``asynchronous``.

    At the end of the ``with`` block the last one is on the disk, except after a KeyboardInterrupt, which waits for
    nothing: then the one before it is the newest.
    """

    def __init__(self) -> None:
        self._writer: Thread | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self._writer is not None and not issubclass(kind, KeyboardInterrupt):
            self._writer.join()

    def save(
        self,
        checkpoints: Path,
        iteration: int,
        tensors: Mapping[str, Named],
        meta: Mapping[str, Any],
        keep: CheckpointSection,
    ) -> None:
        """``save_checkpoint``; asynchronous, after the one before is on the disk, and until all is copied.

        Tensors that come ``Later`` are made now, in the order in which ``take_part`` makes them.
        """
        if not keep.asynchronous:
            save_checkpoint(checkpoints, iteration, tensors, meta, keep)
            return
        self.wait()
        taken = {group: _copied(named) for group, named in tensors.items()}
        self._writer = Thread(target=self._write, args=(checkpoints, iteration, taken, dict(meta), keep), daemon=True)
        self._writer.start()

    def check(self) -> None:
        """Raises what ``save_checkpoint`` raised in the meantime, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Until what is being saved is on the disk; then :meth:`check`."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.check()

    def _write(self, *what: Any) -> None:
        try:
            save_checkpoint(*what)
        except Exception as error:
            self._error = error


def _copied(tensors: Named) -> dict[str, Later]:
    """Copies in host memory, which are written one after the other without holding up other threads."""
    copies = {}
    for name in in_file_order(tensors):
        tensor = tensors[name]
        whole = tensor.make() if isinstance(tensor, Later) else tensor
        copy = whole.detach().to("cpu", copy=True)
        copies[name] = Later(tuple(copy.shape), copy.dtype, copy.detach)
    return copies

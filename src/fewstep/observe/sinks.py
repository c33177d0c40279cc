"""Where rows of metrics go: a local JSON-lines file always, TensorBoard and Weights & Biases where the recipe asks."""

from __future__ import annotations

import importlib.util
import json
import math
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from fewstep.errors import named
from fewstep.observe.metrics import RESERVED, Row
from fewstep.section import Section


class WandbSection(Section):
    """Weights & Biases, beside the local file. Needs the extra ``wandb``."""

    project: str = "fewstep"
    """The project that the run appears in."""
    entity: str | None = None
    """The team or user that owns the project; null for the default of the account."""
    mode: Literal["online", "offline"] | None = None
    """``offline`` keeps everything in the run folder for ``wandb sync``; null follows wandb's own settings."""


class ObserveSection(Section):
    """What a run writes about itself while it trains."""

    every: int = Field(default=10, ge=1)
    """Iterations between rows of metrics, and so between waits for the device."""
    tensorboard: bool = True
    """Also write TensorBoard events, into the folder ``tensorboard`` of the run."""
    wandb: WandbSection | None = None
    """Also log to Weights & Biases; null for no."""
    report: bool = True
    """Write ``report.html`` into the run folder after validations and at the end."""


def missing_packages(section: ObserveSection) -> list[str]:
    """One line for each package that the section needs and this environment lacks, and what to do about it."""
    wanted = {
        "tensorboard": (section.tensorboard, "pip install tensorboard", "observe.tensorboard=false"),
        "wandb": (section.wandb is not None, "pip install 'fewstep[wandb]'", "observe.wandb=null"),
    }
    return [
        f"observe.{name}: the package '{name}' is not installed; run `{install}`, or write {off}"
        for name, (asked, install, off) in wanted.items()
        if asked and importlib.util.find_spec(name) is None
    ]


class Sink(Protocol):
    """Takes every row once, in order."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class JsonlSink:
    """Appends each row to a file as one line of JSON and hands it to the operating system at once.

    The file only ever grows. NaN and infinities are the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``. Where the
    last writer was killed in the middle of a line, that torn line is cut off when the file is opened.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend(path)
        self._file, self._path = path.open("ab", buffering=0), path

    def write(self, row: Row) -> None:
        with named(self._path):
            line = memoryview(_line(row))
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """The rows that hold: of several for one kind and iteration the latest, and after a resume from iteration n none of
    the earlier ones beyond n. Events and warnings of one iteration all stand.

    May read a file that is being written: an unfinished last line is left out. A damaged line elsewhere is left out
    with a warning. Raises FileNotFoundError where there is no file.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    *lines, unfinished = path.read_bytes().split(b"\n")
    for place, line in enumerate([*lines, unfinished], start=1):
        row = _parsed(line)
        if row is None:
            if line and place <= len(lines):
                warnings.warn(f"{path}, line {place}: not a row of metrics; it is left out", stacklevel=2)
            continue
        if row.kind == "resume":
            rows = {key: earlier for key, earlier in rows.items() if earlier.iteration <= row.iteration}
        key = (row.kind, row.iteration, row.message)
        rows.pop(key, None)
        rows[key] = row
    return list(rows.values())


def _line(row: Row) -> bytes:
    own = {"kind": row.kind, "iteration": row.iteration, "time_s": row.time_s, "message": row.message}
    if not row.message:
        del own["message"]
    values = {name: _encoded(float(value)) for name, value in row.values.items()}
    return json.dumps(own | values, allow_nan=False).encode() + b"\n"


def _encoded(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _parsed(line: bytes) -> Row | None:
    try:
        entry = json.loads(line)
        values = {name: float(value) for name, value in entry.items() if name not in RESERVED}
        iteration, time_s = int(entry["iteration"]), float(entry["time_s"])
        if not (0 <= iteration < 2**63 and math.isfinite(time_s)):
            return None
        return Row(str(entry["kind"]), iteration, time_s, values, str(entry.get("message", "")))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _mend(path: Path) -> None:
    """Ends the file with a whole line: a last line without its end stays where it is a row, else it goes."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole == len(content):
        return
    with path.open("r+b") as file:
        if _parsed(content[whole:]) is None:
            file.truncate(whole)
        else:
            file.seek(0, 2)
            file.write(b"\n")


class TensorBoardSink:
    """TensorBoard events in float32, at iterations; earlier ones beyond ``iteration``, where this process begins, are
    hidden."""

    def __init__(self, folder: Path, iteration: int = 0):
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder), purge_step=iteration + 1, flush_secs=10)

    def write(self, row: Row) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.iteration)
        if row.message:
            self._writer.add_text(row.kind, row.message, row.iteration)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases, with ``iteration`` as the axis of every metric and one run through all resumes: its id is kept
    in ``wandb_run_id.txt``. No failure of it ends the training: it warns, and goes on offline or not at all.
    """

    def __init__(
        self, section: WandbSection, run_folder: Path, name: str, recipe: Mapping[str, Any], warn: Callable[[str], None]
    ):
        self._warn, self._run = warn, None
        for mode in dict.fromkeys((section.mode, "offline")):
            try:
                self._run = self._start(section, run_folder, name, recipe, mode)
                return
            except Exception as error:
                then = "without it" if mode == "offline" else "offline; send the run later with `wandb sync`"
                warn(f"Weights & Biases could not start ({_first_line(error)}); training goes on {then}")

    @staticmethod
    def _start(section: WandbSection, run_folder: Path, name: str, recipe: Mapping[str, Any], mode: Any) -> Any:
        import wandb

        settings = wandb.Settings(console="off", init_timeout=30, login_timeout=60, finish_timeout=60)
        run = wandb.init(
            project=section.project,
            entity=section.entity,
            mode=mode,
            id=_kept_id(run_folder / "wandb_run_id.txt"),
            resume="allow",
            name=name,
            config=dict(recipe),
            allow_val_change=True,
            dir=run_folder,
            settings=settings,
        )
        run.define_metric("iteration")
        run.define_metric("*", step_metric="iteration")
        return run

    def write(self, row: Row) -> None:
        if row.values:
            self._attempt(lambda run: run.log({"iteration": row.iteration, "time_s": row.time_s, **row.values}))

    def close(self) -> None:
        self._attempt(lambda run: run.finish())
        self._run = None

    def _attempt(self, action: Callable[[Any], Any]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            self._run = None
            self._warn(f"Weights & Biases failed ({_first_line(error)}); training goes on without it")


def _kept_id(path: Path) -> str:
    """The run's id: the one in the file, else a new one, written there."""
    known = path.read_text().strip() if path.exists() else ""
    if not known:
        known = secrets.token_hex(4)
        path.write_text(known + "\n")
    return known


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def open_sinks(
    section: ObserveSection,
    run_folder: Path,
    *,
    name: str,
    recipe: Mapping[str, Any],
    iteration: int = 0,
    warn: Callable[[str], None] = warnings.warn,
) -> Iterator[Sink]:
    """Opens the sinks that the section asks for, one after the other, the local file first. ``iteration``: where this
    process begins. ``warn`` is told about a tracker that fails."""
    yield JsonlSink(run_folder / "metrics.jsonl")
    if section.tensorboard:
        yield TensorBoardSink(run_folder / "tensorboard", iteration)
    if section.wandb is not None:
        yield WandbSink(section.wandb, run_folder, name, recipe, warn)

"""``fewstep doctor``: what this machine can run, what is missing, and how to get it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

import fewstep
from fewstep.cli.console import out, say, table
from fewstep.cli.shipped import run_recipe
from fewstep.errors import UserError, UserErrors
from fewstep.shipped import recipe_of_run, shipped_recipes, shipped_result

if TYPE_CHECKING:
    from fewstep.config import Recipe

EXTRAS = {
    "hf": (("diffusers", "transformers"), "published models, diffusers pipelines"),
    "wandb": (("wandb",), "tracking by Weights & Biases"),
    "ray": (("ray",), "trainer groups (engine.name: ray)"),
    "video": (("av",), "folders of videos, mp4 files of clips and streams"),
}
"""Optional extras: their packages, and what they are for."""
STYLES = {"ok": "green", "later": "dim", "gpu": "dim", "missing": "yellow", "fault": "bold red"}
CORE_FLOPS = 1e10
"""Floating-point operations that a core does in a second of training small networks, about."""
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. state: ``ok``, ``later`` (something comes first), ``gpu``
    (for a machine with one), ``missing`` (something cannot be done), ``fault`` (nothing can)."""

    topic: str
    state: str
    detail: str
    remedy: str = ""


def doctor() -> None:
    """Look at this machine: Python, PyTorch, devices, memory, disk, data, optional packages, and which recipes can run.

    Under torchrun it looks at all ranks together too: programs, clocks, memory, links, and whether they share this
    folder. Exit code 1 if nothing can run, else 0.
    """
    findings = [*machine(), *packages()]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        findings += together()
        if os.environ["RANK"] != "0":
            return
    if all(finding.state != "fault" for finding in findings):
        findings += [*data(), *recipes()]
    rows = table("This machine", "", "", "")
    for finding in findings:
        detail = Text(finding.detail)
        if finding.remedy:
            detail.append(f"\n{finding.remedy}", style="italic")
        rows.add_row(Text(finding.topic), Text(finding.state, style=STYLES[finding.state]), detail)
    out.print(rows)
    faults = [finding for finding in findings if finding.state == "fault"]
    if faults:
        say(f"\n{', '.join(finding.topic for finding in faults)}: to be mended before anything can run.")
        raise typer.Exit(1)
    say(f"\n{verdict(findings)}")


def verdict(findings: Sequence[Finding]) -> str:
    """The last line: what of the findings is to be done, and what is not."""
    count = Counter(finding.state for finding in findings)
    missing, gpu, later = count["missing"], count["gpu"], count["later"]
    parts = [
        f"{missing} {'thing is' if missing == 1 else 'things are'} missing; each line says what for."
        if missing
        else "",
        f"{gpu} {'recipe is' if gpu == 1 else 'recipes are'} for a GPU." if gpu else "",
        f"{later} {'thing' if later == 1 else 'things'} can wait or come after another." if later else "",
    ]
    return " ".join(["Ready.", *filter(None, parts)]) if any(parts) else "Ready for everything."


def machine() -> Iterator[Finding]:
    """Python, PyTorch, devices, memory and disk."""
    version = platform.python_version()
    old = sys.version_info < (3, 11)
    yield Finding("Python", "fault" if old else "ok", version, "fewstep needs 3.11 or newer" if old else "")
    yield from torch_and_devices()
    available, total = memory()
    yield Finding("memory", "ok" if available > 2 else "missing", f"{available:.1f} of {total:.1f} GiB free")
    free = shutil.disk_usage(Path.cwd()).free / GIB
    low = "" if free > 1 else "runs of images need about 1 GiB: make room, or name another folder by --run"
    yield Finding("disk", "missing" if low else "ok", f"{free:.1f} GiB free in {Path.cwd()}", low)


def together() -> list[Finding]:
    """What is to be said of the ranks, where a launcher such as torchrun started several; every one of them asks."""
    from fewstep.engines.api import EngineSection
    from fewstep.engines.device import resolve_device
    from fewstep.engines.health import Needs, examine
    from fewstep.engines.mesh import Ranks, join

    ranks = Ranks.launched()
    device, _ = resolve_device(EngineSection(), ranks)
    with join(ranks, device, timeout_s=60) as mesh:
        assert mesh is not None
        health = examine(mesh, device, Needs(folder=Path.cwd()))
    return [Finding("ranks", "ok", health.line), *(Finding("ranks", "missing", text) for text in health.warnings)]


def torch_and_devices() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("PyTorch", "fault", "not installed", "pip install 'torch>=2.11'")
        return
    import torch

    yield Finding("PyTorch", "ok", torch.__version__)
    yield Finding(
        "CPU", "ok", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in use: trains the nano recipes"
    )
    if not torch.cuda.is_available():
        yield Finding("GPU", "later", "none that PyTorch can use", "larger recipes need a CUDA device")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", "ok", f"{found.name}, {found.total_memory / GIB:.0f} GiB")


def memory() -> tuple[float, float]:
    """GiB that are available, and GiB in all."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page / GIB
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        return int(fields["MemAvailable"].split()[0]) * 1024 / GIB, total
    return total, total


def packages() -> Iterator[Finding]:
    """The optional extras."""
    for extra, (names, purpose) in EXTRAS.items():
        absent = [name for name in names if importlib.util.find_spec(name) is None]
        if absent:
            remedy = install_command(extra)
            yield Finding(f"extra {extra}", "missing", f"{', '.join(absent)} not installed ({purpose})", remedy)
        else:
            yield Finding(f"extra {extra}", "ok", purpose)


def install_command(extra: str) -> str:
    """How an extra is installed: in a checkout with its pinned versions, from its root."""
    in_checkout = (Path(fewstep.__file__).parents[2] / "constraints.txt").is_file()
    return f"pip install -c constraints.txt -e '.[{extra}]'" if in_checkout else f"pip install 'fewstep[{extra}]'"


def data() -> Iterator[Finding]:
    """The default data set."""
    from fewstep.data.fashion_mnist import FashionMnistSection, find_folder

    try:
        folder = find_folder(FashionMnistSection(batch=1, size=28))
    except UserError as error:
        yield Finding("Fashion-MNIST", "missing", "not found", str(error))
    else:
        yield Finding("Fashion-MNIST", "ok", str(folder))


def recipes() -> Iterator[Finding]:
    """Whether each shipped recipe could start here and now."""
    from fewstep.config import load_recipe

    for name, path in shipped_recipes().items():
        yield about(name, load_recipe(path))


def about(name: str, recipe: Recipe) -> Finding:
    """Whether one could: of the runs that it starts from, those that come with fewstep need not be there. Recipes that
    start from random weights are the long ones."""
    import torch

    from fewstep.config import load_recipe
    from fewstep.prepare import prepare

    if not torch.cuda.is_available():
        if recipe.data.name == "latents":
            return Finding(name, "gpu", "needs GPUs", f"how many of which kind: fewstep plan {name}")
        if recipe.engine.compile is not None:
            remedy = f"on a CPU, with patience: fewstep train {name} engine.compile=null"
            return Finding(name, "gpu", "needs a GPU", remedy)
        if recipe.student.init == "random" and (hours := hours_on_cpu(recipe)) > 1:
            told = f"wants a GPU; about {hours:.0f} hours on these {os.cpu_count()} cores"
            return Finding(name, "gpu", told, f"fewstep train {name}")
    given, waits = [], {}
    for role in ("teacher", "student"):
        section = getattr(recipe, role)
        made_by = recipe_of_run(Path(section.init).name) if section and not Path(section.init).exists() else None
        if made_by is not None and (shipped := shipped_result(made_by)):
            given.append(f"{role}.init={shipped}")
        elif made_by is not None:
            waits[section.init] = made_by
    if waits:
        told = f"starts from {' and '.join(waits)}, not trained yet"
        return Finding(name, "later", told, "first " + ", ".join(f"fewstep train {first}" for first in waits.values()))
    try:
        prepare(load_recipe(shipped_recipes()[name], given))
    except UserError as error:
        first, *more = error.errors if isinstance(error, UserErrors) else [str(error)]
        return Finding(name, "missing", "cannot run", first + (f" (and {len(more)} more)" if more else ""))
    return Finding(name, "ok", f"can run: {' '.join(['fewstep train', name, *given])}")


def hours_on_cpu(recipe: Recipe) -> float:
    """About how long the recipe takes on this machine's cores; 0 where its networks are not known."""
    from fewstep.costs.estimate import Planner
    from fewstep.costs.sizes import sizes_of
    from fewstep.devices import kind_of

    try:
        sizes = sizes_of(recipe, size=None, shape=None, find=run_recipe)
    except UserError:
        return 0.0
    flops = Planner(sizes, kind_of("h200"), host_gpus=8).model_flops * recipe.iterations
    return flops / ((os.cpu_count() or 1) * CORE_FLOPS * 3600)

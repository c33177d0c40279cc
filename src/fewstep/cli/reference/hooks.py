"""The page of extension hooks: what may be added, where it is named, and the contract that it keeps."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hook:
    """A kind of part that can be added. named: where the part is made known. contracts: the classes that say what it
    must do, in the order of reading."""

    title: str
    named: str
    contracts: tuple[Any, ...]


def hooks() -> tuple[Hook, ...]:
    """Every hook, the most used first."""
    from fewstep.data.api import Dataset, Items
    from fewstep.engines.api import Engine
    from fewstep.evaluate.api import Extractor
    from fewstep.methods.api import Method, Phase
    from fewstep.models.api import CausalFlowModel, FlowModel
    from fewstep.observe.sinks import Sink

    return (
        Hook(
            "A training method",
            "From your own package: a module with `METHODS = (YourMethod,)`, named in the recipe as `plugins: "
            "[my_lab.methods]` and found on `PYTHONPATH`. It is imported when that recipe is loaded for training or "
            "checking, and at no other time. Inside fewstep: the tuple `METHODS` of `src/fewstep/methods/__init__.py`. "
            "Either way `method: {name: ...}` in a recipe then chooses it, with the keys of its `Section`.",
            (Method, Phase),
        ),
        Hook(
            "A model family",
            "A folder of `src/fewstep/models/` with the file names of `wan/`; its section joins `ModelSection`, its "
            "class `FAMILIES`, in `src/fewstep/models/families.py`.",
            (FlowModel, CausalFlowModel),
        ),
        Hook(
            "A data set",
            "A file of `src/fewstep/data/`; its section (a `DatasetSection`) joins `DataSection`, its class "
            "`open_dataset`, in `src/fewstep/data/sources.py`.",
            (Dataset, Items),
        ),
        Hook(
            "A feature extractor",
            "What samples are judged with. From your own package: a module with `EXTRACTORS = (YourExtractor,)` under "
            "`plugins`, its `name` under `validation.extractor`; the head of `src/fewstep/evaluate/extractor.py` shows "
            "one. Weights are only ever read as tensors.",
            (Extractor,),
        ),
        Hook(
            "A sink of metrics",
            "Where rows of metrics go. `open_sinks` of `src/fewstep/observe/sinks.py` opens those that the recipe's "
            "`observe` section asks for.",
            (Sink,),
        ),
        Hook(
            "An engine",
            "A file of `src/fewstep/engines/`, chosen by the recipe's `engine` section.",
            (Engine,),
        ),
    )


def hooks_page() -> str:
    """Every hook with the source of its contracts."""
    lines = [
        "# Extension hooks\n",
        "What can be added to fewstep, where it is made known, and the contract that it keeps. The contracts below are "
        "the source itself.",
    ]
    for hook in hooks():
        lines += ["", f"## {hook.title}\n", hook.named]
        for contract in hook.contracts:
            lines += ["", f"`{contract.__module__}.{contract.__name__}`:\n", f"```python\n{_source(contract)}\n```"]
    return "\n".join(lines) + "\n"


def _source(contract: Any) -> str:
    return inspect.getsource(contract).rstrip()

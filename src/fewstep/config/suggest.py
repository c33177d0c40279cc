"""Where a key that nobody reads was meant to stand."""

from __future__ import annotations

import difflib
from typing import Any

from fewstep.config.schema import Key, candidates, keys, variant
from fewstep.config.yaml_text import KeyPath, dotted
from fewstep.section import Section

OTHER_WORDS = {
    "batch_size": "batch",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "denoising_step_list": "sigmas",
    "ema_decay": "decay",
    "fake_score": "critic",
    "flow_shift": "shift",
    "generator": "student",
    "guidance": "guidance_scale",
    "learning_rate": "lr",
    "max_iterations": "iterations",
    "max_steps": "iterations",
    "num_inference_steps": "steps",
    "num_iterations": "iterations",
    "num_steps": "steps",
    "t_list": "sigmas",
    "timestep_shift": "shift",
}
"""Keys of other trainers, and the words of recipes for the same things."""


def where_it_belongs(root: type[Section], values: Any, path: KeyPath) -> str:
    """What to write instead of the unknown key at ``path``: the same key where it is read, another choice that reads
    it, the nearest spelling, or the keys that the section has."""
    parent, name = path[:-1], str(path[-1])
    word = OTHER_WORDS.get(name, name)
    here = candidates(root, values, parent)
    own = list(here[0].model_fields) if here else []
    if word in own:
        return f"recipes call it '{word}': write {dotted((*parent, word))}"
    same = [key for key in keys(root) if key.path[-1] == word != "name"]
    beside = [key for key in same if key.path[:-1] == parent and parent in key.variants]
    if beside:
        others = " or ".join(sorted({f"'{key.variants[parent][1]}'" for key in beside}))
        tag = variant(here[0]) if here else None
        return f"only {dotted(parent)} {others} reads it{f', not {tag[1]!r}' if tag else ''}; remove it"
    read = [key for key in same if _is_read(key, values)]
    if read:
        places = list(dict.fromkeys(key.path for key in read))
        written = [place for place in places if isinstance(values.get(place[0]), dict)]
        return _move(parent, written or places)
    if same:
        place, (_, choice) = next(iter(same[0].variants.items()))
        return f"only {dotted(place)} '{choice}' reads it, as {same[0].name}; remove it"
    return _nearest_spelling(root, values, parent, word, own)


def _move(parent: KeyPath, places: list[KeyPath]) -> str:
    """To the nearest of the places that read the key, and how far away that is."""
    ordered = sorted(places, key=lambda place: _distance(place, parent))
    nearest = ordered[0]
    count = abs(len(nearest) - 1 - len(parent))
    levels = {1: "one level", 2: "two levels"}.get(count, f"{count} levels")
    if nearest[: len(parent)] == parent:
        where = f"{levels} lower"
    elif parent[: len(nearest) - 1] == nearest[:-1]:
        where = f"{levels} higher"
    else:
        where = "elsewhere"
    also = [place for place in ordered[1:3] if _distance(place, parent) == _distance(nearest, parent)]
    return f"it is read {where}: write {' or '.join(dotted(place) for place in (nearest, *also))}"


def _nearest_spelling(root: type[Section], values: Any, parent: KeyPath, name: str, own: list[str]) -> str:
    close = difflib.get_close_matches(name, own, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'? Write {dotted((*parent, close[0]))}"
    elsewhere = {str(key.path[-1]): key for key in sorted(keys(root), key=lambda key: _is_read(key, values))}
    close = difflib.get_close_matches(name, elsewhere, n=1, cutoff=0.75)
    if close:
        return f"did you mean {elsewhere[close[0]].name}?"
    return f"write one of: {', '.join(own)}" if own else "remove it"


def _is_read(key: Key, values: Any) -> bool:
    """Whether a recipe with these values reads the key: every choice on the way is made so, or left open."""
    for path, (name, tag) in key.variants.items():
        node = values
        for step in path:
            node = node.get(step) if isinstance(node, dict) else None
        if isinstance(node, dict) and node.get(name, tag) != tag:
            return False
    return True


def _distance(path: KeyPath, parent: KeyPath) -> int:
    """Steps up and down from the section ``parent`` to the one that holds ``path``."""
    common = 0
    while common < min(len(path) - 1, len(parent)) and path[common] == parent[common]:
        common += 1
    return len(path) - 1 + len(parent) - 2 * common

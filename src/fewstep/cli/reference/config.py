"""The page of every key that a recipe may hold, section by section."""

from __future__ import annotations

from pydantic.fields import FieldInfo

from fewstep.cli.reference.markdown import cell
from fewstep.config.problems import plain
from fewstep.config.recipe import Recipe
from fewstep.config.schema import doc, first_paragraph, limits, members, type_name, unit, variant
from fewstep.section import Section

INTRODUCTION = """# Recipes

A recipe is one YAML file with everything that one run reads; nothing is inherited from another file. Unknown keys are
refused. On the command line `section.field=value` changes a key; the value is read as YAML, so `method.gan=null` takes
a section out and `student.schedule='{name: constant}'` replaces one. `fewstep config explain RECIPE` shows every key of
a recipe with its value and where that comes from.
"""


def config_page() -> str:
    """Every key, its values, default and meaning; a kind of section is described where it first occurs."""
    page = _Page()
    page.lines += _table(Recipe, page, ())
    for name, field in Recipe.model_fields.items():
        if members(field.annotation):
            page.lines += ["", f"## {name}\n", doc(field)]
            page.sections(name, field, "###")
    return INTRODUCTION + "\n" + "\n".join(page.lines) + "\n"


class _Page:
    """The lines so far, and under which key the sections of each kind were described."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.described: dict[frozenset[type[Section]], str] = {}

    def sections(self, name: str, field: FieldInfo, mark: str) -> None:
        """Describes the sections that may stand under the key ``name``."""
        found = members(field.annotation)
        self.described[frozenset(found)] = name
        for member in found:
            tag = variant(member)
            if len(found) > 1 and tag:
                self.lines += ["", f"{mark} {name}: {tag[1]}\n", first_paragraph(member)]
            elif mark == "####":
                self.lines += ["", f"{mark} {name}\n", first_paragraph(member)]
            self.lines += ["", *_table(member, self, (name,))]
            for key, inner in member.model_fields.items():
                kinds = frozenset(members(inner.annotation))
                if kinds and kinds not in self.described:
                    self.sections(f"{name}.{key}", inner, "####")


def _table(section: type[Section], page: _Page, path: tuple[str, ...]) -> list[str]:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, field in section.model_fields.items():
        kind = ", ".join(part for part in (type_name(field.annotation), limits(field), unit(key)) if part)
        known = page.described.get(frozenset(members(field.annotation)))
        if known and path:
            kind += f", keys as in `{known}`"
        meaning = doc(field) or ("Chooses these keys." if (variant(section) or ("",))[0] == key else "")
        rows.append(f"| `{key}` | {cell(kind)} | {cell(_default(field))} | {cell(meaning)} |")
    return rows


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if not isinstance(value, Section):
        return f"`{plain(value)}`"
    tag = variant(type(value))
    return f"`{tag[1]}`" if tag and len(members(field.annotation)) > 1 else "its defaults"

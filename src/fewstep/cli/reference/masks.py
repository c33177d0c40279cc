"""Pictures of who sees whom, drawn from the masks that the networks run."""

from __future__ import annotations

from fewstep.models.attention import Mask, Part, dense

CELL, GAP, LEFT, TOP = 16, 6, 92, 46
SEEN, UNSEEN, LINE = "#2a6f97", "#eef1f4", "#7b8794"

_CLIP = (3, 3, 3)
_SINGLES = (1,) * 8

MASKS: dict[str, tuple[Mask, tuple[str, ...]]] = {
    "diffusion_forcing": (Mask(_CLIP, 1, (Part("causal", 0, 3),)), ("noisy",)),
    "teacher_forcing": (Mask(_CLIP, 1, (Part("causal", 0, 3), Part("probe", 0, 3)), 2), ("clean", "noisy")),
    "teacher_forcing_window": (
        Mask(_SINGLES, 1, (Part("causal", 0, 8), Part("probe", 0, 8)), 2, window=4, sink=1),
        ("clean", "noisy"),
    ),
    "parallel_blocks": (Mask(_CLIP, 1, (Part("causal", 0, 2), Part("probe", 0, 3)), 1), ("history", "stopped blocks")),
    "one_block": (Mask(_CLIP, 1, (Part("causal", 0, 2), Part("probe", 2, 3)), 1), ("history", "block 2")),
}
"""By file name: the mask, and what its parts are called. One token stands for all of a frame."""


def mask_picture(mask: Mask, names: tuple[str, ...]) -> str:
    """An SVG: a row for every query frame, a column for every key frame, filled where the one sees the other."""
    sees, parts = dense(mask), list(zip(names, mask.parts, strict=True))
    sizes = [sum(mask.block_frames[part.first : part.last]) for part in mask.parts]
    asking = len(mask.parts) - mask.num_query_parts
    columns = _offsets(mask, range(len(parts)))
    rows = _offsets(mask, range(asking, len(parts)))
    width, height = LEFT + columns[-1] + CELL + 8, TOP + rows[-1] + CELL + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for row, y in enumerate(rows):
        for column, x in enumerate(columns):
            fill = SEEN if sees[row, column] else UNSEEN
            lines.append(f'<rect x="{LEFT + x}" y="{TOP + y}" width="{CELL - 1}" height="{CELL - 1}" fill="{fill}"/>')
    first = 0
    for (name, part), size in zip(parts, sizes, strict=True):
        lines.append(f'<text x="{LEFT + columns[first]}" y="{TOP - 24}" fill="{LINE}">sees: {name}</text>')
        frames = range(sum(mask.block_frames[: part.first]), sum(mask.block_frames[: part.last]))
        lines += [
            f'<text x="{LEFT + x + CELL // 2}" y="{TOP - 8}" text-anchor="middle" fill="{LINE}">{n}</text>'
            for n, x in zip(frames, columns[first : first + size], strict=True)
        ]
        first += size
    first = 0
    for (name, _), size in list(zip(parts, sizes, strict=True))[asking:]:
        lines.append(f'<text x="4" y="{TOP + rows[first] + CELL - 4}" fill="{LINE}">{name}</text>')
        first += size
    return "\n".join([*lines, "</svg>", ""])


def _offsets(mask: Mask, numbers: range) -> list[int]:
    """Where the frames of the parts stand: a gap between blocks, a wider one between parts."""
    found, at = [], 0
    for number in numbers:
        part = mask.parts[number]
        for block in range(part.first, part.last):
            for _ in range(mask.block_frames[block]):
                found.append(at)
                at += CELL
            at += GAP // 3
        at += GAP
    return found

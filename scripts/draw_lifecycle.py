"""Draws docs/images/lifecycle.svg: the tokens of a rollout from its prompt to the trainer, row by row.

    python scripts/draw_lifecycle.py

Each row is a real `Sample` after the call that the row names, so the picture matches the code.
`tests/unit/test_docs.py` keeps it equal.
"""

from __future__ import annotations

import copy
import html
from collections.abc import Sequence
from pathlib import Path

from mslime.data.sample import Sample

PICTURE = Path(__file__).parents[1] / "docs/images/lifecycle.svg"
CELL, ROW, LEFT, TOP = 26, 54, 330, 62
COLOURS = {None: "#d8dde5", 3: "#8fb8ea", 4: "#f2b56b", 5: "#9ccf8d"}
"""Colours by weight version; None: the prompt, and replies of an environment."""
Row = tuple[str, str, Sample]


def rows() -> list[Row]:
    """(event, its meaning, the sample after it)."""
    found: list[Row] = []

    def note(event: str, meaning: str, sample: Sample) -> None:
        found.append((event, meaning, copy.deepcopy(sample)))

    sample = Sample.from_prompt(0, 0, range(5))
    note("submitted", "pending: only the prompt", sample)
    _say(sample, 6, version=3)
    note("an update interrupts it", "aborted: its tokens are kept", sample)
    _say(sample, 3, version=4)
    note("continued", "one turn, sampled by two versions", sample)
    sample.extend([0] * 4)
    note("a tool answers", "environment: never trained", sample)
    _say(sample, 4, version=5)
    note("completed", "three versions in one response", sample)
    branch = sample.branch(1, 14)
    branch.extend([0] * 2)
    _say(branch, 3, version=5)
    note("branched at the tool call", "a second sequence; shared tokens are context", branch)
    sample.mask_before(4)
    note("on_stale: mask", "tokens of version 3 are too old", sample)
    return found


def _say(sample: Sample, tokens: int, version: int) -> None:
    sample.extend([0] * tokens, log_probs=[-1.0] * tokens, versions=[(version, 0, tokens)], engine="engine0")


def draw() -> str:
    """The picture, as SVG."""
    shown = rows()
    width, height = LEFT + CELL * max(len(s) for _, _, s in shown) + 20, TOP + ROW * len(shown) + 4
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
            "<title>The tokens of a rollout, from its prompt to the trainer</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            *_legend(),
            *(line for number, row in enumerate(shown) for line in _row(TOP + ROW * number, row)),
            "</svg>",
            "",
        ]
    )


def _legend() -> list[str]:
    names = {None: "prompt, environment", 3: "version 3", 4: "version 4", 5: "version 5"}
    lines: list[str] = []
    for place, (version, name) in enumerate(names.items()):
        x = 20 + 175 * place
        lines += [_cell(x, 16, version, trained=version is not None), _text(x + CELL + 6, 34, name, 13)]
    return [*lines, _cell(720, 16, 3, trained=False), _text(720 + CELL + 6, 34, "sampled, not trained", 13)]


def _row(y: int, row: Row) -> Sequence[str]:
    event, meaning, sample = row
    cells = [
        _cell(LEFT + CELL * t, y, segment.version, bool(sample.loss_mask[t]))
        for segment in sample.segments
        for t in range(segment.start, segment.end)
    ]
    return [_text(20, y + 12, event, 15), _text(20, y + 30, meaning, 12, "#5a6676"), *cells]


def _cell(x: int, y: int, version: int | None, trained: bool) -> str:
    """A token: filled if it is trained or was never sampled, an outline if it is sampled context."""
    plain = trained or version is None
    fill, edge = (COLOURS[version], "#ffffff") if plain else ("#ffffff", COLOURS[version])
    style = f'rx="4" fill="{fill}" stroke="{edge}" stroke-width="3"'
    return f'<rect x="{x + 2}" y="{y}" width="{CELL - 4}" height="24" {style}/>'


def _text(x: int, y: int, text: str, size: int, colour: str = "#1c2733") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}">{html.escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(PICTURE)

"""Support matrix of the model families, from their own declarations.

`mslime models` prints it and `docs/models.md` is generated from it, so both always match the code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mslime.convert.families import FAMILIES, Family

if TYPE_CHECKING:
    from rich.table import Table

_HEADINGS = ("Architecture in config.json", "Published checkpoints", "Train", "CPU engine", "Adapters")
_INTRODUCTION = """\
# Models

This page is written by `mslime models --markdown`; a test keeps it equal to the code. A family is one file in
`mslime/convert/families/`; [adding a family](add_a_model.md) is a how-to.

- **Published checkpoints** are converted at full size in the tests, on meta tensors and in several parallel layouts:
  every parameter of every rank comes from exactly one rule, every name and shape is transformers'
  (`tests/engines/test_full_size.py`).
- **Train**: a tiny model of the family gives transformers' logits within 1e-5 in fp32 on one process, TP2 EP2 PP2 and
  PP2 VPP2, and comes back to disk bit for bit in fp32 and bf16 (`tests/engines/test_families.py`).
- **CPU engine**: after a weight sync from real Megatron ranks, a real SGLang server gives transformers' log-probs.
- **Adapters**: a real SGLang server with an adapter beside the weights (`lora.sync: adapter`) gave the log-probs of
  merged weights. Adapters merged into what is sent work with every family.
- Every family reads FP8 block-quantised checkpoints (`quantization_config`), dequantised while they are read.
- Multi-token-prediction layers are converted, and carried through an export; training neither builds nor changes them.

"""


@dataclass(frozen=True)
class SupportRow:
    """One family's row of the matrix, as texts; see `Support`."""

    architecture: str
    models: str
    train: str
    engine: str
    adapters: str
    notes: tuple[str, ...]


def support_rows() -> list[SupportRow]:
    """Every family, in alphabetical order."""
    return [_row(FAMILIES[name]) for name in sorted(FAMILIES)]


def _row(family: Family) -> SupportRow:
    support = family.support
    reasons = {"not trained": support.not_trained, "not served on CPU": support.not_served}
    return SupportRow(
        family.architecture,
        ", ".join(support.models),
        "no" if support.not_trained else "yes",
        "no" if support.not_served else "yes",
        "yes" if support.served_adapters else "no",
        tuple(f"{what}: {why}" for what, why in reasons.items() if why) + support.notes,
    )


def as_markdown(rows: Iterable[SupportRow]) -> str:
    """Text of `docs/models.md`."""
    rows = list(rows)
    lines = [" | ".join(_HEADINGS), " | ".join("---" for _ in _HEADINGS)]
    lines += [" | ".join((f"`{row.architecture}`", row.models, row.train, row.engine, row.adapters)) for row in rows]
    notes = [f"- `{row.architecture}`: {note.removesuffix('.')}." for row in rows for note in row.notes]
    table = "\n".join(f"| {line} |" for line in lines)
    return _INTRODUCTION + table + "\n\n## Notes\n\n" + "\n".join(notes) + "\n"


def as_table(rows: Iterable[SupportRow]) -> Table:
    """The matrix as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    rows, (architecture, checkpoints, *others) = list(rows), _HEADINGS
    table = Table(caption="Notes and proofs: docs/models.md")
    # Names stay complete in 80 columns: users compare them with config.json.
    table.add_column(Text(f"{architecture}\n  {checkpoints.lower()}"), min_width=max(len(r.architecture) for r in rows))
    for heading in others:
        table.add_column(heading)
    for row in rows:
        named = Text.assemble((row.architecture, "bold"), "\n", (row.models, "dim"))
        table.add_row(named, row.train, row.engine, row.adapters)
    return table

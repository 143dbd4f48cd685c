"""Support matrix of the model families, from their own declarations.

`mslime models` prints it and `docs/models.md` is generated from it, so both always match the code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mslime.convert.families import FAMILIES, Support

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
  merged weights. Merged adapters (`lora.sync: merged`) work with every family.
- Every family reads FP8 block-quantised checkpoints (`quantization_config`), dequantised while they are read.
- Multi-token-prediction layers are converted, and carried through an export; training neither builds nor changes them.

"""


def _row(support: Support) -> list[str]:
    """One family's cells after its architecture."""
    answers = (not support.not_trained, not support.not_served, support.served_adapters)
    return [", ".join(support.models), *("yes" if answer else "no" for answer in answers)]


def as_markdown() -> str:
    """Text of `docs/models.md`."""
    lines, notes = [" | ".join(_HEADINGS), " | ".join("---" for _ in _HEADINGS)], list[str]()
    for name in sorted(FAMILIES):
        support = FAMILIES[name].support
        lines.append(" | ".join((f"`{name}`", *_row(support))))
        reasons = {"not trained": support.not_trained, "not served on CPU": support.not_served}
        texts = [*(f"{name}: {why}" for name, why in reasons.items() if why), *support.notes]
        notes += [f"- `{name}`: {note.removesuffix('.')}." for note in texts]
    table = "\n".join(f"| {line} |" for line in lines)
    return _INTRODUCTION + table + "\n\n## Notes\n\n" + "\n".join(notes) + "\n"


def as_table() -> Table:
    """The matrix as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    architecture, checkpoints, *others = _HEADINGS
    table = Table(caption="Notes and proofs: docs/models.md")
    # Names stay complete in 80 columns: users compare them with config.json.
    table.add_column(Text(f"{architecture}\n  {checkpoints.lower()}"), min_width=max(map(len, FAMILIES)))
    for heading in others:
        table.add_column(heading)
    for name in sorted(FAMILIES):
        models, *answers = _row(FAMILIES[name].support)
        table.add_row(Text.assemble((name, "bold"), "\n", (models, "dim")), *answers)
    return table

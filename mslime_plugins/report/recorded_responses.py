"""The recorded responses of a run for people: selection, order and description."""

from __future__ import annotations

import heapq
import itertools
import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mslime.observe.samples import (
    SampleLine,
    file_of,
    read_samples,
    read_trainer_lines,
    trainer_file_of,
)  # fmt: skip


def telling(path: Path) -> list[SampleLine]:
    """The few most informative lines of the step, which are first in the file."""
    return list(itertools.takewhile(lambda row: row["kinds"], read_samples(path)))


def telling_of_step(run_dir: Path, step: int, *, evaluation: bool = False) -> list[SampleLine]:
    """`telling` of a step, each with the trainer's log-probs if known.

    Raises:
        UserError: a line of the step's files is not in this version's format.
    """
    rows, path = telling(file_of(run_dir, step, evaluation=evaluation)), trainer_file_of(run_dir, step)
    if evaluation or not path.exists():
        return rows
    found = {(r["group"], r["index"]): r["log_probs"] for r in read_trainer_lines(path)}
    for row in rows:
        known = found.get((row["group"], row["index"]))
        if known is not None and len(known) == len(row["log_probs"]):
            row["trainer_log_probs"] = known
    return rows


def ordered(rows: Iterable[SampleLine], order: str, count: int) -> list[SampleLine]:
    """The first `count` rows by one of ORDERS."""
    if order == "longest":
        return heapq.nlargest(count, rows, key=lambda row: row["response_tokens"])
    pick = heapq.nlargest if order == "best" else heapq.nsmallest
    return pick(count, rows, key=lambda row: row["reward"] or 0.0)


def versions_of(row: SampleLine) -> list[int]:
    """The weight versions that sampled a response, in order."""
    return list(dict.fromkeys(s["version"] for s in row["segments"] if s["version"] is not None))


def mean_log_prob(row: SampleLine) -> float | None:
    """Mean log-prob of the kept sampled tokens; None without any."""
    known = [value for value in row["log_probs"] if value is not None]
    return sum(known) / len(known) if known else None


def facts(row: SampleLine) -> list[str]:
    """Facts about a response beside its text, as short phrases."""
    out = [f"reward {row['reward']:g}" if row["reward"] is not None else "not scored"]
    out += [f"{name} {value:g}" for name, value in row["scores"].items() if value is not None]
    if row["advantage"] is not None:
        out.append(f"advantage {row['advantage']:+.3g}")
    if (mean := mean_log_prob(row)) is not None:
        out.append(f"mean log-prob {mean:.3f}")
    out.append(f"{row['response_tokens']} tokens, {row['status']}")
    if versions := versions_of(row):
        out.append(f"weights {', '.join(map(str, versions))}" + _ages(row))
    if row["label"] is not None:
        out.append(f"label {_short(row['label'])}")
    return out


def _ages(row: SampleLine) -> str:
    ages = {s["age"] for s in row["segments"] if s["age"] is not None}
    return f", age {min(ages)} to {max(ages)}" if len(ages) > 1 else f", age {min(ages)}" if ages - {0} else ""


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def visible(text: str) -> str:
    """Text made safe for a terminal: control characters, including those of direction, as their pictures."""
    return "".join(_picture(c) if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text)


def _picture(character: str) -> str:
    code = ord(character)
    if character in "\n\t\u200c\u200d":  # the last two join emoji and letters
        return character
    return chr(0x2400 + code) if code < 32 else f"<U+{code:04X}>"

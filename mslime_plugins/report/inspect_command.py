"""`mslime inspect RUN`: samples of a run on a terminal: a step's kept responses, by turns and tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mslime.config.errors import UserError
from mslime.observe.samples import SampleLine
from mslime_plugins.report.sample_tokens import (
    Token,
    by_source,
    facts,
    telling_of_step,
    tokens_of,
    versions_of,
    visible,
)
from mslime_plugins.report.samples_command import COLOURS, SampleSelection, find_file

ColourBy = Literal["version", "difference", "mask"]
BOUNDS = (0.01, 0.1, 1.0)
"""Boundaries of the colours of differences, in nats."""
HIGHER, LOWER = ("cyan", "blue", "bold blue"), ("yellow", "red", "bold red")
_MASK = {"trained": "green", "sampled, not trained": "yellow", "from outside": "dim"}


@dataclass(frozen=True)
class InspectSelection:
    """Selection of responses.

    Attributes:
        step, evaluation, set_name: see `SampleSelection`.
        group, sample: this group, and this response of it; None: a list of kept responses, and the most informative
            one.
        colour: meaning of a token's colour.
        tokens: a line for each token.
    """

    step: int | None = None
    evaluation: bool = False
    set_name: str = ""
    group: int | None = None
    sample: int | None = None
    colour: ColourBy = "version"
    tokens: bool = False


def inspect_run(run_dir: Path, wanted: InspectSelection, console: Console) -> None:
    """Print the kept responses of a step.

    Raises:
        UserError: the run kept none, or none of this step or group, or a file is damaged.
    """
    path, step = find_file(run_dir, SampleSelection(wanted.step, wanted.evaluation))
    rows = telling_of_step(run_dir, step, evaluation=wanted.evaluation)
    rows = [row for row in rows if not wanted.set_name or row.get("set") == wanted.set_name]
    if not rows:
        raise UserError("--eval", wanted.set_name, f"{path} has no responses to it", "omit it to see all sets")
    if wanted.group is None and wanted.sample is None:
        console.print(_overview(rows))
        chosen = rows[:1]
    else:
        chosen = _chosen(rows, wanted, path)
    for row in chosen:
        _show(row, wanted, console)
    left = f"step {step}: {len(chosen)} of {len(rows)} kept responses; choose with --group and --sample; {path}"
    console.print(Text(left, style="dim"), soft_wrap=True)


def _chosen(rows: Sequence[SampleLine], wanted: InspectSelection, path: Path) -> list[SampleLine]:
    """The responses of the selected group. Raises UserError if none of it is kept."""
    for name, value, key in (("--group", wanted.group, "group"), ("--sample", wanted.sample, "index")):
        known = sorted({row[key] for row in rows})
        rows = [row for row in rows if value is None or row[key] == value]
        if not rows:
            there = ", ".join(map(str, known))
            raise UserError(
                name,
                value,
                f"{path} has no such response",
                f"choose one of {there}; observe.save_rollouts: all keeps all",
            )
    return list(rows)


def _overview(rows: Sequence[SampleLine]) -> Table:
    table = Table(
        title="kept responses, most informative first, with the largest log-prob difference of each",
        title_justify="left",
        title_style="dim",
    )
    for name in ("group", "sample", "why", "reward", "tokens", "turns", "weights", "difference"):
        table.add_column(name, justify="left" if name == "why" else "right", no_wrap=name != "why", overflow="fold")
    for row in rows:
        tokens = tokens_of(row)
        differences = [abs(d) for t in tokens if (d := t.difference) is not None]
        cells = [
            f"{name}, {row['group']}" if (name := row.get("set")) else str(row["group"]),
            str(row["index"]),
            ", ".join(row["kinds"]),
            "–" if row["reward"] is None else f"{row['reward']:g}",
            str(row["response_tokens"]),
            str(max(token.turn for token in tokens)) if tokens else "0",
            ", ".join(map(str, versions_of(row))),
            f"{max(differences):.3f}" if differences else "–",
        ]
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def _show(row: SampleLine, wanted: InspectSelection, console: Console) -> None:
    """Print a response: its facts, its prompt, and a block for each turn and each text from outside."""
    tokens = tokens_of(row)
    style = _styles(row, tokens, wanted.colour)
    console.print(Rule(Text(visible(_title(row)), style="bold"), align="left", style="dim"))
    console.print(Text(visible(" · ".join(facts(row))), style="dim"))
    if row["error"]:
        console.print(Text(visible(row["error"]), style="red"))
    console.print(Padding(Text(visible(row["prompt"])), (0, 0, 0, 2)))
    for block in by_source(tokens):
        console.print(Text(_heading(block), style="dim bold"))
        console.print(_table(block) if wanted.tokens else Padding(_text(block, style), (0, 0, 0, 2)))
    console.print(_legend(row, tokens, wanted.colour))


def _title(row: SampleLine) -> str:
    which = f"set {name}, " if (name := row.get("set")) else ""
    return f"step {row['step']} · {which}group {row['group']} · sample {row['index']} · {', '.join(row['kinds'])}"


def _heading(block: Sequence[Token]) -> str:
    first = block[0]
    if first.outside:
        return "from outside (tool or environment)"
    engines = ", ".join(dict.fromkeys(visible(token.engine) for token in block if token.engine))
    return " · ".join(filter(None, [f"turn {first.turn}" if first.turn else "response", engines]))


def _text(block: Sequence[Token], style: Callable[[Token], str]) -> Text:
    text = Text()
    for look, together in itertools.groupby(block, key=lambda t: style(t) + (" underline" if t.in_call else "")):
        text.append(visible("".join(token.text for token in together)), look)
    return text


def _table(block: Sequence[Token]) -> Table:
    """A table with one line per token."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (
        "at",
        "id",
        "token",
        "weights",
        "age",
        "trained",
        "sampler",
        "trainer",
        "difference",
        "of ids",
        "experts",
    ):
        text = name in ("token", "experts")
        table.add_column(name, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for token in block:
        experts = " ".join(f"{layer}:{','.join(map(str, ids))}" for layer, ids in (token.experts or {}).items())
        cells = [
            str(token.position), _known(token.id), repr(visible(token.text))[1:-1], _known(token.version),
            _known(token.age), "yes" if token.trained else "no", _known(token.log_prob, ".4f"),
            _known(token.trainer_log_prob, ".4f"), _known(token.difference, "+.4f"), _known(token.support), experts,
        ]  # fmt: skip
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _known(value: float | None, form: str = "") -> str:
    return "–" if value is None else format(value, form)


def _styles(row: SampleLine, tokens: Sequence[Token], colour: ColourBy) -> Callable[[Token], str]:
    """A function from a token to its style for `colour`."""
    versions = versions_of(row)

    def version(token: Token) -> str:
        if token.version is None:
            return "dim"
        own = COLOURS[versions.index(token.version) % len(COLOURS)]
        return own if token.trained else f"{own} italic"

    def difference(token: Token) -> str:
        value = token.difference
        if value is None:
            return "dim"
        step = sum(abs(value) >= bound for bound in BOUNDS)
        return "" if step == 0 else (HIGHER if value > 0 else LOWER)[step - 1]

    def mask(token: Token) -> str:
        return _MASK[
            "trained" if token.trained else "from outside" if token.version is None else "sampled, not trained"
        ]

    return {"version": version, "difference": difference, "mask": mask}[colour]


def _legend(row: SampleLine, tokens: Sequence[Token], colour: ColourBy) -> Text:
    parts: list[tuple[str, str]]
    if colour == "version":
        parts = [(f"weights {v}", COLOURS[i % len(COLOURS)]) for i, v in enumerate(versions_of(row))]
    elif colour == "mask":
        parts = list(_MASK.items())
    elif all(token.difference is None for token in tokens):
        parts = [("trainer's log-probs unknown", "dim")]
    else:
        above = [(f"trainer higher by {b:g}", style) for b, style in zip(BOUNDS, HIGHER, strict=True)]
        parts = [*above, *((f"lower by {b:g}", style) for b, style in zip(BOUNDS, LOWER, strict=True))]
    if any(token.in_call for token in tokens):
        parts.append(("tool call", "underline"))
    text = Text()
    for words, look in parts:
        text.append(f"[{words}]", look).append(" ")
    return text

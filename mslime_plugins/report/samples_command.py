"""`mslime samples RUN`: responses on a terminal, coloured by the weight version that sampled each token."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from mslime.config.errors import UserError
from mslime.config.lora import directories
from mslime.observe.samples import SampleLine, file_of, read_samples, recorded_steps
from mslime_plugins.report.sample_tokens import facts, ordered, telling, tokens_of, versions_of, visible

COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")


@dataclass(frozen=True)
class SampleSelection:
    """Selection of responses.

    Attributes:
        step: as in the metrics; None: the newest.
        evaluation: of held-out sets rather than of training.
        set_name: of one held-out set; empty: of all.
        order, count: the first ones by best, worst or longest; without an order a few of each kind.
        kind: `truncated` or `continued`; empty: any.
    """

    step: int | None = None
    evaluation: bool = False
    set_name: str = ""
    order: str = ""
    count: int = 0
    kind: str = ""


def show_samples(run_dir: Path, wanted: SampleSelection, console: Console, as_json: bool = False) -> None:
    """Print selected responses of a run; as JSON, the unchanged lines of the file.

    Raises:
        UserError: the run kept no responses, or none of this step, or a file is damaged.
    """
    path, step = find_file(run_dir, wanted)
    shown = select(path, wanted)
    if as_json:
        for row in shown:
            print(json.dumps(row))
        return
    for row in shown:
        console.print(_card(row))
    if not shown:
        kinds = {"truncated": "cut at the length limit", "continued": "of several weight versions"}
        description = kinds.get(wanted.kind, "there")
        console.print(f"step {step}: none of the responses in {path} is {description}", markup=False, highlight=False)
    else:
        console.print(_footer(path, step, shown), style="dim", markup=False, highlight=False)


def select(path: Path, wanted: SampleSelection) -> list[SampleLine]:
    """The selected lines of a file."""
    rows = telling(path) if not (wanted.order or wanted.kind) else read_samples(path)
    if wanted.set_name:
        rows = _of_set(path, rows, wanted.set_name)
    if wanted.kind == "truncated":
        rows = (row for row in rows if row["status"] == "truncated")
    elif wanted.kind == "continued":
        rows = (row for row in rows if len(versions_of(row)) > 1)
    return ordered(rows, wanted.order, wanted.count) if wanted.order else list(rows)


def _of_set(path: Path, rows: Iterator[SampleLine] | Sequence[SampleLine], name: str) -> Iterator[SampleLine]:
    found = (row for row in rows if row.get("set") == name)
    first = next(found, None)
    if first is None:
        known = sorted({row.get("set") or "" for row in read_samples(path)})
        raise UserError("--eval", name, f"{path} has no responses to it", f"the sets are {', '.join(known) or 'none'}")
    return itertools.chain([first], found)


def find_file(run_dir: Path, wanted: SampleSelection) -> tuple[Path, int]:
    """The file of the selected step, and the step."""
    if not run_dir.is_dir():
        raise UserError("run directory", str(run_dir), "does not exist", "name the directory outputs/NAME of a run")
    steps = recorded_steps(run_dir, evaluation=wanted.evaluation)
    unit = "evaluation" if wanted.evaluation else "step"
    if not steps and (adapters := directories(run_dir)[1:]):
        raise UserError(
            str(run_dir), None, "is a run of several adapters, each with its own responses",
            f"name one of them: {', '.join(map(str, adapters))}",
        )  # fmt: skip
    if not steps:
        raise UserError(
            str(run_dir), None, f"holds no responses of any {unit}",
            "wait for the first; reinforcement learning keeps them, unless observe.save_rollouts is none",
        )  # fmt: skip
    step = steps[-1] if wanted.step is None else wanted.step
    if step not in steps:
        raise UserError("--step", step, f"no responses of this {unit} are kept", f"choose from {_ranges(steps)}")
    return file_of(run_dir, step, evaluation=wanted.evaluation), step


def _ranges(steps: Sequence[int]) -> str:
    """`0, 10, 20 to 25`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _footer(path: Path, step: int, shown: Sequence[SampleLine]) -> str:
    of = sum({row.get("set", ""): row["of"] for row in shown}.values())
    return f"step {step}: {len(shown)} of {of} responses; the file is {path}"


def _card(row: SampleLine) -> Group:
    head = [f"step {row['step']}", *([f"set {name}"] if (name := row.get("set")) else []), f"group {row['group']}"]
    title = visible(
        " · ".join([*head, f"response {row['index']}", *([", ".join(row["kinds"])] if row["kinds"] else [])])
    )
    parts = [
        Rule(Text(title, style="bold"), align="left", style="dim"),
        Text(visible(" · ".join(facts(row))), style="dim"),
        Padding(Text(visible(row["prompt"])), (0, 0, 0, 2)),
        Padding(_coloured(row), (0, 0, 1, 2)),
    ]
    if row["error"]:
        parts.append(Text(visible(row["error"]), style="red"))
    return Group(*parts)


def _coloured(row: SampleLine) -> Text:
    """The response; tokens without a policy are dim, untrained ones in italics."""
    versions = versions_of(row)
    text = Text()
    for (version, trained), together in itertools.groupby(
        tokens_of(row), key=lambda token: (token.version, token.trained)
    ):
        plain = version is None
        style = "dim" if plain else COLOURS[versions.index(version) % len(COLOURS)]
        words = visible("".join(token.text for token in together))
        text.append(words, style if trained or plain else f"{style} italic")
    if len(versions) > 1:
        text.append("\n")
        for index, version in enumerate(versions):
            text.append(f"[weights {version}] ", COLOURS[index % len(COLOURS)])
    return text

"""The responses that a run kept, in `RUN/rollouts`: `step_N.jsonl` of what step N trained on, `eval_step_N.jsonl` of
the evaluation after N steps, `trainer_step_N.jsonl` what the trainer found of some of step N. Steps count as in the
metrics. What a line says: docs/report.md.
"""

from __future__ import annotations

import heapq
import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NotRequired, TypeVar

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # what pydantic can check before Python 3.12

from mslime.config.errors import UserError, reading
from mslime.observe.metrics import free_name

DIRECTORY = "rollouts"
_NAME = re.compile(r"(eval_|trainer_)?step_(\d+)\.jsonl")


class Segment(TypedDict):
    """Tokens [start, end) of a response; `version` is None when no policy sampled them."""

    start: int
    end: int
    version: int | None
    age: int | None
    engine: str
    trained: bool


class Routes(TypedDict):
    """Experts of the first tokens of a response in some MoE layers; `experts` is base64, see `routes_row`."""

    layers: list[int]
    top_k: int
    bytes: int
    experts: str


class Sample(TypedDict):
    """A line of a file; docs/report.md says what each key means."""

    step: int
    kinds: list[str]
    set: NotRequired[str]
    of: int
    group: int
    index: int
    source: str
    prompt: str
    response: str
    label: Any
    metadata: Any
    reward: float | None
    scores: dict[str, float | None]
    process_rewards: list[tuple[int, float]]
    advantage: float | None
    status: str
    error: str
    aborts: int
    version: int
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    segments: list[Segment]
    left_out: tuple[int, int] | None
    ids: list[int]
    texts: NotRequired[list[str]]
    log_probs: list[float | None]
    support_sizes: NotRequired[list[int]]
    trainer_log_probs: NotRequired[list[float | None]]
    routes: NotRequired[Routes]


class TrainerLine(TypedDict):
    """A line of a trainer's file: log-probs of the tokens that the response's own line holds."""

    group: int
    index: int
    log_probs: list[float | None]


_SAMPLE: TypeAdapter[Sample] = TypeAdapter(Sample)
_TRAINER: TypeAdapter[TrainerLine] = TypeAdapter(TrainerLine)
Row = TypeVar("Row")


def file_of(run_dir: Path, step: int, *, evaluation: bool = False) -> Path:
    """Where the responses of a step are, counted as in the metrics, or those of the evaluation after it."""
    return run_dir / DIRECTORY / f"{'eval_' if evaluation else ''}step_{step:06d}.jsonl"


def trainer_file_of(run_dir: Path, step: int) -> Path:
    """Where the trainer's log-probs of some responses of a step are."""
    return run_dir / DIRECTORY / f"trainer_step_{step:06d}.jsonl"


def begin(run_dir: Path, first_step: int) -> None:
    """Take files of steps that will be done again out of the way; a fresh start keeps earlier ones, under a numbered
    name. A directory that does not let itself be changed is left as it is: files in it will be replaced or not."""
    directory = run_dir / DIRECTORY
    try:
        if first_step == 0 and directory.exists():
            directory.rename(free_name(directory))
        for path, _, step in _files(directory):
            if step > first_step:
                path.unlink()
    except OSError as error:
        print(f"{directory}: {error.strerror}; responses of an earlier run may be left in it", flush=True)


def recorded_steps(run_dir: Path, *, evaluation: bool = False) -> list[int]:
    """The steps with responses, in order."""
    wanted = "eval_" if evaluation else ""
    return sorted(step for _, kind, step in _files(run_dir / DIRECTORY) if kind == wanted)


def _files(directory: Path) -> list[tuple[Path, str, int]]:
    """(path, what its name begins with before `step_`, step) of every file of responses."""
    found = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir()] if directory.is_dir() else []
    return [(path, match[1] or "", int(match[2])) for path, match in found if match is not None]


def read_samples(path: Path) -> Iterator[Sample]:
    """The lines of a file, one after the other.

    Raises:
        UserError: a line is not a response, as this version writes them.
    """
    return _lines(path, _SAMPLE, "is not a response that this version wrote")


def _lines(path: Path, kind: TypeAdapter[Row], wrong: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where, way_out = f"{path}:{number}", "remove the file: it is of an older version, or damaged"
            with reading(UserError, where, wrong, way_out):
                row = kind.validate_json(line)
            yield row


def telling(path: Path) -> list[Sample]:
    """The few lines that show the step best; they stand first in the file."""
    return list(itertools.takewhile(lambda row: row["kinds"], read_samples(path)))


def telling_of_step(run_dir: Path, step: int, *, evaluation: bool = False) -> list[Sample]:
    """`telling` of a step, each with the trainer's log-probs where those are known.

    Raises:
        UserError: a line of the step's files is not what this version writes.
    """
    rows, path = telling(file_of(run_dir, step, evaluation=evaluation)), trainer_file_of(run_dir, step)
    if evaluation or not path.exists():
        return rows
    found = {(r["group"], r["index"]): r["log_probs"] for r in _lines(path, _TRAINER, "is not a trainer's line")}
    for row in rows:
        known = found.get((row["group"], row["index"]))
        if known is not None and len(known) == len(row["log_probs"]):
            row["trainer_log_probs"] = known
    return rows


def ordered(rows: Iterable[Sample], order: str, count: int) -> list[Sample]:
    """The first `count` rows by one of ORDERS."""
    if order == "longest":
        return heapq.nlargest(count, rows, key=lambda row: row["response_tokens"])
    pick = heapq.nlargest if order == "best" else heapq.nsmallest
    return pick(count, rows, key=lambda row: row["reward"] or 0.0)


def versions_of(row: Sample) -> list[int]:
    """The weight versions that sampled a response, in order."""
    return list(dict.fromkeys(s["version"] for s in row["segments"] if s["version"] is not None))


def mean_log_prob(row: Sample) -> float | None:
    """Over the sampled tokens that are kept; None without any."""
    known = [value for value in row["log_probs"] if value is not None]
    return sum(known) / len(known) if known else None


def facts(row: Sample) -> list[str]:
    """What is known of a response beside its text, as short phrases."""
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


def _ages(row: Sample) -> str:
    ages = {s["age"] for s in row["segments"] if s["age"] is not None}
    return f", age {min(ages)} to {max(ages)}" if len(ages) > 1 else f", age {min(ages)}" if ages - {0} else ""


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def visible(text: str) -> str:
    """Text that cannot steer a terminal, nor turn what stands beside it: control characters as their pictures."""
    return "".join(_picture(c) if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text)


def _picture(character: str) -> str:
    code = ord(character)
    if character in "\n\t\u200c\u200d":  # the last two join emoji and letters
        return character
    return chr(0x2400 + code) if code < 32 else f"<U+{code:04X}>"

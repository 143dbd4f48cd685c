"""Responses that a run kept, in `RUN/rollouts`. `step_N.jsonl` holds the responses trained in step N,
`eval_step_N.jsonl` responses of the evaluation after N steps, `trainer_step_N.jsonl` the trainer's results for some of
step N. Steps count as in the metrics. docs/report.md defines the lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NotRequired, TypeVar

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # pydantic supports only this one before Python 3.12

from mslime.config.errors import UserError, reading
from mslime.observe.metrics import free_name

DIRECTORY = "rollouts"
_NAME = re.compile(r"(eval_|trainer_)?step_(\d+)\.jsonl")


class SegmentLine(TypedDict):
    """Tokens [start, end) of a response; `version` is None when no policy sampled them."""

    start: int
    end: int
    version: int | None
    age: int | None
    engine: str
    trained: bool


class RoutesLine(TypedDict):
    """Experts of the first tokens of a response in some MoE layers; `experts` is base64, see `routes_row`."""

    layers: list[int]
    top_k: int
    bytes: int
    experts: str


class SampleLine(TypedDict):
    """A line of a file; docs/report.md defines the keys."""

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
    segments: list[SegmentLine]
    left_out: tuple[int, int] | None
    ids: list[int]
    texts: NotRequired[list[str]]
    log_probs: list[float | None]
    support_sizes: NotRequired[list[int]]
    trainer_log_probs: NotRequired[list[float | None]]
    routes: NotRequired[RoutesLine]


class TrainerLine(TypedDict):
    """A line of a trainer's file: log-probs of the tokens in the response's own line."""

    group: int
    index: int
    log_probs: list[float | None]


_SAMPLE: TypeAdapter[SampleLine] = TypeAdapter(SampleLine)
_TRAINER: TypeAdapter[TrainerLine] = TypeAdapter(TrainerLine)
Row = TypeVar("Row")


def file_of(run_dir: Path, step: int, *, evaluation: bool = False) -> Path:
    """File with the responses of a step, counted as in the metrics, or of the evaluation after it."""
    return run_dir / DIRECTORY / f"{'eval_' if evaluation else ''}step_{step:06d}.jsonl"


def trainer_file_of(run_dir: Path, step: int) -> Path:
    """File with the trainer's log-probs of some responses of a step."""
    return run_dir / DIRECTORY / f"trainer_step_{step:06d}.jsonl"


def begin(run_dir: Path, first_step: int) -> None:
    """Move files of steps that will be repeated out of the way; a fresh start keeps them under a numbered name. A
    directory that cannot be changed stays as it is: its files may be replaced later.
    """
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
    """(path, prefix of the name before `step_`, step) of every file of responses."""
    found = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir()] if directory.is_dir() else []
    return [(path, match[1] or "", int(match[2])) for path, match in found if match is not None]


def read_samples(path: Path) -> Iterator[SampleLine]:
    """Iterate over the lines of a file.

    Raises:
        UserError: a line is not a response in this version's format.
    """
    return _lines(path, _SAMPLE, "is not a response in this version's format")


def read_trainer_lines(path: Path) -> Iterator[TrainerLine]:
    """Iterate over the lines of a trainer's file. Raises UserError as `read_samples`."""
    return _lines(path, _TRAINER, "is not a line of trainer log-probs")


def _lines(path: Path, kind: TypeAdapter[Row], wrong: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where, hint = f"{path}:{number}", "remove the file: it is of an older version, or damaged"
            with reading(UserError, where, wrong, hint):
                row = kind.validate_json(line)
            yield row

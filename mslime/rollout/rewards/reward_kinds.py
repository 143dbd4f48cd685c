"""Kinds of reward that compare a response with its label, and the jobs and results of reward functions.

A package adds a kind by an entry point of `mslime.rewards`.

Not in `reward_worker`, which is `__main__` in a worker process: results travel from there to its parent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, SupportsFloat, cast

from mslime.config.plugins import load
from mslime.extensions import checked_metrics

OTHER = ("http", "judge", "custom")
"""Kinds that do not compare with a label themselves."""


@dataclass(frozen=True)
class RewardKind:
    """Comparison of a response with the label of its row.

    Attributes:
        function: (response, label) -> score, called in the rollout process: it must be fast and safe. Or the name
            `module:function` of a function (Sample) -> score that runs in worker processes (`reward.workers`). If that
            takes too much time or memory, or raises, the answer scores 0 and the run continues.
        label_problem: why a label cannot be graded; empty if it can. Called for every row by `mslime check`.
        limit_s: seconds for one sample of a function that runs in processes, unless `reward.timeout_s` is set.
        more_memory: bytes that such a process may take beyond its use after the import; None: no limit.
        notes: given all rows ((where, label)) and their number, returns notes for `mslime check`.
    """

    function: Callable[[str, Any], float] | str
    label_problem: Callable[[Any], str]
    limit_s: float = 30.0
    more_memory: int | None = None
    notes: Callable[[Iterable[tuple[str, Any]], int], list[str]] | None = None


def reward_kind(name: str, place: str) -> RewardKind | None:
    """The kind of this name; None for kinds that do not compare with a label.

    Args:
        place: the configuration section that names it, for messages.

    Raises:
        ConfigError: there is no such kind.
    """
    if name in OTHER:
        return None
    return EXACT if name == "exact" else load("mslime.rewards", name, f"{place}.kind")


def alternatives(label: Any) -> list[str]:
    """The texts of a label: itself, or each item of a list. Raises ValueError if there is no text or number."""
    if label is None:
        raise ValueError("the label is missing")
    if isinstance(label, Mapping):
        raise ValueError("the label is an object, but must be text, a number, or a list of those")
    if isinstance(label, Sequence | set) and not isinstance(label, str | bytes):
        items = list(cast("Sequence[Any]", label))
        if not items:
            raise ValueError("the label is an empty list")
        if any(isinstance(i, Mapping | list | tuple) for i in items):
            raise ValueError("the label is a list of lists or objects, but must be a list of texts or numbers")
        return [a for item in items for a in alternatives(item)]
    if isinstance(label, float) and label != label:
        raise ValueError("the label is not a number (NaN)")
    if not isinstance(label, str | Real):
        raise ValueError(f"the label is of type {type(label).__name__}, but must be text or a number")
    text = str(label)
    if not text.strip():
        raise ValueError("the label is empty")
    return [text]


def problem_of(read: Callable[[Any], object]) -> Callable[[Any], str]:
    """Make `RewardKind.label_problem` from a function that reads a label: the text of the ValueError that it raises."""

    def problem(label: Any) -> str:
        try:
            read(label)
        except ValueError as error:
            return str(error)
        return ""

    return problem


def exact(response: str, label: Any) -> float:
    """1.0 if the response equals the label, or one of a list of labels, ignoring surrounding blanks, else 0.0."""
    return float(any(response.strip() == text.strip() for text in alternatives(label)))


text_problem = problem_of(alternatives)
"""Why a label is neither a text, a number nor a list of those; empty if it is."""
EXACT = RewardKind(exact, text_problem)


# Jobs and results of reward functions.


@dataclass(frozen=True)
class RewardJob:
    """The job of a worker process.

    Attributes:
        function: `module:function`.
        setting: the configuration field that names it, for messages.
        limit_s: seconds for one sample.
        more_memory: bytes that the process may take beyond its use after the import; None: no limit.
        interrupt: interrupt a synchronous call inside the process at its time limit; else the parent kills the process.
        per_group: the function takes all samples of a prompt, and `limit_s` applies to all of them together.
    """

    function: str
    setting: str
    limit_s: float
    more_memory: int | None = None
    interrupt: bool = False
    per_group: bool = False


@dataclass(frozen=True)
class RewardResult:
    """Result of scoring one sample.

    Attributes:
        reward: 0 if there is an error.
        error: why there is no reward; empty if there is one.
        steps: process rewards, (position of the token that ends the step, reward).
        metrics: further numbers by name, for the log.
    """

    reward: float
    error: str = ""
    steps: tuple[tuple[int, float], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


def checked(value: Any, length: int) -> RewardResult:
    """Validate a function's return value for a sample of `length` tokens.

    A finite number; a pair of that and process rewards; or an object {"reward": ..., "metrics": {name: number}}.
    """
    metrics: Mapping[str, float] = {}
    if isinstance(value, Mapping):
        unknown = sorted(str(k) for k in value if k not in ("reward", "metrics"))
        if "reward" not in value or unknown:
            wrong = f"with the unknown keys {', '.join(unknown)}" if unknown else "without the key 'reward'"
            return RewardResult(0.0, f"returned an object {wrong}; it may have 'reward' and 'metrics'")
        found = checked_metrics(value.get("metrics") or {})
        if isinstance(found, str):
            return RewardResult(0.0, found)
        value, metrics = value["reward"], found
    value, steps = value if isinstance(value, tuple) and len(value) == 2 else (value, ())
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        return RewardResult(0.0, f"returned {_shown(value)}, which is not a number")
    try:
        reward = float(value)
    except Exception as error:  # an array of several, an integer beyond floats, whatever a class of the user's raises
        return RewardResult(0.0, f"returned {type(value).__name__} {_shown(value)}, which is not a number: {error}")
    if not math.isfinite(reward):
        return RewardResult(0.0, f"returned {reward}, which is not finite")
    pairs = _checked_steps(steps, length)
    return RewardResult(0.0, pairs) if isinstance(pairs, str) else RewardResult(reward, steps=pairs, metrics=metrics)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except Exception as error:  # Python refuses integers of many digits
        return f"(which cannot be shown: {error})"


def checked_group(value: Any, lengths: Sequence[int]) -> list[RewardResult] | RewardResult:
    """Validate a function's return value for the samples of a group; an error for the whole group is one result."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return RewardResult(0.0, f"returned {value!r:.80}, which is not a list with a reward for each sample")
    returned = list(value)
    if len(returned) != len(lengths):
        return RewardResult(0.0, f"returned {len(returned)} rewards for a group of {len(lengths)} samples")
    return [checked(each, length) for each, length in zip(returned, lengths, strict=True)]


def _checked_steps(steps: Any, length: int) -> tuple[tuple[int, float], ...] | str:
    """Process rewards, or the error in them."""
    try:
        pairs = tuple((int(at), float(of_step)) for at, of_step in steps)
    except Exception:
        return f"returned process rewards {steps!r:.80}, which are not pairs of position and reward"
    wrong = next((pair for pair in pairs if not 0 <= pair[0] < length or not math.isfinite(pair[1])), None)
    if wrong is not None:
        return f"returned the process reward {wrong}: not finite, or beyond the {length} tokens"
    return pairs

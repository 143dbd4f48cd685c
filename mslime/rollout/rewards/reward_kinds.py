"""Kinds of reward that compare a response with its label. A package adds one by an entry point of `mslime.rewards`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from mslime.config.plugins import load

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
        raise ValueError("the label is an object, and must be text, a number, or a list of those")
    if isinstance(label, Sequence | set) and not isinstance(label, str | bytes):
        items = list(cast("Sequence[Any]", label))
        if not items:
            raise ValueError("the label is an empty list")
        if any(isinstance(i, Mapping | list | tuple) for i in items):
            raise ValueError("the label is a list of lists or objects, and must be a list of texts or numbers")
        return [a for item in items for a in alternatives(item)]
    if isinstance(label, float) and label != label:
        raise ValueError("the label is not a number (NaN)")
    if not isinstance(label, str | Real):
        raise ValueError(f"the label is of type {type(label).__name__}, and must be text or a number")
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

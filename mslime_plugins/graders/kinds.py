"""Kinds of reward that this package adds. Parsers of mathematics are imported at their first use."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from mslime.rollout.rewards.reward_kinds import RewardKind, problem_of, text_problem
from mslime_plugins.graders import words
from mslime_plugins.graders.labels import letter_of, math_labels

MATH_MEMORY = 2 * 2**30  # bytes that grading may take; no real answer needs that
READING_SECONDS = 20.0  # for labels that only the LaTeX parser can check
SHOWN = 60


def unread_labels(labels: Iterable[tuple[str, Any]], number: int) -> list[str]:
    """Labels of kind math that cannot be parsed, and are therefore compared as text."""
    from mslime_plugins.graders.equality import understood  # importing sympy takes half a second

    known: dict[str, bool] = {}
    rows, unread, first = 0, 0, ""
    deadline = time.monotonic() + READING_SECONDS
    for where, label in labels:
        rows += 1
        for gold in math_labels(label):
            if gold not in known:
                if time.monotonic() > deadline:
                    return [
                        *_summary(unread, rows - 1, first),
                        f"only the first {rows - 1} of {number} labels were parsed",
                    ]
                known[gold] = understood(gold)
            if not known[gold]:
                unread += 1
                first = first or f"{where}, {gold[:SHOWN]!r}"
    return _summary(unread, rows, first)


def _summary(unread: int, rows: int, first: str) -> list[str]:
    if not unread:
        return []
    return [f"{unread} of {rows} labels cannot be read as mathematics and are compared as text; the first: {first}"]


MATH = RewardKind(
    "mslime_plugins.graders.mathematics:graded_math", problem_of(math_labels), 5.0, MATH_MEMORY, unread_labels
)
ANSWER_LINE = RewardKind(
    "mslime_plugins.graders.mathematics:graded_answer_line", problem_of(math_labels), 5.0, MATH_MEMORY, unread_labels
)
LETTERS = RewardKind(words.letters, problem_of(letter_of))
F1 = RewardKind(words.f1, text_problem)

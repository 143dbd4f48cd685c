"""What a label must be for each grader, told without computing anything: usable on every row before a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, cast

from mslime.rollout.rewards.graders.answers import boxed_answer, candidates
from mslime.rollout.rewards.graders.latex import balanced, clean

MANY_WORDS = 12  # a label of more is a worked solution, and its answer is looked for as in a response
NEED_LABEL = frozenset({"exact", "math", "answer_line", "letters", "f1"})


def alternatives(label: Any) -> list[str]:
    """The texts of a label: itself, or each item of a list. Raises ValueError when there is no text or number."""
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


def math_labels(label: Any) -> list[str]:
    """The answers that a label of kind math allows. Raises ValueError when none can be read."""
    if isinstance(label, str) and not label.strip():
        raise ValueError(f"no mathematical answer can be read from the label {label!r}")
    golds = [g for text in alternatives(label) for g in _listed(text)]
    read = [_answer_of(g) for g in golds]
    for gold in read:
        cleaned = clean(gold)
        if not cleaned or not re.search(r"\w|\\", cleaned):
            raise ValueError(f"no mathematical answer can be read from the label {label!r:.200}")
        if not balanced(cleaned):
            raise ValueError(f"the braces of the label {label!r:.200} do not match, so no answer can be read from it")
    return read


def _listed(text: str) -> list[str]:
    """The items of a label that is a JSON list of texts, as some data sets store alternatives."""
    if text.lstrip().startswith('["'):
        try:
            items: object = json.loads(text)
        except ValueError:
            return [text]
        if isinstance(items, list):
            return [str(i) for i in cast("list[object]", items)]
    return [text]


def _answer_of(text: str) -> str:
    """A label's answer: its last box, or what follows `####`, or all of it."""
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    _, mark, after = text.rpartition("####")
    if mark and after.strip():
        return after.strip()
    if len(re.findall(r"(?<!\\)\b[A-Za-z]{2,}", text)) > MANY_WORDS and (found := candidates(text)):
        return found[0]
    return text


def letter_of(label: Any) -> str:
    """The letter of a multiple-choice label: `B`, `(B)`, `B.` or `B) text`. Raises ValueError when it is none."""
    (text, *more) = alternatives(label)
    found = re.match(r"^\s*\(?\s*([A-Za-z])\s*(?:[).:]|$)", text)
    if found is None or more:
        raise ValueError(f"the label {label!r:.80} is not a letter such as B or (B)")
    return found[1].upper()


def label_problem(kind: str, label: Any) -> str:
    """Why a grader of this kind cannot use a label; empty when it can."""
    if kind not in NEED_LABEL:
        return ""
    try:
        if kind in ("math", "answer_line"):
            math_labels(label)
        elif kind == "letters":
            letter_of(label)
        else:
            alternatives(label)
    except ValueError as error:
        return str(error)
    return ""

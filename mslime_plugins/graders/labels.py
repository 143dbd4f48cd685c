"""Validate the labels of each grader, without computation, so every row can be checked before a run."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from mslime.rollout.rewards.reward_kinds import alternatives
from mslime_plugins.graders.answers import boxed_answer, candidates
from mslime_plugins.graders.latex import balanced, clean

MANY_WORDS = 12  # a longer label is a worked solution, whose answer is located as in a response


def math_labels(label: Any) -> list[str]:
    """The answers that a label of kind math allows. Raises ValueError if none can be read."""
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
    """Items of a label that is a JSON list of texts, as some data sets store alternatives."""
    if text.lstrip().startswith('["'):
        try:
            items: object = json.loads(text)
        except ValueError:
            return [text]
        if isinstance(items, list):
            return [str(i) for i in cast("list[object]", items)]
    return [text]


def _answer_of(text: str) -> str:
    """A label's answer: its last box, or the text after `####`, or all of it."""
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
    """The letter of a multiple-choice label: `B`, `(B)`, `B.` or `B) text`. Raises ValueError if it is not one."""
    (text, *more) = alternatives(label)
    found = re.match(r"^\s*\(?\s*([A-Za-z])\s*(?:[).:]|$)", text)
    if found is None or more:
        raise ValueError(f"the label {label!r:.80} is not a letter such as B or (B)")
    return found[1].upper()

"""Kinds of reward that this package adds. Parsers of mathematics are imported at their first use."""

from __future__ import annotations

import re
import string
import time
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mslime.rollout.rewards.reward_kinds import RewardKind, alternatives, problem_of, text_problem
from mslime_plugins.graders.answers import boxes, final_part, letter_of, math_labels

# Graders for plain text: the letter of a multiple choice, and the overlap of words.

_IN_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit|mathit)\s*\{([^{}]*)\}")
_MARKED = re.compile(
    r"(?i:\banswers?\b|\boptions?\b|\bchoices?\b)\W*(?i:(?:is|are|would be|should be|must be)\b)?\W*"
    r"(?i:(?:option|choice|letter)\b)?\W*?"
    r"(?:\(\s*([A-Za-z])\s*\)|(?<![A-Za-z])([A-Z])(?![A-Za-z'’]))"
)
_CHINESE = re.compile(r"(?:答案|选项|选择|选)\s*(?:应该?)?[是为选]?[\s:]*(?:\(\s*([A-Za-z])\s*\)|([A-Z])(?![A-Za-z]))")
_LINE = re.compile(r"^\s*[*_]*\(?\s*([A-Z])\s*\)?[*_]*\s*(?:[.):].*)?$", re.M)
_BRACKETED = re.compile(r"\(\s*([A-Z])\s*\)")


def letters(response: str, label: Any) -> float:
    """1.0 if the response chooses the label's letter: in its last box, behind `answer is`, or as its last line."""
    return float(chosen_letter(response) == letter_of(label))


def chosen_letter(response: str) -> str:
    """The letter that a response chooses, in upper case; empty if it chooses none."""
    text = final_part(response)
    boxed = boxes(text)
    if boxed:
        inside = _IN_TEXT.sub(r"\1", boxed[-1][2] or "")
        found = re.match(r"[\s{$]*\(?\s*([A-Za-z])\s*(?:[).:}$\s]|$)", inside)
        return found[1].upper() if found else ""
    plain = unicodedata.normalize("NFKC", _IN_TEXT.sub(r"\1", text)).replace("**", "").replace("$", "")
    marked = sorted([*_MARKED.finditer(plain), *_CHINESE.finditer(plain)], key=lambda m: m.start())
    if marked:
        return (marked[-1][1] or marked[-1][2]).upper()
    for pattern in (_LINE, _BRACKETED):
        if found := pattern.findall(plain):
            return found[-1]
    return ""


def f1(response: str, label: Any) -> float:
    """Overlap of the words of response and label, the best of several labels: SQuAD's F1 (arXiv 1606.05250).

    2 P R / (P + R), with P the fraction of the response's words that the label has, and R the converse. Words are in
    lower case, without punctuation and articles. The response is the text after `</think>`.
    """
    words = normalised_words(final_part(response))
    return max(_overlap(words, normalised_words(text)) for text in alternatives(label))


def _overlap(words: list[str], wanted: list[str]) -> float:
    if not words or not wanted:
        return float(words == wanted)
    common = (Counter(words) & Counter(wanted)).total()
    return 2 * common / (len(words) + len(wanted))


def normalised_words(text: str) -> list[str]:
    """Words in lower case without punctuation and articles; a Chinese or Japanese character is a word."""
    letters = (c for c in text.lower() if c not in string.punctuation and unicodedata.category(c)[0] != "P")
    plain = re.sub(r"([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff])", r" \1 ", "".join(letters))
    return re.sub(r"\b(?:a|an|the)\b", " ", plain).split()


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
LETTERS = RewardKind(letters, problem_of(letter_of))
F1 = RewardKind(f1, text_problem)

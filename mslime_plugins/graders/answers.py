"""Locate the answer in a response: the last box, an `Answer:` line, `####`, else the response's end.

A box has priority. If the last one is empty or cut off, there is no answer, regardless of earlier text.
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from mslime.rollout.rewards.reward_kinds import alternatives
from mslime_plugins.graders.latex import balanced, clean, matching

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_ANCHOR = re.compile(r"\banswers?\b\**[^.\n:=]{0,60}?(?:(?:\bis\b|\bare\b|\bequals?\b)\s*:?|:|=)\**\s*", re.I)
_ANSWER_LINE = re.compile(
    r"^[ \t>*_#-]*(?:final\s+)?answer[ \t]*[*_]*[ \t]*:[ \t]*[*_]*[ \t]*(.*?)[ \t]*$", re.I | re.M
)
_HASHES = re.compile(r"^####[ \t]*([-+$\\.\d(].*?)[ \t]*$", re.M)
_MATH = re.compile(
    r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|(?<![\\\d$])\$(?!\s*\$)((?:\\\$|[^$\n])+?)(?<!\\)\$(?!\d)", re.DOTALL
)
_NUMBER = re.compile(
    r"(?<![\w.\\^])[-+−]?\s?[$€£¥₹]?\s?(?:\d{1,3}(?:[, ]\d{3})+(?![\d])|\d+)(?:\.\d+|,\d{2}(?!\d))?(?:\s*/\s*\d+)?"
    r"(?:[eE][-+]?\d+)?"
    r"(?:\s*\\?%| percent)?|(?<![\w.])[-+−]?\.\d+"
)
_SENTENCE_END = re.compile(r"(?<!\.)\.(?:\s|$)|\n|(?<=\w)!(?:\s|$)| because | since ")
_LAST_MARKS = 8  # number of `answer is` marks tried from the end
_FEW_WORDS = 5
_TAIL = 2000  # characters at the end that are searched for an unmarked answer
_FINAL = re.compile(r"final answer\**\s*(?:\bis\b\s*:?|:|=)\**", re.I)
_LINK = re.compile(r"\s*(?:,?\s*\b(?:and|or)\b|,|;|/|≈|~)\s*(?:[a-zA-Z]\s*=\s*)?", re.I)
_JOINED = re.compile(r"\b(?:or|and|either|versus|vs)\b", re.I)
_BEFORE = re.compile(
    r"\d[\s$)\]}]*(?:,?\s*\b(?:and|or)\b|[,;/≈~&|]|\bvs\b\.?|\.\.+|\\approx|\\sim|\s)\s*[$(\[{]*\s*$", re.I
)
_JOINS = re.compile(
    r"(?:[\s$,;&.]|\\[()\[\]]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|[a-zA-Z]\w?\s*=)*", re.I
)


def final_part(response: str) -> str:
    """The text after the last `</think>`, or the whole response if that is empty."""
    after = response.rpartition("</think>")[2]
    return after if after.strip() else response


def boxes(text: str) -> list[tuple[int, int, str | None]]:
    """(start, end, content) of every box in order; the content of an unclosed one is None."""
    found: list[tuple[int, int, str | None]] = []
    at = 0
    while (mark := _BOX.search(text, at)) is not None:
        start = re.compile(r"\s*").match(text, mark.end())
        brace = start.end() if start else mark.end()
        if text[brace : brace + 1] == "{":
            end = matching(text, brace)
            content = None if end < 0 else text[brace + 1 : end]
            end = len(text) if end < 0 else end + 1
        else:  # \boxed 5: up to the end of the formula or the line
            stop = re.compile(r"[^$\n]*?(?=\\\)|\\\]|\$|\n|$)").match(text, brace)
            end = stop.end() if stop else brace
            content = re.split(r"(?<=\w)\.?\s|\.$", text[brace:end].strip())[0]
        found.append((mark.start(), end, content))
        at = max(end, mark.end())
    return found


def boxed_answer(text: str) -> str | None:
    """The last box, joined with preceding ones that only a comma or `and` separates from it.

    None without a box; empty if the last one is empty or cut off.
    """
    found = boxes(text)
    if not found:
        return None
    run = [found[-1][2] or ""]
    if not run[0].strip(" \t\n.,$"):
        return ""
    for left, right in zip(reversed(found[:-1]), reversed(found), strict=False):
        if left[2] is None or not _JOINS.fullmatch(text[left[1] : right[0]]):
            break
        run.insert(0, left[2])
    return " , ".join(dict.fromkeys(p.strip(" \t\n") for p in run))


def answer_lines(text: str) -> list[str]:
    """The text behind `Answer:` on lines that begin with it, in order."""
    return [line for line in _ANSWER_LINE.findall(text) if line.strip()]


def candidates(response: str) -> list[str]:
    """Possible readings of the response's answer, best first; empty if there is none.

    Readings are alternative extractions of one value. Several adjacent values are one answer, a list.
    """
    text = final_part(response)
    boxed = boxed_answer(text)
    if boxed is not None:
        after = _after_the_boxes(text)
        return [boxed] if boxed and not after else after
    if hashes := _HASHES.findall(text):
        return [hashes[-1]]
    if anchored := _anchored(text):
        return anchored
    return _at_the_end(text[-_TAIL:])


def _after_the_boxes(text: str) -> list[str]:
    """Text behind the last box that is declared the final answer."""
    rest = text[boxes(text)[-1][1] :]
    mark = _FINAL.search(rest)
    return [] if mark is None else _sentence_readings(rest[mark.end() :].strip()[:_TAIL])


def _anchored(text: str) -> list[str]:
    """Readings of the sentence behind the last non-empty `answer is` or `Answer:`."""
    for mark in reversed(list(_ANCHOR.finditer(text))[-_LAST_MARKS:]):
        if found := _sentence_readings(text[mark.end() : mark.end() + _TAIL].strip()):
            return found
    return []


def _sentence_readings(rest: str) -> list[str]:
    formula = _MATH.match(rest)
    if formula:
        return _formulas(rest, formula)
    sentence = _SENTENCE_END.split(rest)[0].strip(" *_`")
    values = _values(sentence)
    if len(values) != 1 or _JOINED.search(sentence):
        return [sentence] if values or len(sentence.split()) <= _FEW_WORDS else []
    return [sentence, values[0]]


def _values(text: str) -> list[str]:
    """Formulas that are more than a name, and numbers outside of them, in order."""
    text = re.sub(r"\.\.+", " , ", text)
    found, at = list[str](), 0
    for formula in _MATH.finditer(text):
        content = _content(formula)
        found += [n[0] for n in _NUMBER.finditer(text[at : formula.start()])]
        found += [] if re.fullmatch(r"\s*\\?[a-zA-Z]+\s*", content) else [content]
        at = formula.end()
    return found + [n[0] for n in _NUMBER.finditer(text[at:])]


def _formulas(rest: str, formula: re.Match[str]) -> list[str]:
    """The formula at the beginning of `rest`, and further ones joined to it by a comma, `and` or `or`."""
    parts, at = [_content(formula)], formula.end()
    while (link := _LINK.match(rest, at)) is not None:
        following = _MATH.match(rest, link.end()) or _NUMBER.match(rest, link.end())
        if following is None and rest[link.end() :].startswith((*"\\$(-[{",)):
            return []  # another value that is not a formula
        if following is None:
            break
        parts.append(_content(following) if following.re is _MATH else following[0])
        at = following.end()
    percent = re.compile(r"\s*(?:\\?%|percent)").match(rest, at)
    return [" , ".join(parts) + ("%" if percent else "")]


def _content(formula: re.Match[str]) -> str:
    return next(g for g in formula.groups() if g is not None)


def _at_the_end(text: str) -> list[str]:
    """The end of an unmarked response: its last line if short, its last formula or its last number."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return []
    last = lines[-1].strip(" *_`")
    if len(re.findall(r"(?<!\\)\b[A-Za-z]{2,}", re.sub(r"\\[a-zA-Z]+(?:\{[A-Za-z ]*\})?", "", last))) <= 2:
        values = _values(last)
        return [last, values[0]] if len(values) == 1 and not _JOINED.search(last) else [last]
    formulas = [f for f in _MATH.finditer(text) if len(re.findall(r"(?<!\\)\b[a-z]{3,}", _content(f))) < 3]
    numbers = list(_NUMBER.finditer(text))
    if formulas and (not numbers or numbers[-1].start() < formulas[-1].end()):
        return [_chain_at_the_end(text, formulas)]
    if not numbers:
        return []
    if _BEFORE.search(text[: numbers[-1].start()]):
        return []  # one of several
    tail = re.search(r"(?:=|\bis\b|\bare\b|\bequals\b)\s*((?:(?!\bis\b|\bare\b)[^=$\n])+?)\s*\.?\s*$", last)
    values = _values(tail[1]) if tail else []
    return [*([tail[1]] if tail and values else []), *([] if len(values) > 1 else [numbers[-1][0]])]


def _chain_at_the_end(text: str, formulas: list[re.Match[str]]) -> str:
    """The last formulas as one list, if `and`, `or` or a comma joins them."""
    run = [formulas[-1]]
    for left in reversed(formulas[:-1]):
        if not _LINK.fullmatch(text[left.end() : run[0].start()]):
            break
        run.insert(0, left)
    before = _BEFORE.search(text[: run[0].start()])
    return " , ".join([*([before[0]] if before else []), *map(_content, run)])


# Validate the labels of each grader, without computation, so every row can be checked before a run.

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

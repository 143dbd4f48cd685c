"""Where the answer stands in a response: the last box, an `Answer:` line, `####`, else how the response ends.

A box decides alone. When the last one is empty or was cut off, there is no answer, whatever was written before it.
"""

from __future__ import annotations

import re

from mslime.rollout.rewards.graders.latex import matching

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
_SENTENCE_END = re.compile(r"\.(?:\s|$)|\n|(?<=\w)[;!](?:\s|$)| because | since ")
_LAST_MARKS = 8  # how many `answer is` are tried from the end
_FEW_WORDS = 5
_TAIL = 2000  # characters at the end in which an answer without any mark is looked for
CONNECTED = 70  # characters between two boxes that can still be one answer


def final_part(response: str) -> str:
    """What follows the last `</think>`, or the whole response when that is nothing."""
    after = response.rpartition("</think>")[2]
    return after if after.strip() else response


def boxes(text: str) -> list[tuple[int, int, str | None]]:
    """(start, end, content) of every box in order; the content of one that never ends is None."""
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


def boxed_answers(text: str) -> list[str] | None:
    """Readings of the boxes, best first: the last box, the boxes that end the text together, all boxes.

    None when there is no box; empty when the last one holds nothing or was cut off.
    """
    found = boxes(text)
    if not found:
        return None
    last = found[-1][2]
    if last is None or not last.strip(" \t\n.,$"):
        return []
    readings = [last]
    run = [last]
    for left, right in zip(reversed(found[:-1]), reversed(found), strict=False):
        between = text[left[1] : right[0]]
        if len(between) > CONNECTED or left[2] is None or not _joins(between):
            break
        run.insert(0, left[2])
        readings.append(_joined(run))
    return readings


def _joins(between: str) -> bool:
    """Whether what stands between two boxes makes them parts of one answer."""
    plain = re.sub(r"[\s$.]|\\[()\[\]]|\\quad", "", between)
    retracts = re.search(r"\b(?:wait|actually|no|not|instead|mistake|correct|but|hmm|sorry|oops)\b", between, re.I)
    return not retracts and (len(plain) < 10 or bool(re.search(r"\b(?:and|or)\b|[,;&]", between)))


def _joined(parts: list[str]) -> str:
    unique = list(dict.fromkeys(p.strip() for p in parts))
    return " , ".join(unique)


def answer_lines(text: str) -> list[str]:
    """What stands behind `Answer:` on lines that begin with it, in order."""
    return [line for line in _ANSWER_LINE.findall(text) if line.strip()]


def candidates(response: str) -> list[str]:
    """The response's answer in its possible readings, best first; empty when there is none."""
    text = final_part(response)
    boxed = boxed_answers(text)
    if boxed is not None:
        return boxed + _anchored(_after_the_boxes(text)) if boxed else []
    if hashes := _HASHES.findall(text):
        return [hashes[-1]]
    if anchored := _anchored(text):
        return anchored
    return _at_the_end(text[-_TAIL:])


def _after_the_boxes(text: str) -> str:
    """What is said about the final answer behind the last box."""
    rest = text[boxes(text)[-1][1] :]
    return rest if re.search(r"final answer", rest, re.I) else ""


def _anchored(text: str) -> list[str]:
    """Readings of the sentence behind the last `answer is` or `Answer:` that says anything."""
    for mark in reversed(list(_ANCHOR.finditer(text))[-_LAST_MARKS:]):
        if found := _sentence_readings(text[mark.end() : mark.end() + _TAIL].strip()):
            return found
    return []


def _sentence_readings(rest: str) -> list[str]:
    formula = _MATH.match(rest)
    if formula:
        return [*_formulas(rest, formula), rest.split("\n", 1)[0].strip()]
    sentence = _SENTENCE_END.split(rest)[0].strip(" *_`")
    inner, number = _MATH.search(sentence), _NUMBER.search(sentence)
    readings = [sentence] if sentence and (inner or number or len(sentence.split()) <= _FEW_WORDS) else []
    return [*readings, *([_content(inner)] if inner else []), *([number[0]] if number else [])]


def _formulas(rest: str, formula: re.Match[str]) -> list[str]:
    """The formula that `rest` begins with, and that one with those that `and`, `or` or a comma join to it."""
    parts = [_content(formula)]
    at = formula.end()
    while (link := re.compile(r"\s*(?:,?\s*(?:and|or)\b|,)\s*").match(rest, at)) is not None:
        following = _MATH.match(rest, link.end())
        if following is None:
            break
        parts.append(_content(following))
        at = following.end()
    percent = re.compile(r"\s*(?:\\?%|percent)").match(rest, at)
    whole = " , ".join(parts) + ("%" if percent else "")
    return [whole] if len(parts) == 1 else [whole, parts[-1]]


def _content(formula: re.Match[str]) -> str:
    return next(g for g in formula.groups() if g is not None)


def _at_the_end(text: str) -> list[str]:
    """How a response without any mark ends: its last line when that is short, its last formula or its last number."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return []
    readings: list[str] = []
    last = lines[-1].strip(" *_`")
    if len(re.findall(r"(?<!\\)\b[A-Za-z]{2,}", re.sub(r"\\[a-zA-Z]+(?:\{[A-Za-z ]*\})?", "", last))) <= 2:
        readings.append(last)
    formulas = [f for f in _MATH.finditer(text) if len(re.findall(r"(?<!\\)\b[a-z]{3,}", _content(f))) < 3]
    numbers = list(_NUMBER.finditer(text))
    if formulas and (not numbers or numbers[-1].start() < formulas[-1].end()):
        chain = _chain_at_the_end(text, formulas)
        readings += [chain, _content(formulas[-1])] if chain else [_content(formulas[-1])]
    elif numbers:
        readings.append(numbers[-1][0])
        if tail := re.search(r"(?:=|\bis\b|\bare\b|\bequals\b)\s*((?:(?!\bis\b|\bare\b)[^=$\n])+?)\s*\.?\s*$", last):
            readings.insert(0, tail[1])
    return readings


def _chain_at_the_end(text: str, formulas: list[re.Match[str]]) -> str:
    """The last formulas as one list, where `and`, `or` or a comma joins them; else nothing."""
    run = [formulas[-1]]
    for left in reversed(formulas[:-1]):
        if not re.fullmatch(r"\s*(?:,?\s*(?:and|or)\b|,)\s*", text[left.end() : run[0].start()]):
            break
        run.insert(0, left)
    return " , ".join(_content(f) for f in run) if len(run) > 1 else ""

"""Equality of two answers: as text, as a number with its unit, as a collection, or by value.

Text, numbers, units and lists are compared here; expressions by value (`symbolic`), sets, relations and matrices by
math-verify. An answer states one value: if it lists several in any form, it does not equal a label that is one of them.
Exactness rules: a tuple keeps its order, a set does not, `(1, 2)` is not `[1, 2]`, and a name in front (`x =`) counts
only if both have one.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from mslime_plugins.graders.latex import CLOSING, OPENING, balanced, bracket_at, clean, key, split_top, words
from mslime_plugins.graders.numbers import PlainNumber, comparable, read_number, same_number, without_unit
from mslime_plugins.graders.symbolic import (
    equals_number,
    is_region,
    proportional,
    read_expression,
    real_value,
    same_object,
    same_value,
    to_latex,
    union,
)

LONGEST = 4_000  # characters of an answer that is parsed; longer ones are compared only as text
DEEPEST = 40  # brackets in brackets
MOST_ITEMS = 64  # of a list, set or tuple that is compared item by item

_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_DECIMAL_COMMA = re.compile(r"([+-]?(?:0(?=,)|\d+(?=,(?:\d\d|\d{4,})$))),(\d+)")
_LEAD = re.compile(
    r"^(?:\\text\{)?[^{}=]*?\b(?:answer|result|solution|total|value)s?\b[^{}=\d]*?(?:\bis\b|\bare\b|:)\s*\}?\s*", re.I
)
_ABOUT = re.compile(
    r"^(?:\\text\{\s*(?:about|approximately|approx\.?|roughly|nearly|exactly|only)\s*\}|\\approx|\\sim)\s*", re.I
)
_SUM_OF_NAMES = re.compile(r"[a-zA-Z](?:\s*[+-]\s*[a-zA-Z])+")  # m + n = 809, as in contest answers
_CHOICE = re.compile(
    r"^(?:\\text\{)?\s*(?:\(\s*([A-J])\s*\)|([A-J])\s*[.):](?![\d=])|([A-J])\s*\})\s*\}?[\s.:)]*(.*)$", re.DOTALL
)
_LETTER = re.compile(r"^\(?\s*(?:\\text\{\s*)?\(?\s*([A-J])\s*\)?\s*\}?\s*\)?\.?$")
_BASE = re.compile(r"^([0-9A-F]+)_\{?\s*(\d+)\s*\}?$")
_PREFIXED = re.compile(r"^([+-]?)0\s*([xX][0-9a-fA-F]+|[bB][01]+|[oO][0-7]+)$")
_GROUPED = re.compile(r"(?<![\w}\]^_\\])\{\s*([\d.]+)\s*\}")
_SIDE_BY_SIDE = re.compile(
    r"(?<![_^])(?:\d|\.)(?:\s+[+-]?\.?\d|\s*(?:&|\\\\|\||\\mid|\\to|\\?rightarrow)\s*\d|\s*\{\s*\d)"
)
_NO_SOLUTION = frozenset(
    {
        "no solution",
        "no solutions",
        "no real solution",
        "no real solutions",
        "empty set",
        "none",
        "no such",
        "does not exist",
        "dne",
    }
)
_WORD = re.compile(r"(?<![\\a-zA-Z])[A-Za-z]{4,}|\\text\{[^{}]*[A-Za-z]{2}[^{}]*\}")
_COMPUTED = re.compile(
    r"\\(?:begin|end)\s*\{[a-zA-Z]+\}|(?<![a-zA-Z])(?:sqrt|infinity|infty|theta|alpha|beta|gamma|delta|lambda|sinh|cosh|tanh"
    r"|arcsin|arccos|arctan|frac|choose)(?![a-zA-Z])"
)
_APPROXIMATELY = re.compile(r"\\approx(?![a-zA-Z])|\\sim(?![a-zA-Z])|~=")
_AND = r"\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![a-z])"
_SEMICOLON, _COMMA = re.compile(r";"), re.compile(rf"\s*,\s*(?:{_AND})?|{_AND}")
_EQUALS = re.compile(r":=|(?<![<>!\\=])=(?!=)|\\equiv(?![a-zA-Z])")
_ORDERED = re.compile(r"\\(?:le|ge|ne|in)(?![a-zA-Z])|[<>]|!=")
_NO_VALUE = re.compile(
    r"[<>&]|=(?![^{}\\]*\})|\\(?:\\|(?:le|ge|ne|in|to|ldots|equiv|cup|cap|setminus|mid|[lr]?[rR]ightarrow|implies|vee|wedge)(?![a-zA-Z]))|\.\."
)  # the parser may read only a part of these
_BUILDER = re.compile(r"^[^|:]*?([a-zA-Z])\s*(?:\\in\s*\\mathbb\s*\{?[A-Z]\}?)?\s*(?:\||:)\s*(.*)$", re.DOTALL)
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
_VECTOR = re.compile(
    r"^\(?\s*\\begin\s*\{([pbB]?(?:small)?matrix|array)\}(?:\s*\{[^{}]*\})?((?:(?!\\begin).)*)\\end\s*\{\1\}\s*\)?$",
    re.DOTALL,
)
_CUP = re.compile(r"(?<=[\])}])\s*U\s*(?=[\[({\\])")
_REALS = re.compile(r"^(?:\\text\{)?\s*all\s+real(?:s|\s+numbers?)\s*\}?$", re.I)
_OPEN = {"(": "(", "[": "[", r"\{": "{", "{": " ", r"\langle": "("}
_CLOSE = {")": ")", "]": "]", r"\}": "}", "}": " ", r"\rangle": ")"}


class ItemList(NamedTuple):
    """Several items. `kind` is how they are grouped: `list`, `set`, or two brackets; empty for a single item."""

    kind: str
    items: tuple[str, ...]


def equal(gold: str, answer: str) -> bool:
    """Whether an answer equals the label. Both are unprocessed text, LaTeX or plain.

    Raises:
        TooLargeError: a number in one of them is too large to be computed.
    """
    if max(len(gold), len(answer)) > LONGEST or max(_depth(gold), _depth(answer)) > DEEPEST:
        return gold.strip() == answer.strip()
    g, a = tidy(gold), tidy(answer)
    if not g or not a:
        return False
    if key(g) == key(a):
        return True
    if not balanced(a):
        return False
    if (verdict := _same_choice(g, a)) is not None:
        return verdict
    if (verdict := _same_words(g, a)) is not None:
        return verdict
    return any(_same(x, y) for x in readings(g, trusted=True) for y in readings(a))


def _depth(text: str) -> int:
    """Nesting depth of brackets, unclosed ones included."""
    depth = deepest = 0
    for c in text:
        depth += (c in OPENING) - (c in CLOSING)
        deepest = max(deepest, depth)
    return deepest


def tidy(text: str) -> str:
    """`clean`, without an introduction such as `The answer is`."""
    text = _ABOUT.sub("", _LEAD.sub("", clean(text.strip(" \n\r")))).strip()
    return r"\mathbb{R}" if _REALS.match(text) else _CUP.sub(r"\\cup ", re.sub(r"[\s\\]+$", "", text))


def readings(text: str, *, trusted: bool = False) -> list[str]:
    """Possible readings of a cleaned answer, most likely first: 1,234 is a number, 2,75 has a decimal comma or is a
    list.

    Args:
        trusted: it is a label; each part of its `a \\approx b` counts. In an answer both count only if b is the
            rounding of a, so a chain of guesses does not count.
    """
    if (m := _CHOICE.match(text)) is not None and m[4].strip():
        return readings(m[4].strip(" .}"), trusted=trusted)
    if (m := _DECIMAL_COMMA.fullmatch(text)) is not None:
        return [f"{m[1]}.{m[2]}", text]
    parts = [p.strip() for p in _APPROXIMATELY.split(_join_thousands(text))]
    if len(parts) == 1:
        return parts
    if not all(parts):
        return []
    if trusted:
        return parts
    if len(parts) != 2:
        return []
    if _is_variable(parts[0]):
        return parts[1:]
    return parts if _rounded(*parts) else []


def _rounded(whole: str, decimal: str) -> bool:
    """Whether a decimal of three digits or more is the rounding of a non-decimal value."""
    short, long = read_number(decimal), read_number(whole)
    if short is None or (short.digits or 0) < 3 or (long is not None and long.digits is not None):
        return False
    value = long.value if long is not None else real_value(read_expression(whole))
    return value is not None and abs(value - short.value) <= Fraction(1, 2) / Fraction(10) ** short.places


def _join_thousands(text: str) -> str:
    """Remove the commas of 1,234 unless brackets make them a pair's."""
    if "," not in text:
        return text
    return _THOUSANDS.sub(lambda m: m[1].replace(",", "") if _outside_brackets(text, m.start()) else m[0], text)


def _outside_brackets(text: str, at: int) -> bool:
    before = re.sub(r"\\left|\\right", "", text[:at])
    return (
        before.count("(") == before.count(")")
        and before.count("[") == before.count("]")
        and (len(re.findall(r"\\\{", before)) == len(re.findall(r"\\\}", before)) and not before.startswith("{"))
    )


# ------------------------------------------------------------------------------------------------------ text, choices


def _same_choice(g: str, a: str) -> bool | None:
    """Compare letters of a multiple choice, if the label is one; a choice may be followed by its text."""
    gold, answer = _LETTER.match(g), _LETTER.match(a)
    if gold and answer:
        return gold[1] == answer[1]
    chosen = _CHOICE.match(a) if gold else _CHOICE.match(g) if answer else None
    letter = gold or answer
    if chosen is None or letter is None:
        return None
    return next(x for x in chosen.groups()[:3] if x) == letter[1]


def _same_words(g: str, a: str) -> bool | None:
    """Compare names and sentences; None if they are mathematical."""
    none = [_says_none(t) for t in (g, a)]
    if all(none):
        return True
    if any(none):
        return False
    bare = [without_unit(t).text for t in (g, a)]
    wordy = [is_words(t) for t in bare]
    if wordy[0] or (wordy[1] and not re.search(r"[\d=]", bare[1])):
        same = words(g) == words(a)
        return same if same or all(wordy) or not re.search(r"\d|\\", g) else None
    return None


def _says_none(text: str) -> bool:
    return key(text) in (r"\emptyset", r"\{\}") or words(text) in _NO_SOLUTION


def is_words(text: str) -> bool:
    """Whether an answer is a name or a sentence, which is not computed."""
    text = _COMPUTED.sub(" ", text)
    return _WORD.search(text) is not None and not re.search(
        r"[=^+<>]|\\(?:frac|sqrt|le|ge|ne|in|pi|cup)\b|\d\s*[,*/]|\\text\{\s*(?:and|or|if)\s*\}", text
    )


# -------------------------------------------------------------------------------------------------- one reading each


def _same(g: str, a: str) -> bool:
    """Compare two readings: lists item by item, values with a name in front, equations, and single expressions."""
    g, a = _bare(g), _bare(a)
    if key(g) == key(a):
        return True
    if (verdict := _same_in_base(g, a)) is not None:
        return verdict
    if (verdict := _same_ratio(g, a)) is not None:
        return verdict
    if (verdict := _same_lists(g, a)) is not None:
        return verdict
    if (verdict := _same_equations(g, a)) is not None:
        return verdict
    return _same_leaf(g, a)


def _bare(text: str) -> str:
    """Remove notation for the kind of a set: x in, a condition's braces, brackets around a value."""
    if len(parts := split_top(text, re.compile(r"\\in(?![a-zA-Z])"))) == 2 and _is_variable(parts[0]):
        text = parts[1].strip()
    ends = _brackets(text)
    if ends is None:
        return text
    opening, closing, inside = ends
    if opening == "{" and (m := _BUILDER.match(inside)) is not None and _ORDERED.search(m[2]):
        return _bare(m[2].strip())
    if opening + closing in ("  ", "()") and inside and len(_split(inside)) == 1:
        return _bare(inside)
    return text


def _brackets(text: str) -> tuple[str, str, str] | None:
    """(opening, closing, inside) if one pair of brackets encloses the whole text."""
    width, step = bracket_at(text, 0) if text else (0, 0)
    if step != 1:
        return None
    depth, i = 0, 0
    while i < len(text):
        size, step = bracket_at(text, i)
        depth += step
        if depth == 0:
            opening, closing = _OPEN.get(text[:width]), _CLOSE.get(text[i : i + size])
            if i + size != len(text) or opening is None or closing is None:
                return None
            return opening, closing, text[width:i].strip()
        i += size
    return None


def _same_in_base(g: str, a: str) -> bool | None:
    """Compare numerals with a base: the digits, and the base if both have one."""
    numerals = _PREFIXED.match(g), _PREFIXED.match(a)
    if any(numerals):
        return all(numerals) and int(g.replace(" ", ""), 0) == int(a.replace(" ", ""), 0)
    gold, answer = _BASE.match(key(g)), _BASE.match(key(a))
    if gold and answer:
        return gold.groups() == answer.groups()
    based, other = (gold, a) if gold else (answer, g)
    if based is None:
        return None
    return re.sub(r"\s", "", other) == based[1]


# ------------------------------------------------------------------------------------------------------ several things


def _split(text: str) -> list[str]:
    """Split at commas and `and`, or at semicolons if there are any."""
    for separator in (_SEMICOLON, _COMMA):
        parts = [p.strip() for p in split_top(text, separator)]
        if len(parts) > 1:
            return [p for p in parts if p]
    return [text]


def _listed(text: str) -> ItemList:
    """The items of a list, a set or a tuple; a single text with an empty kind for anything else."""
    parts = _split(text)
    ends = None if len(parts) > 1 else _brackets(text)
    if ends is not None and ends[0] in "([{" and ends[1] in ")]}":
        inside = _split(ends[2])
        if ends[0] == "{" or len(inside) > 1 or ends[0] + ends[1] == "[]":
            kind = "set" if ends[0] == "{" else ends[0] + ends[1]
            return ItemList(kind if len(inside) > 1 else "list", tuple(b for i in inside for b in _both(i)))
    parts = [b for p in parts for b in _both(p)]
    return ItemList("list" if len(parts) > 1 else "", tuple(parts))


def _both(text: str) -> list[str]:
    """The two readings of a text with `\\pm` or `\\mp`; only the text itself without these, and for a collection."""
    if not _PLUS_MINUS.search(text) or text.startswith((r"\{", "(", "[")):
        return [text]
    return [_PLUS_MINUS.sub(lambda m, up=up: "+" if (m[1] == "pm") == up else "-", text) for up in (True, False)]


def _same_lists(g: str, a: str) -> bool | None:
    """Compare lists, sets and tuples; None if neither is one, or for an interval and a non-interval."""
    gold, answer = (_distinct(_vector_as(x, of)) for x, of in ((g, a), (a, g)))
    kinds = {gold.kind, answer.kind}
    if kinds == {""}:
        return None
    for one, other, text in ((gold, answer, a), (answer, gold, g)):
        if not one.kind and len(parts := [p.strip() for p in split_top(one.items[0], _EQUALS)]) > 1:
            value = _valued(parts, asked_for_sums=False) if other.kind else None  # (x, y) = (1, 2)
            return value is not None and (_same(value[1], text) if one is gold else _same(text, value[1]))
    if "" in kinds:
        alone = max(len(gold.items), len(answer.items)) == 1
        if alone:
            return _same(gold.items[0], answer.items[0])
        return _same_region(g, a)
    if any(k[0] + k[-1] in ("[)", "(]") for k in kinds if k) and len(kinds) > 1:
        return False
    if len(gold.items) != len(answer.items):
        return False
    if len(gold.items) > MOST_ITEMS:
        return False
    if kinds <= {"list", "set"}:
        return _match_in_any_order(gold.items, answer.items)
    ordered = len(kinds) == 1 or kinds == {"list", "()"} or (kinds <= {"()", "[]", "list"} and len(gold.items) != 2)
    return ordered and all(map(_same, gold.items, answer.items))


def _vector_as(text: str, other: str) -> ItemList:
    """A vector as a tuple if the other side is not a matrix; else the listed items."""
    m = _VECTOR.match(text)
    if m is None or "matrix" in other or "array" in other:
        return _listed(text)
    rows = [r.strip() for r in re.split(r"\\\\", m[2]) if r.strip()]
    cells = rows if len(rows) > 1 else re.split(r"(?<!\\)&", m[2])
    return ItemList("", (text,)) if len(rows) > 1 and "&" in m[2] else ItemList("()", tuple(c.strip() for c in cells))


def _distinct(listed: ItemList) -> ItemList:
    """Remove repetitions if they have no meaning: in a set, and in a list of tuples."""
    if listed.kind == "set" or (listed.kind == "list" and all(_brackets(i) for i in listed.items)):
        return ItemList(listed.kind, tuple(dict.fromkeys(listed.items)))
    return listed


def _match_in_any_order(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
    """Whether the items of both match one to one."""
    rest = list(answer)
    for item in gold:
        found = next((r for r in rest if _same(item, r)), None)
        if found is None:
            return False
        rest.remove(found)
    return True


def _same_region(g: str, a: str) -> bool:
    """Compare an interval, a union, an inequality, or inequalities joined by `or`, with another form of one."""
    sides: list[object] = []
    for text in (g, a):
        if _EQUALS.search(text):
            return False
        parts = _split(text) if _ORDERED.search(text) and re.search(r"\bor\b", text) else [text]
        expressions = [read_expression(p) for p in parts]
        if any(e is None for e in expressions):
            return False
        sides.append(union(expressions) if len(parts) > 1 else expressions[0])
    return all(side is not None and is_region(side) for side in sides) and same_object(*sides)


# ------------------------------------------------------------------------------------------------------- equations


def _same_equations(g: str, a: str) -> bool | None:
    """Compare equations; a value with a name in front of it is that value. None without an equation."""
    sides = [[p.strip() for p in split_top(t, _EQUALS)] for t in (g, a)]
    if all(len(s) == 1 for s in sides) or any(_ORDERED.search(t) for t in (g, a)):
        return None
    if not all(p for s in sides for p in s):
        return False
    gold, answer = _valued(sides[0], False), _valued(sides[1], len(sides[0]) == 1)
    if gold is not None and answer is not None and (not gold[0] or not answer[0] or _same_names(gold[0], answer[0])):
        return _same(gold[1], answer[1])
    if len(sides[0]) != 2 or len(sides[1]) != 2 or (gold and answer and _is_variable(gold[0]) and gold[0] != answer[0]):
        return False
    read = [[read_expression(p) for p in s] for s in sides]
    if any(e is None for s in read for e in s):
        return False
    try:
        return proportional(read[0][0] - read[0][1], read[1][0] - read[1][1])
    except (TypeError, AttributeError):
        return False


def _valued(parts: list[str], asked_for_sums: bool) -> tuple[str, str] | None:
    """(name or empty, value) of `x = 2 + 3 = 5`; None for an equation, or for different values."""
    if len(parts) == 2 and read_number(parts[0]) and _is_name(parts[1]):
        parts = parts[::-1]  # 12 = n
    name = ""
    while len(parts) > 1 and (_is_name(parts[0]) or (asked_for_sums and _SUM_OF_NAMES.fullmatch(parts[0]))):
        name, parts = name or parts[0], parts[1:]
    return (name, parts[-1]) if all(_same(p, parts[-1]) for p in parts[:-1]) else None


def _same_names(g: str, a: str) -> bool:
    """Whether names are equal; y and f(x) both name a function's value."""
    if key(g) == key(a):
        return True
    kinds = [bool(re.fullmatch(r"[a-zA-Z]\s*\(\s*[a-zA-Z]\s*\)", t)) for t in (g, a)]
    return kinds[0] != kinds[1] and "y" in (g, a)


def _is_name(text: str) -> bool:
    """Whether the left side of an equation only names the right: x, f(x), AB, P(A), |z|, (x, y), but not 2x + 1."""
    text = re.sub(r"\\text\{[^{}]*\}", "T", text.strip())
    if not re.search(r"[A-Za-z]", re.sub(r"\\(?:frac|pi|infty)(?![a-zA-Z])", "", text)) or re.match(r"^\d", text):
        return False
    outer = re.sub(r"\([^()]*\)|\{[^{}]*\}|\|[^|]*\|", "", re.sub(r"\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}", "F", text))
    return not re.search(r"[+^]|(?<!^)-|\\(?:sin|cos|tan|log|ln|cdot|times|sqrt)\b", outer)


def _is_variable(text: str) -> bool:
    """A name such as x, n_1, \\theta or f(x)."""
    name = text.strip()
    return re.fullmatch(r"(?:\\[a-zA-Z]+|[a-zA-Z])(?:_\{?\w+\}?)?(?:\s*\(\s*[a-zA-Z]\s*\))?'?", name) is not None and (
        name not in (r"\infty", r"\pi", "e", "i")
    )


# ------------------------------------------------------------------------------------------------------------ leaves


def _same_leaf(g: str, a: str) -> bool:
    """Compare two expressions, possibly with units: as numbers, ratios, words or values. Raises TooLargeError."""
    gold, answer = without_unit(g), without_unit(a)
    factor = comparable(gold, answer)
    if factor is None:
        return False
    g, a = gold.text, answer.text
    numbers = read_number(g), read_number(a)
    if numbers[0] and numbers[1]:
        scaled = PlainNumber(numbers[0].value * factor, numbers[0].digits, numbers[0].places, numbers[0].percent)
        return same_number(scaled, numbers[1])
    if factor != 1:
        return False
    if key(g) == key(a):
        return True
    if is_words(g) or is_words(a):
        return words(g) == words(a)
    if any(number is None and _side_by_side(t) for t, number in zip((g, a), numbers, strict=True)):
        return False  # a sequence, a table: compared only as text
    return _same_expression(g, a, numbers)


def _side_by_side(text: str) -> bool:
    """Whether numbers are adjacent, which the parser would read as a product: `10 20 30`, `{1}{2}`."""
    return "begin" not in text and _SIDE_BY_SIDE.search(_GROUPED.sub(r" \1 ", to_latex(text))) is not None


def _same_ratio(g: str, a: str) -> bool | None:
    """Compare ratios such as `3:2` and `6:4`; a ratio of two may be a fraction."""
    sides = [[read_number(p) for p in t.rpartition("=")[2].split(":")] for t in (g, a)]
    if all(len(s) == 1 for s in sides) or any(p is None or p.value == 0 for s in sides for p in s):
        return None
    values = [[p.value for p in s if p is not None] for s in sides]
    if len(values[0]) != len(values[1]):
        pair, single = (values[0], values[1]) if len(values[1]) == 1 else (values[1], values[0])
        return len(pair) == 2 and len(single) == 1 and pair[0] / pair[1] == single[0]
    return all(p * values[1][0] == q * values[0][0] for p, q in zip(*values, strict=True))


def _same_expression(g: str, a: str, numbers: tuple[PlainNumber | None, PlainNumber | None]) -> bool:
    percent = [t.rstrip(" \\").endswith("%") for t in (g, a)]
    left, right = (read_expression(t.rstrip("% \\")) for t in (g, a))
    if left is None or right is None:
        return False
    if any(_NO_VALUE.search(t) and "begin" not in t for t in (g, a)):
        return is_region(left) and is_region(right) and same_object(left, right)
    for number, expression in ((numbers[0], right), (numbers[1], left)):
        if number is None:
            continue
        plain = PlainNumber(number.value, number.digits, number.places)
        if (verdict := equals_number(expression, plain)) is not None:
            return verdict
    verdict = same_value(left, right)
    if verdict is False and percent[0] != percent[1]:
        verdict = same_value(left * 100 if percent[1] else left, right * 100 if percent[0] else right)
    return same_object(left, right) if verdict is None else verdict


def understood(gold: str) -> bool:
    """Whether a label can be compared other than as text: its parts are numbers, names or expressions."""
    if len(gold) > LONGEST or _depth(gold) > DEEPEST:
        return False
    text = tidy(gold)
    if _LETTER.match(text) or _BASE.match(key(text)) or _says_none(text) or is_words(text):
        return True
    return all(map(_is_read, readings(text, trusted=True)[:1]))


def _is_read(text: str) -> bool:
    text = _bare(text)
    if len(listed := _listed(text).items) > 1:
        return all(map(_is_read, listed))
    parts = [without_unit(p.strip()).text for p in split_top(text, _EQUALS)]
    if ":" in text and all(read_number(p) for p in text.split(":")):
        return True
    return all(
        read_number(p) or is_words(p) or (len(parts) > 1 and _is_name(p)) or _parses(p.rstrip("% \\")) for p in parts
    )


def _parses(text: str) -> bool:
    return not _side_by_side(text) and read_expression(text) is not None

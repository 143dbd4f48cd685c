"""Whether two answers say the same: as text, as a number with its unit, as a collection, a region or an expression.

The forms are told apart first (`shapes`), pieces are compared as numbers (`numbers`) or by value (`symbolic`), and
math-verify is asked about sets and relations that neither form covers. Exactness rules: a tuple keeps its order, a set
does not, `(1, 2)` is not `[1, 2]`, and a name in front (`x =`) counts only where both have one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from math_verify import parse, verify
from sympy import Basic, MatrixBase

from mslime.rollout.rewards.graders.latex import CLOSING, OPENING, clean, key, words
from mslime.rollout.rewards.graders.numbers import Measured, Plain, comparable, read_number, same_number, without_unit
from mslime.rollout.rewards.graders.shapes import (
    Leaf,
    Many,
    Matrix,
    Region,
    Relation,
    Shape,
    as_region,
    read_shape,
    written,
)
from mslime.rollout.rewards.graders.symbolic import (
    NoValueError,
    equals_number,
    exact,
    proportional,
    read_expression,
    same_value,
    to_latex,
)

LONGEST = 4_000  # characters of an answer that is looked at; longer ones are equal as text or not at all
DEEPEST = 40  # brackets in brackets

_DEPTH_0_THOUSANDS = re.compile(r"(?<![\d.])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_DECIMAL_COMMA = re.compile(r"^([+-]?(?:0|\d+)),(\d+)$")
_LEAD = re.compile(
    r"^(?:\\text\{)?[^{}=]*?\b(?:answer|result|solution|total|value)s?\b[^{}=\d]*?(?:\bis\b|\bare\b|:)\s*\}?\s*", re.I
)
_ABOUT = re.compile(r"^\\text\{\s*(?:about|approximately|approx\.?|roughly|nearly|exactly|only)\s*\}\s*", re.I)
_SUM_OF_NAMES = re.compile(r"[a-zA-Z](?:\s*[+-]\s*[a-zA-Z])+")  # m + n = 809, as contests ask for it
_CHOICE = re.compile(
    r"^(?:\\text\{)?\s*(?:\(\s*([A-J])\s*\)|([A-J])\s*[.):](?![\d=])|([A-J])\s*\})\s*\}?[\s.:)]*(.*)$", re.DOTALL
)
_LETTER = re.compile(r"^\(?\s*(?:\\text\{\s*)?\(?\s*([A-J])\s*\)?\s*\}?\s*\)?\.?$")
_BASE = re.compile(r"^([0-9A-F]+)_\{?\s*(\d+)\s*\}?$")
_SUBSCRIPTED = re.compile(r"^\(?([0-9A-F]+)\)?_")
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


def equal(gold: str, answer: str) -> bool:
    """Whether an answer says what the label says. Both as they were written, LaTeX or plain.

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
    if (verdict := _same_choice(g, a)) is not None:
        return verdict
    if (verdict := _same_words(g, a)) is not None:
        return verdict
    return any(_same(x, y) for x in readings(g) for y in readings(a))


def _depth(text: str) -> int:
    """How deep brackets are nested, the unclosed ones included."""
    depth = deepest = 0
    for c in text:
        depth += (c in OPENING) - (c in CLOSING)
        deepest = max(deepest, depth)
    return deepest


def tidy(text: str) -> str:
    """`clean`, without an introduction such as `The answer is`."""
    return _ABOUT.sub("", _LEAD.sub("", clean(text.strip(" \n\r")))).strip()


def readings(text: str) -> Iterator[str]:
    """What a cleaned answer may mean, most likely first: 1,234 is a number, 0,5 has a decimal comma."""
    if (m := _CHOICE.match(text)) is not None and m[4].strip():
        yield from readings(m[4].strip(" .}"))
        return
    joined = _join_thousands(text)
    parts = [p.strip() for p in _APPROXIMATELY.split(joined) if p.strip()]
    if len(parts) > 1 and not re.fullmatch(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?", parts[0]):
        yield from parts
    elif parts:
        yield parts[-1]
    if joined != text:
        yield text
    if (m := _DECIMAL_COMMA.match(text)) is not None and (len(m[2]) != 1 or m[1].lstrip("+-") == "0"):
        yield f"{m[1]}.{m[2]}"


def _join_thousands(text: str) -> str:
    """Without the commas of 1,234 where no bracket makes them a pair's."""
    if "," not in text:
        return text
    return _DEPTH_0_THOUSANDS.sub(lambda m: m[1].replace(",", "") if _outside_brackets(text, m.start()) else m[0], text)


def _outside_brackets(text: str, at: int) -> bool:
    before = re.sub(r"\\left|\\right", "", text[:at])
    return (
        before.count("(") == before.count(")")
        and before.count("[") == before.count("]")
        and (len(re.findall(r"\\\{", before)) == len(re.findall(r"\\\}", before)) and not before.startswith("{"))
    )


# ------------------------------------------------------------------------------------------------------ text, choices


def _same_choice(g: str, a: str) -> bool | None:
    """Letters of a multiple choice, when the label is one; a choice may be followed by its text."""
    gold, answer = _LETTER.match(g), _LETTER.match(a)
    if gold and answer:
        return gold[1] == answer[1]
    chosen = _CHOICE.match(a) if gold else _CHOICE.match(g) if answer else None
    letter = gold or answer
    if chosen is None or letter is None:
        return None
    return next(x for x in chosen.groups()[:3] if x) == letter[1]


def _same_words(g: str, a: str) -> bool | None:
    """Names and sentences; None when they are about mathematics."""
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
    """Whether an answer is a name or a sentence: nothing in it is computed."""
    text = _COMPUTED.sub(" ", text)
    return _WORD.search(text) is not None and not re.search(
        r"[=^+<>]|\\(?:frac|sqrt|le|ge|ne|in|pi|cup)\b|\d\s*[,*/]|\\text\{\s*(?:and|or|if)\s*\}", text
    )


# -------------------------------------------------------------------------------------------------- one reading each


def _same(g: str, a: str) -> bool:
    """Two readings: with units, or in their forms."""
    based = _same_in_base(g, a)
    if based is not None:
        return based
    gold, answer = without_unit(g), without_unit(a)
    factor = comparable(gold, answer)
    if gold.unit or answer.unit:
        if factor is None:
            return False
        if _measured(gold, answer, factor):
            return True
        if gold.unit and answer.unit:
            return False
    return _same_shape(read_shape(g), read_shape(a))


def _measured(gold: Measured, answer: Measured, factor: Fraction) -> bool:
    g, a = gold.text, answer.text
    numbers = read_number(g), read_number(a)
    if numbers[0] and numbers[1]:
        scaled = Plain(numbers[0].value * factor, numbers[0].digits, numbers[0].places, numbers[0].percent)
        return same_number(scaled, numbers[1])
    return factor == 1 and _same_shape(read_shape(g), read_shape(a))


def _same_in_base(g: str, a: str) -> bool | None:
    """Numerals with a base: the digits are compared, and the base where both have one."""
    gold, answer = _BASE.match(key(g)), _BASE.match(key(a))
    if gold and answer:
        return gold.groups() == answer.groups()
    based, other = (gold, a) if gold else (answer, g)
    if based is None:
        return None
    return re.sub(r"\s", "", other) == based[1]


def _same_shape(g: Shape, a: Shape) -> bool:
    if isinstance(g, Leaf) and isinstance(a, Leaf):
        return same_leaf(g.text, a.text)
    if isinstance(g, Relation) or isinstance(a, Relation):
        return _same_relation(g, a) or (not isinstance(g, Leaf) and not isinstance(a, Leaf) and _by_math_verify(g, a))
    if isinstance(g, Matrix) or isinstance(a, Matrix):
        return _same_matrix(g, a)
    left, right = as_region(g), as_region(a)
    if left is not None and right is not None and (isinstance(g, Region) or isinstance(a, Region) or _same_kind(g, a)):
        if _same_region(left, right):
            return True
        return (isinstance(g, Region) or isinstance(a, Region)) and _by_math_verify(g, a)
    if isinstance(g, Many) and isinstance(a, Many):
        return _same_many(g, a)
    if isinstance(g, Many | Region) and isinstance(a, Many | Region):
        return _by_math_verify(g, a)
    many, other = (g, a) if isinstance(g, Many) else (a, g)
    return isinstance(many, Many) and len(many.items) == 1 and _same_shape(many.items[0], other)


def _same_kind(g: Shape, a: Shape) -> bool:
    return isinstance(g, Many) and isinstance(a, Many) and g.kind == a.kind


def _same_many(g: Many, a: Many) -> bool:
    g, a = _distinct(g), _distinct(a)
    if len(g.items) != len(a.items):
        return False
    kinds = {g.kind, a.kind}
    ordered = kinds & {"()", "[]", "[)", "(]"}
    if kinds <= {"list", "set", "union"}:
        return _match_in_any_order(g.items, a.items)
    if kinds == {"list", "()"} or len(kinds) == 1 or (kinds == {"()", "[]"} and len(g.items) != 2):
        return all(_same_shape(x, y) for x, y in zip(g.items, a.items, strict=True))
    return (
        kinds == {"list", "[]"}
        and bool(ordered)
        and len(g.items) != 2
        and (all(_same_shape(x, y) for x, y in zip(g.items, a.items, strict=True)))
    )


def _distinct(many: Many) -> Many:
    """Without repetitions, where those mean nothing: in a set, and in a list of tuples."""
    if many.kind == "set" or (many.kind == "list" and all(isinstance(i, Many) for i in many.items)):
        return Many(many.kind, tuple(dict.fromkeys(many.items)))
    return many


def _match_in_any_order(gold: tuple[Shape, ...], answer: tuple[Shape, ...]) -> bool:
    """Whether each item of one finds its own in the other."""
    rest = list(answer)
    for item in gold:
        found = next((r for r in rest if _same_shape(item, r)), None)
        if found is None:
            return False
        rest.remove(found)
    return True


def _same_matrix(g: Shape, a: Shape) -> bool:
    if isinstance(g, Matrix) and isinstance(a, Matrix):
        if g.bars != a.bars or [len(r) for r in g.rows] != [len(r) for r in a.rows]:
            return False
        return all(_same_shape(x, y) for p, q in zip(g.rows, a.rows, strict=True) for x, y in zip(p, q, strict=True))
    matrix, other = (g, a) if isinstance(g, Matrix) else (a, g)
    assert isinstance(matrix, Matrix)
    cells = [c for row in matrix.rows for c in row]
    vector = not matrix.bars and (len(matrix.rows) == 1 or all(len(r) == 1 for r in matrix.rows))
    if len(cells) == 1 and vector:
        return _same_shape(cells[0], other)
    if isinstance(other, Leaf):
        return "matrix" in other.text and _by_math_verify(g, a)
    return (
        vector and isinstance(other, Many) and other.kind in ("()", "list", "[]") and len(cells) == len(other.items)
    ) and all(_same_shape(x, y) for x, y in zip(cells, other.items, strict=True))


def _same_region(g: Region, a: Region) -> bool:
    if g.variable and a.variable and g.variable != a.variable:
        return False
    if len(g.pieces) != len(a.pieces):
        return False
    rest = list(a.pieces)
    for piece in g.pieces:
        found = next((r for r in rest if r[2:] == piece[2:] and _same_ends(piece, r)), None)
        if found is None:
            return False
        rest.remove(found)
    return True


def _same_ends(p: tuple[str, str, bool, bool], q: tuple[str, str, bool, bool]) -> bool:
    return same_leaf(p[0], q[0]) and same_leaf(p[1], q[1])


# ------------------------------------------------------------------------------------------------------- relations


def _same_relation(g: Shape, a: Shape) -> bool:
    """Equations and chains of inequalities; a value with a name in front of it is that value."""
    if isinstance(g, Relation) and isinstance(a, Relation):
        return _same_chains(g, a)
    relation, other = (g, a) if isinstance(g, Relation) else (a, g)
    assert isinstance(relation, Relation)
    region = as_region(relation)
    if region is not None and (interval := as_region(other)) is not None:
        return _same_region(region, interval)
    if set(relation.signs) != {"="}:
        return False
    first, last = relation.parts[0], relation.parts[-1]
    if read_number(first) and _is_name(last):
        first, last = last, first  # 12 = n
    named = _is_name(first) or (relation is a and _SUM_OF_NAMES.fullmatch(first) is not None)
    if not named and not same_leaf(first, last):
        return False  # an equation, and a value is none; but 3 x 5 = 15 is a value
    return _same_shape(read_shape(last), other)


def _same_chains(g: Relation, a: Relation) -> bool:
    left, right = as_region(g), as_region(a)
    if left is not None and right is not None:
        return _same_region(left, right)
    if set(g.signs) == set(a.signs) == {"="}:
        return _same_equations(g, a)
    turned = Relation(a.parts[::-1], tuple(s.translate(str.maketrans("<>", "><")) for s in reversed(a.signs)))
    return any(
        g.signs == way.signs and all(same_leaf(x, y) for x, y in zip(g.parts, way.parts, strict=True))
        for way in (a, turned)
    )


def _same_equations(g: Relation, a: Relation) -> bool:
    names = [_is_name(r.parts[0]) for r in (g, a)]
    if all(names) and _same_names(g.parts[0], a.parts[0]):
        return _same_shape(read_shape(g.parts[-1]), read_shape(a.parts[-1]))
    if len(g.parts) != 2 or len(a.parts) != 2:
        return False
    sides = [[read_expression(p) for p in r.parts] for r in (g, a)]
    if any(s is None for pair in sides for s in pair):
        return False
    try:
        return bool(proportional(sides[0][0] - sides[0][1], sides[1][0] - sides[1][1]))
    except (TypeError, AttributeError):
        return False


def _same_names(g: str, a: str) -> bool:
    """Equal names; y and f(x) both name a function's value."""
    if key(g) == key(a):
        return True
    kinds = [bool(re.fullmatch(r"[a-zA-Z]\s*\(\s*[a-zA-Z]\s*\)", t)) for t in (g, a)]
    return kinds[0] != kinds[1] and "y" in (g.strip(), a.strip())


def _is_name(text: str) -> bool:
    """Whether the left side of an equation only names the right: x, f(x), AB, P(A), |z|, (x, y), but not 2x + 1."""
    text = re.sub(r"\\text\{[^{}]*\}", "T", text.strip())
    if not text or re.match(r"^\d", text):
        return False
    outer = re.sub(r"\([^()]*\)|\{[^{}]*\}|\|[^|]*\|", "", re.sub(r"\\frac\s*\{[^{}]*\}\s*\{[^{}]*\}", "F", text))
    return not re.search(r"[+^]|(?<!^)-|\\(?:sin|cos|tan|log|ln|cdot|times|sqrt)\b", outer)


# ------------------------------------------------------------------------------------------------------------ leaves


def same_leaf(g: str, a: str) -> bool:
    """Two expressions: equal as text, as numbers, as ratios or by value. Raises TooLargeError."""
    if key(g) == key(a):
        return True
    numbers = read_number(g), read_number(a)
    if numbers[0] and numbers[1]:
        return same_number(numbers[0], numbers[1])
    gold, answer = without_unit(g), without_unit(a)
    if (
        (gold.unit or answer.unit)
        and (factor := comparable(gold, answer)) is not None
        and (gold.text, answer.text) != (g, a)
    ):
        return _measured(gold, answer, factor)
    if (ratio := _same_ratio(g, a)) is not None:
        return ratio
    if is_words(g) or is_words(a):
        return words(g) == words(a)
    return _same_expression(g, a, numbers)


def _same_ratio(g: str, a: str) -> bool | None:
    """`3:2` and `6:4`; a ratio of two may be written as a fraction."""
    sides = [[read_number(p) for p in t.split(":")] for t in (g, a)]
    if all(len(s) == 1 for s in sides) or any(p is None or p.value == 0 for s in sides for p in s):
        return None
    values = [[p.value for p in s if p is not None] for s in sides]
    if len(values[0]) != len(values[1]):
        pair, single = (values[0], values[1]) if len(values[1]) == 1 else (values[1], values[0])
        return len(pair) == 2 and len(single) == 1 and pair[0] / pair[1] == single[0]
    return all(p * values[1][0] == q * values[0][0] for p, q in zip(*values, strict=True))


def _same_expression(g: str, a: str, numbers: tuple[Plain | None, Plain | None]) -> bool:
    percent = [t.rstrip(" \\").endswith("%") for t in (g, a)]
    g, a = g.rstrip("% \\"), a.rstrip("% \\")
    left, right = read_expression(g), read_expression(a)
    if left is None or right is None:
        return False
    try:
        for number, expression in ((numbers[0], right), (numbers[1], left)):
            if number is not None and (verdict := equals_number(expression, _bare(number))) is not None:
                return verdict
        if same_value(left, right):
            return True
        hundredths = percent[0] != percent[1]
        return hundredths and bool(same_value(left * 100 if percent[1] else left, right * 100 if percent[0] else right))
    except (NoValueError, TypeError, ZeroDivisionError, OverflowError):
        return False


def _bare(number: Plain) -> Plain:
    return Plain(number.value, number.digits, number.places)


def understood(gold: str) -> bool:
    """Whether a label is something that can be compared other than as text: its pieces are numbers, names or parse."""
    if len(gold) > LONGEST or _depth(gold) > DEEPEST:
        return False
    text = tidy(gold)
    if _LETTER.match(text) or _BASE.match(key(text)) or _says_none(text) or is_words(text):
        return True
    return _pieces_are_read(read_shape(next(readings(text))))


def _pieces_are_read(shape: Shape) -> bool:
    if isinstance(shape, Leaf):
        text = without_unit(shape.text).text
        ratio = ":" in text and all(read_number(p) for p in text.split(":"))
        return bool(ratio or read_number(text) or is_words(text) or read_expression(text.rstrip("% \\")) is not None)
    if isinstance(shape, Relation):
        return all(read_number(p) or read_expression(p) is not None or _is_name(p) for p in shape.parts)
    if isinstance(shape, Region):
        return all(_pieces_are_read(Leaf(end)) for piece in shape.pieces for end in piece[:2])
    cells = [c for row in shape.rows for c in row] if isinstance(shape, Matrix) else list(shape.items)
    return all(_pieces_are_read(c) for c in cells)


# ------------------------------------------------------------------------------------------------ math-verify's word


def _by_math_verify(g: Shape, a: Shape) -> bool:
    """Sets and relations in forms that are not told apart here."""
    texts = written(g), written(a)
    if any(_WORD.search(_COMPUTED.sub(" ", t)) for t in texts):
        return False  # it reads a word as the product of its letters
    expressions = [read_expression(t) for t in texts]
    for e in expressions:
        if e is not None:
            _refuse_towers(e)
    parsed = [parse(f"$\\boxed{{{to_latex(t)}}}$", fallback_mode="no_fallback", parsing_timeout=0) for t in texts]
    return all(parsed) and bool(verify(parsed[0], parsed[1], timeout_seconds=0, allow_set_relation_comp=True))


def _refuse_towers(expression: Basic | MatrixBase) -> None:
    """Raise TooLargeError for powers that math-verify would compute."""
    if isinstance(expression, MatrixBase):
        for cell in expression.flat():
            _refuse_towers(cell)
        return
    for part in expression.args:
        _refuse_towers(part)
    try:
        exact(expression)
    except NoValueError:
        return

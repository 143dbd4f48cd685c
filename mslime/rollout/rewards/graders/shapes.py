"""The form of an answer: a list, a set, a tuple, an interval, a union, a matrix, a relation, or one expression.

Only the outer form is read here; the pieces stay text, and `equality` compares them.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Literal

from mslime.rollout.rewards.graders.latex import bracket_at, key, split_top

Kind = Literal["list", "set", "()", "[]", "[)", "(]", "union"]


@dataclass(frozen=True)
class Leaf:
    """One expression."""

    text: str


@dataclass(frozen=True)
class Many:
    """Several things: `kind` is how they were put together. A pair in `[)` is an interval; `()` may be one."""

    kind: Kind
    items: tuple[Shape, ...]


@dataclass(frozen=True)
class Matrix:
    """Cells by row. `bars`: written between vertical bars, so a determinant."""

    rows: tuple[tuple[Shape, ...], ...]
    bars: bool


@dataclass(frozen=True)
class Relation:
    """`parts` with `signs` between them: `1 < x \\le 2` has three and two."""

    parts: tuple[str, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Region:
    """Values of a variable, as an interval or a union of intervals.

    Attributes:
        variable: empty when none was named.
        pieces: (low, high, low is open, high is open).
    """

    variable: str
    pieces: tuple[tuple[str, str, bool, bool], ...]


Shape = Leaf | Many | Matrix | Relation | Region

_AND = r"\\text\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![a-z])"
_SEMICOLON = re.compile(r";")
_COMMA = re.compile(rf"\s*,\s*(?:{_AND})?|{_AND}")
_OR_ONLY = re.compile(r"\bor\b")
_CUP = re.compile(r"\\cup(?![a-zA-Z])|(?<=[\])}])\s*(?:U|\\bigcup)\s*(?=[\[({\\])")
_SIGNS = re.compile(
    r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|\\ne(?![a-zA-Z])|<=|>=|=<|!=|(?<!\\)<|>|:=|=|\\in(?![a-zA-Z])|\\equiv(?![a-zA-Z])"
)
_SPELT = {r"\le": "<=", r"\ge": ">=", r"\ne": "!=", "=<": "<=", r"\in": "in", ":=": "=", r"\equiv": "="}
_ENVIRONMENT = re.compile(
    r"^\\begin\s*\{([pbBvV]?(?:small)?matrix|array)\}(?:\s*\{[^{}]*\})?((?:(?!\\begin).)*)\\end\s*\{\1\}$", re.DOTALL
)
_OPEN = {"(": "(", "[": "[", r"\{": "{", "{": "bare", r"\langle": "("}
_CLOSE = {")": ")", "]": "]", r"\}": "}", "}": "bare", r"\rangle": ")"}
_BUILDER = re.compile(r"^[^|:]*?([a-zA-Z])\s*(?:\\in\s*\\mathbb\s*\{?[A-Z]\}?)?\s*(?:\||:)\s*(.*)$", re.DOTALL)
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![a-zA-Z])")
REALS = r"\mathbb{R}"
INFINITY = r"\infty"


def read_shape(text: str) -> Shape:
    """The outer form of a cleaned answer."""
    text = text.strip()
    for separator in (_SEMICOLON, _COMMA):
        parts = [p.strip() for p in split_top(text, separator)]
        if len(parts) > 1 and (parts := [p for p in parts if p]):
            return _listed(text, parts)
    if len(both := plus_minus(text)) == 2:
        return Many("list", tuple(read_shape(t) for t in both))
    relation = _relation(text)
    if relation is not None:
        return relation
    return _union(text) or _without_point(text) or _enclosed(text) or Leaf(text)


def _listed(text: str, parts: list[str]) -> Shape:
    items = [read_shape(t) for part in parts for t in plus_minus(part)]
    if len(items) == 1:
        return items[0]
    regions = [as_region(item) if isinstance(item, Relation | Region) else None for item in items]
    if _OR_ONLY.search(text) and all(regions) and len({r.variable for r in regions if r}) == 1:
        return Region(regions[0].variable if regions[0] else "", tuple(p for r in regions if r for p in r.pieces))
    return Many("list", tuple(items))


def plus_minus(text: str) -> list[str]:
    """The two readings of a text with `\\pm` or `\\mp`; the text alone without, and when it is a collection."""
    if not _PLUS_MINUS.search(text) or text.startswith((r"\{", "(", "[")):
        return [text]
    upper = _PLUS_MINUS.sub(lambda m: "+" if m[1] == "pm" else "-", text)
    lower = _PLUS_MINUS.sub(lambda m: "-" if m[1] == "pm" else "+", text)
    return [upper, lower]


def _relation(text: str) -> Shape | None:
    parts = split_top(text, _SIGNS)
    if len(parts) == 1:
        return None
    signs, at = list[str](), 0
    for part in parts[:-1]:
        at += len(part)
        found = _SIGNS.match(text, at)
        assert found is not None
        signs.append(_SPELT.get(found[0], found[0]))
        at = found.end()
    stripped = tuple(p.strip() for p in parts)
    if signs == ["in"] and stripped[0]:
        inner = read_shape(stripped[1])
        region = as_region(inner)
        return inner if region is None else Region(key(stripped[0]), region.pieces)
    return Relation(stripped, tuple(signs))


def _union(text: str) -> Shape | None:
    parts = split_top(text, _CUP)
    if len(parts) == 1:
        return None
    items = tuple(read_shape(p) for p in parts)
    regions = [as_region(i) for i in items]
    if all(regions):
        return Region("", tuple(p for r in regions if r for p in r.pieces))
    return Many("union", items)


def _without_point(text: str) -> Region | None:
    """The real line, and the real line without points."""
    if key(text) in (key(REALS), r"\mathbbR", "allrealnumbers", "allreals"):
        return Region("", (("-" + INFINITY, INFINITY, True, True),))
    m = re.fullmatch(r"\\mathbb\{?R\}?\s*(?:\\setminus|-|\\)\s*(?:\\\{|\{)(.*?)(?:\\\}|\})", text)
    return None if m is None else outside([p.strip() for p in m[1].split(",")])


def outside(points: list[str]) -> Region:
    """The real line without points, which are in order."""
    edges = ["-" + INFINITY, *points, INFINITY]
    return Region("", tuple((low, high, True, True) for low, high in itertools.pairwise(edges)))


def _enclosed(text: str) -> Shape | None:
    """What stands within one pair of brackets, or in a matrix."""
    environment = _ENVIRONMENT.match(text)
    if environment:
        rows = [r.strip() for r in re.split(r"\\\\", environment[2])]
        cells = tuple(tuple(read_shape(c) for c in re.split(r"(?<!\\)&", row)) for row in rows if row)
        return Matrix(cells, "v" in environment[1].lower()[:1])
    ends = _brackets(text)
    if ends is None:
        return None
    opening, closing, inside = ends
    if opening == "bare":
        return read_shape(inside) if inside.strip() and closing == "bare" else None
    if opening == "{":
        return _braced(inside)
    items = [p.strip() for p in split_top(inside, _SEMICOLON)]
    items = [p.strip() for p in split_top(inside, _COMMA)] if len(items) == 1 else items
    if len(items) == 1:
        plain = opening == "(" and closing == ")"
        return read_shape(inside) if plain or inside.strip().startswith(r"\begin") else None
    if opening not in "([" or closing not in ")]":
        return None
    kinds: dict[str, Kind] = {"()": "()", "[]": "[]", "[)": "[)", "(]": "(]"}
    shapes = list[Shape]()
    for item in items:
        shapes += [read_shape(item)]
    return Many(kinds[opening + closing], tuple(shapes))


def _braced(inside: str) -> Shape:
    if (builder := _BUILDER.match(inside)) is not None and _SIGNS.search(builder[2]):
        return read_shape(builder[2])
    if not inside.strip():
        return Leaf(r"\emptyset")
    shape = read_shape(inside)
    items = shape.items if isinstance(shape, Many) and shape.kind == "list" else (shape,)
    return Many("set", items)


def _brackets(text: str) -> tuple[str, str, str] | None:
    """(opening, closing, inside) when one pair of brackets holds the whole text."""
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
            return opening, closing, text[width:i]
        i += size
    return None


def as_region(shape: Shape) -> Region | None:
    """An interval, an inequality, or a union of them, as values of one variable; None for anything else."""
    if isinstance(shape, Region):
        return shape
    if isinstance(shape, Many) and shape.kind in ("[]", "[)", "(]", "()") and len(shape.items) == 2:
        low, high = shape.items
        if isinstance(low, Leaf) and isinstance(high, Leaf):
            return Region("", ((low.text, high.text, shape.kind[0] == "(", shape.kind[1] == ")"),))
    if isinstance(shape, Relation):
        return _inequality(shape)
    return None


def _inequality(relation: Relation) -> Region | None:
    parts, signs = relation.parts, relation.signs
    if signs == ("!=",) and _is_variable(parts[0]):
        return Region(key(parts[0]), outside([parts[1]]).pieces)
    if not all(s in ("<", ">", "<=", ">=") for s in signs):
        return None
    if len(parts) == 2 and _is_variable(parts[1]) and not _is_variable(parts[0]):
        return _inequality(Relation((parts[1], parts[0]), (_turned(signs[0]),)))
    if len(parts) == 2 and _is_variable(parts[0]):
        bound, is_open, name = parts[1], len(signs[0]) == 1, key(parts[0])
        if signs[0][0] == ">":
            return Region(name, ((bound, INFINITY, is_open, True),))
        return Region(name, (("-" + INFINITY, bound, True, is_open),))
    if len(parts) == 3 and _is_variable(parts[1]) and signs[0][0] == signs[1][0]:
        low, high, first, second = parts[0], parts[2], signs[0], signs[1]
        if first[0] == ">":
            low, high, first, second = high, low, second, first
        return Region(key(parts[1]), ((low, high, len(first) == 1, len(second) == 1),))
    return None


def _turned(sign: str) -> str:
    return sign.translate(str.maketrans("<>", "><"))


def _is_variable(text: str) -> bool:
    """A name such as x, n_1, \\theta or f(x)."""
    return re.fullmatch(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:\s*\(\s*[a-zA-Z]\s*\))?'?", text.strip()) is not None and (
        len(re.sub(r"\\[a-zA-Z]+|_\{?\w+\}?|\(.*\)|'", "", text.strip())) <= 2
        and text.strip() not in (r"\infty", r"\pi", "e")
    )


def written(shape: Shape) -> str:
    """A form as LaTeX again."""
    if isinstance(shape, Leaf):
        return shape.text
    if isinstance(shape, Relation):
        spelt = {"<=": r" \le ", ">=": r" \ge ", "!=": r" \ne ", "in": r" \in "}
        return shape.parts[0] + "".join(spelt.get(s, s) + p for s, p in zip(shape.signs, shape.parts[1:], strict=True))
    if isinstance(shape, Region):
        return r" \cup ".join(f"{'(' if p[2] else '['}{p[0]},{p[1]}{')' if p[3] else ']'}" for p in shape.pieces)
    if isinstance(shape, Many):
        ends = {"set": (r"\{", r"\}"), "list": ("", ""), "union": ("", "")}.get(
            shape.kind, (shape.kind[0], shape.kind[-1])
        )
        joint = r" \cup " if shape.kind == "union" else ", "
        return ends[0] + joint.join(written(i) for i in shape.items) + ends[1]
    return r"\begin{pmatrix}" + r"\\".join("&".join(written(c) for c in row) for row in shape.rows) + r"\end{pmatrix}"

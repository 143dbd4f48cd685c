"""Values of expressions: parsed by math-verify, exact if rational.

Two expressions are equal if their values agree, at several points if they have variables. That takes milliseconds,
while simplification may not end. math-verify compares objects without a value (sets, relations, matrices). Every power
and factorial is bounded before its computation, so `10^{10^{10}}` is rejected.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, cast

import mpmath
import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import parse, verify
from math_verify.grader import is_equation, is_relation, unwrap_fcs
from math_verify.parser import LatexExtractionConfig

from mslime_plugins.graders.numbers import PlainNumber, close

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

DIGITS = 50  # of a value that is not rational
MOST_DIGITS = 20_000  # of a rational number that is computed
MOST_TERMS = 2_000  # of a sum or product, and the largest power in calculus
LONGEST = 2_000  # characters of an expression
POINTS = 5
_CONFIG = LatexExtractionConfig(
    try_extract_without_anchor=False,  # else unparsable text is read as the last fraction in it
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="last", equations=False
    ),
)


class TooLargeError(Exception):
    """A number has too many digits, or a sum too many terms, to compute."""


class NoValueError(Exception):
    """An expression has no finite value here."""


# ----------------------------------------------------------------------------------------------------------- reading

_FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp|pi|theta|alpha|beta|gamma|infty|sqrt"
)
_NAMED = re.compile(rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])")
_INFINITE = re.compile(r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])")
_ROOT = re.compile(r"\\sqrt\s*(\[[^\]]*\])?\s*(\d+(?:\.\d+)?|[a-zA-Z]|\\[a-zA-Z]+)")
_BRACKETED_ROOT = re.compile(r"(?<![a-zA-Z])(?:\\?sqrt\s*(\[[^\]]*\])?)\s*\(")
_BRACKETED_POWER = re.compile(r"\^\s*\(")
_POWER = re.compile(r"\^\s*([+-]?\d+(?:\.\d+)?)")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\\circ")


def to_latex(text: str) -> str:
    """A cleaned answer as LaTeX that the parser reads: `sqrt(2)*x^10` becomes `\\sqrt{2}\\cdot x^{10}`."""
    text = text.replace("**", "^").replace("*", r" \cdot ").replace("＄", "")
    text = _braced(_braced(text, _BRACKETED_ROOT, r"\sqrt{}"), _BRACKETED_POWER, "^{}")
    text = _ROOT.sub(lambda m: f"\\sqrt{m[1] or ''}{{{m[2]}}}", text)
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{", text)
    text = re.sub(r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = _POWER.sub(r"^{\1}", text)
    text = _INFINITE.sub(r"\\infty ", _NAMED.sub(r"\\\1 ", text))
    text = re.sub(r"^\s*\+", "", text)
    return _DEGREES.sub(r"(\1 \\pi /180)", text)


def _braced(text: str, opening: re.Pattern[str], wrap: str) -> str:
    """`sqrt(...)` as `\\sqrt{...}`, however deep the parentheses are nested."""
    at = 0
    while (m := opening.search(text, at)) is not None:
        depth, end = 1, m.end()
        while end < len(text) and depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        if depth:
            return text
        option = m[1] if m.re.groups and m[1] else ""
        head = wrap[: wrap.index("{")] + option
        text = f"{text[: m.start()]}{head}{{{text[m.end() : end - 1]}}}{text[end:]}"
        at = m.start() + len(head) + 1
    return text


@lru_cache(maxsize=256)
def read_expression(text: str) -> Any:
    """The unevaluated sympy expression of a cleaned answer; None if it cannot be read."""
    if len(text) > LONGEST or r"\text" in text:
        return None
    found = parse(f"\\boxed{{{to_latex(text)}}}", [_CONFIG], fallback_mode="no_fallback", parsing_timeout=0)
    return found[0] if found else None


# ------------------------------------------------------------------------------------------------------ exact values


def exact(expression: Any) -> Fraction | None:
    """The value of an expression if it is a rational number; None if it is not, or unknown.

    Raises:
        TooLargeError: it has more than MOST_DIGITS digits.
    """
    e = expression
    if isinstance(e, sympy.Rational):
        return Fraction(int(e.p), int(e.q))
    if isinstance(e, sympy.Float):
        return Fraction(str(e))  # exactly as written
    if isinstance(e, sympy.UnevaluatedExpr):
        return exact(e.args[0])
    if isinstance(e, sympy.Add | sympy.Mul):
        values = [exact(a) for a in e.args]  # all of them: a part that is too large must be found
        if any(v is None for v in values):
            return None
        return _bounded(_sum_or_product(e, [v for v in values if v is not None]))
    if isinstance(e, sympy.Pow):
        return _exact_power(exact(e.args[0]), exact(e.args[1]))
    if isinstance(e, sympy.factorial | sympy.binomial | sympy.floor | sympy.ceiling | sympy.Abs):
        return _exact_function(e, [exact(a) for a in e.args])
    if isinstance(e, sympy.Sum | sympy.Product):
        return None
    for argument in e.args:
        if isinstance(argument, sympy.Expr):
            exact(argument)
    return None


def _sum_or_product(e: Any, values: list[Fraction]) -> Fraction:
    total = Fraction(0) if isinstance(e, sympy.Add) else Fraction(1)
    for value in values:
        total = total + value if isinstance(e, sympy.Add) else total * value
    return total


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_DIGITS * 3.33:
        raise TooLargeError(f"a number of more than {MOST_DIGITS} digits")
    return value


def _exact_power(base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
    if base is None or exponent is None:
        return None
    bits = max(abs(base.numerator).bit_length(), base.denominator.bit_length())
    if bits > 1 and bits * abs(exponent) > MOST_DIGITS * 3.33 and abs(base) != 1:
        raise TooLargeError(f"a power of more than {MOST_DIGITS} digits")
    if base == 0 and exponent < 0:
        raise NoValueError("division by zero")
    if exponent.denominator != 1:
        return _exact_root(base, exponent)
    return base ** int(exponent) if abs(base) != 1 else base ** (int(exponent) % 2)


def _exact_root(base: Fraction, exponent: Fraction) -> Fraction | None:
    n = exponent.denominator
    if base < 0 or n > 64:
        return None
    parts = [sympy.integer_nthroot(p, n) for p in (base.numerator, base.denominator)]
    return (
        Fraction(int(parts[0][0]), int(parts[1][0])) ** exponent.numerator if all(whole for _, whole in parts) else None
    )


def _exact_function(e: Any, values: list[Fraction | None]) -> Fraction | None:
    if any(v is None for v in values):
        return None
    v = [x for x in values if x is not None]
    if isinstance(e, sympy.Abs):
        return abs(v[0])
    if isinstance(e, sympy.floor | sympy.ceiling):
        return Fraction(v[0].__floor__() if isinstance(e, sympy.floor) else v[0].__ceil__())
    if any(x.denominator != 1 for x in v):
        return None
    if isinstance(e, sympy.factorial):
        if v[0] > 5000:
            raise TooLargeError("a factorial of more than 5000")
        return Fraction(int(mpmath.fac(int(v[0])))) if v[0] < 20 else Fraction(int(sympy.factorial(int(v[0]))))
    if v[0] > 10_000:
        raise TooLargeError("a binomial coefficient of more than 10000")
    return Fraction(int(sympy.binomial(int(v[0]), int(v[1]))))


# -------------------------------------------------------------------------------------------------------- comparison


def number_of(e: Any, point: Mapping[Any, Any]) -> tuple[Any, Any]:
    """(real, imaginary) part of an expression's value, with the variables of `point`; `i` is the imaginary unit.

    Raises NoValueError, TooLargeError.
    """
    named = {s: sympy.I for s in e.free_symbols if str(s) == "i"} | {
        s: point[str(s)] for s in e.free_symbols if str(s) in point
    }
    found = e.subs(named).evalf(DIGITS)
    found = found if found.is_number and found.is_Number else found.doit().evalf(DIGITS)
    parts = found.as_real_imag() if found.is_number else (found,)
    if len(parts) != 2 or not all(p.is_Number and p.is_finite for p in parts):
        raise NoValueError(type(e).__name__)
    return parts


def same_value(a: Any, b: Any) -> bool | None:
    """Whether two expressions have equal values at all points where both have one; None if unknown.

    At negative points only real values count, because the branch of a root of a negative number is a convention.

    Raises TooLargeError.
    """
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return None
    left, right = bounded(a), bounded(b)
    if left is not None and right is not None:
        return left == right
    tolerance = sympy.Float("1e-6" if a.has(sympy.Float) or b.has(sympy.Float) else "1e-25", DIGITS)
    compared = 0
    for k, point in enumerate(points(a, b)):
        try:
            values = number_of(a, point), number_of(b, point)
        except NoValueError:
            continue
        if k >= 3 and any(abs(v[1]) > tolerance * max(1, abs(v[0])) for v in values):
            continue
        compared += 1
        size = max(abs(p) for v in values for p in v)
        if any(abs(p - q) > tolerance * size for p, q in zip(*values, strict=True)):
            return False
    return True if compared else None


def real_value(e: Any) -> Fraction | None:
    """The value of an expression without variables, to DIGITS digits if it is not rational; None if it has none, or is
    complex. Raises TooLargeError."""
    if not isinstance(e, sympy.Expr) or {str(s) for s in e.free_symbols} - {"i"}:
        return None
    if (known := bounded(e)) is not None:
        return known
    try:
        real, imaginary = number_of(e, {})
    except NoValueError:
        return None
    return Fraction(str(real)) if abs(imaginary) <= sympy.Float("1e-30") * max(1, abs(real)) else None


def equals_number(e: Any, number: PlainNumber) -> bool | None:
    """Whether an expression without variables equals a plain number; None if unknown."""
    value = real_value(e)
    if value is None:
        return None
    return close(number, PlainNumber(value) if bounded(e) is not None else PlainNumber(value, DIGITS - 10, DIGITS + 10))


def proportional(a: Any, b: Any) -> bool:
    """Whether one expression is a non-zero constant times the other, so equations `a = 0` and `b = 0` are
    equivalent."""
    ratios: list[Any] = []
    for point in points(a, b):
        try:
            (left, _), (right, _) = number_of(a, point), number_of(b, point)
        except NoValueError:
            continue
        if min(abs(left), abs(right)) < sympy.Float("1e-30"):
            return False
        ratios.append(left / right)
    return len(ratios) >= 2 and all(abs(r - ratios[0]) <= sympy.Float("1e-20") * abs(r) for r in ratios)


def points(*expressions: Any) -> list[dict[str, Any]]:
    """Points of comparison: whole numbers if an operation counts, else three positive and two negative points."""
    names = sorted({str(s) for e in expressions for s in e.free_symbols} - {"i"})
    whole = any(
        e.has(sympy.Sum, sympy.Product, sympy.factorial, sympy.floor, sympy.ceiling, sympy.Mod) for e in expressions
    )
    found: list[dict[str, Any]] = []
    for k in range(POINTS if names else 1):
        sign, draw = -1 if k >= 3 else 1, {n: random.Random(f"{n}/{k}") for n in names}
        if whole:
            found.append({n: sympy.Integer(r.randint(2, 9)) for n, r in draw.items()})
        else:
            found.append({n: sympy.Rational(r.randint(300, 2600), sign * 997) for n, r in draw.items()})
    return found


def bounded(e: Any) -> Fraction | None:
    """`exact`, if nothing in the expression takes long to compute. Raises TooLargeError."""
    for part in e.atoms(sympy.Sum, sympy.Product):
        for _, low, high in part.limits:
            length = high - low
            if length.is_number and length.is_finite and length > MOST_TERMS:
                raise TooLargeError(f"a series of more than {MOST_TERMS} terms")
    if e.has(sympy.Integral, sympy.Derivative, sympy.Limit, sympy.Sum, sympy.Product):
        for power in e.atoms(sympy.Pow):
            if (exponent := exact(power.args[1])) is not None and abs(exponent) > MOST_TERMS:
                raise TooLargeError(f"calculus with a power of more than {MOST_TERMS}")
    try:
        return exact(e)
    except NoValueError:
        return None


# -------------------------------------------------------------------------------------------- sets, relations, matrices


def same_object(a: Any, b: Any) -> bool:
    """Whether two sets, inequalities or matrices are equal according to math-verify. Raises TooLargeError."""
    for e in (a, b):
        for part in e.flat() if isinstance(e, sympy.MatrixBase) else (e,):
            bounded(part)
    sets = [_region(e) for e in (a, b)]
    if any(s is None for s in sets) or (is_relation(a) and is_relation(b) and a.free_symbols != b.free_symbols):
        sets = [a, b]
    return bool(verify(sets[0], sets[1], timeout_seconds=0, allow_set_relation_comp=True))


def _region(e: Any) -> Any:
    """The values of a variable allowed by an inequality; a set unchanged, None for anything else."""
    if isinstance(e, sympy.Set):
        return e
    if not is_relation(e) or is_equation(e):
        return None
    try:
        return cast("Any", unwrap_fcs(e)).as_set()
    except (NotImplementedError, AttributeError, TypeError, ValueError):
        return None


def is_region(e: Any) -> bool:
    """Whether an expression is a set, or an inequality."""
    return _region(e) is not None


def union(expressions: list[Any]) -> Any:
    """Union of inequalities joined by `or`, if each is one."""
    sets = [_region(e) for e in expressions]
    names = {str(s) for e in expressions for s in getattr(e, "free_symbols", ())}
    return sympy.Union(*sets) if all(s is not None for s in sets) and len(names) == 1 else None

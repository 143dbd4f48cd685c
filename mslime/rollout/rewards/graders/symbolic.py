"""Values of expressions: parsed by latex2sympy, computed here, exactly where they are rational.

Nothing is simplified. Two expressions are the same when their values agree, at several points where they have
variables; that takes milliseconds, while simplifying may take for ever. Every power and factorial is bounded before it
is computed, so `10^{10^{10}}` is refused and not tried.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath
import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import parse
from math_verify.parser import LatexExtractionConfig

from mslime.rollout.rewards.graders.numbers import Plain, close

logging.getLogger("math_verify").setLevel(logging.CRITICAL)

DIGITS = 50  # of a value that is not rational
MOST_DIGITS = 20_000  # of a rational number that is computed
MOST_TERMS = 2_000  # of a sum or product
LONGEST = 2_000  # characters of an expression
POINTS = 5
_CONFIG = LatexExtractionConfig(
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="last", equations=False
    ),
)


class TooLargeError(Exception):
    """A number has more digits, or a sum more terms, than anybody wants to compute."""


class NoValueError(Exception):
    """An expression has no value here: it is undefined, or not of a kind that is computed."""


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
    """The expression that a cleaned text is, as sympy has it and not evaluated; None when it cannot be read."""
    if len(text) > LONGEST or r"\text" in text:
        return None
    found = parse(f"\\boxed{{{to_latex(text)}}}", [_CONFIG], fallback_mode="no_fallback", parsing_timeout=0)
    return found[0] if found else None


# ------------------------------------------------------------------------------------------------------ exact values


def exact(expression: Any) -> Fraction | None:
    """The value of an expression when it is a rational number; None when it is not, or cannot be told.

    Raises:
        TooLargeError: it has more than MOST_DIGITS digits.
    """
    e = expression
    if isinstance(e, sympy.Rational):
        return Fraction(int(e.p), int(e.q))
    if isinstance(e, sympy.Float):
        return Fraction(str(e))  # as it was written
    if isinstance(e, sympy.UnevaluatedExpr):
        return exact(e.args[0])
    if isinstance(e, sympy.Add | sympy.Mul):
        values = [exact(a) for a in e.args]  # all: a part that is too large must be found
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


# -------------------------------------------------------------------------------------------------- numerical values


def _log(x: Any, base: Any = None) -> Any:
    if x == 0:
        raise NoValueError("log 0")
    return mpmath.log(x) if base is None else mpmath.log(x) / mpmath.log(base)


def _factorial(n: Any) -> Any:
    if abs(n) > 10**6:
        raise TooLargeError("a factorial of more than a million")
    return mpmath.fac(n)


_CALLS: dict[str, Callable[..., Any]] = {
    **{name: getattr(mpmath, name) for name in (
        "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "asec", "acsc", "sinh", "cosh",
        "tanh", "coth", "asinh", "acosh", "atanh", "exp", "sign", "floor", "gamma", "re", "im", "conj", "binomial")},
    "Abs": abs, "ceiling": mpmath.ceil, "conjugate": mpmath.conj, "arg": mpmath.arg, "log": _log,
    "factorial": _factorial, "Max": lambda *a: max(a), "Min": lambda *a: min(a), "Mod": mpmath.fmod,
    "root": mpmath.root,
}  # fmt: skip
_CONSTANTS: dict[Any, Any] = {
    sympy.pi: mpmath.pi, sympy.E: mpmath.e, sympy.GoldenRatio: mpmath.phi, sympy.EulerGamma: mpmath.euler,
    sympy.oo: mpmath.inf, sympy.S.NegativeInfinity: -mpmath.inf,
}  # fmt: skip


def value(e: Any, point: Mapping[str, Any]) -> Any:
    """The value of an expression as mpmath has it, with the variables of `point`; `i` is the imaginary unit.

    Raises NoValueError, TooLargeError.
    """
    if e in _CONSTANTS:
        return +_CONSTANTS[e] if e not in (sympy.oo, sympy.S.NegativeInfinity) else _CONSTANTS[e]
    if isinstance(e, sympy.Number):
        rational = exact(e)
        if rational is None:
            raise NoValueError(str(e))
        return mpmath.mpf(rational.numerator) / rational.denominator
    if isinstance(e, sympy.Symbol):
        return mpmath.mpc(0, 1) if e.name == "i" else point[e.name]
    if e is sympy.I:
        return mpmath.mpc(0, 1)
    if isinstance(e, sympy.UnevaluatedExpr):
        return value(e.args[0], point)
    if isinstance(e, sympy.Sum | sympy.Product):
        return _series(e, point)
    if isinstance(e, sympy.Integral | sympy.Derivative | sympy.Limit):
        _refuse_large_exponents(e)
        return value(e.doit(), point)
    arguments = [value(a, point) for a in e.args]
    if isinstance(e, sympy.Add):
        return mpmath.fsum(arguments)
    if isinstance(e, sympy.Mul):
        return mpmath.fprod(arguments)
    if isinstance(e, sympy.Pow):
        return _power(*arguments)
    call = _CALLS.get(type(e).__name__)
    if call is None:
        raise NoValueError(f"{type(e).__name__} is not computed")
    try:
        return call(*arguments)
    except (ValueError, ZeroDivisionError, TypeError) as error:
        raise NoValueError(str(error)) from error


def _power(base: Any, exponent: Any) -> Any:
    if base == 0 and mpmath.re(exponent) <= 0 and exponent != 0:
        raise NoValueError("division by zero")
    if base != 0 and not (mpmath.isinf(base) or mpmath.isinf(exponent)):
        digits = abs(exponent) * abs(mpmath.log10(abs(base)))
        if digits > 10**9:
            raise TooLargeError("a power of more than a billion digits")
    return mpmath.power(base, exponent)


def _refuse_large_exponents(e: Any) -> None:
    """Raise TooLargeError for powers that make calculus endless."""
    for power in e.atoms(sympy.Pow):
        exponent = exact(power.args[1])
        if exponent is not None and abs(exponent) > MOST_TERMS:
            raise TooLargeError(f"calculus with a power of more than {MOST_TERMS}")


def _series(e: Any, point: Mapping[str, Any]) -> Any:
    """A sum or product over one index with bounds that are numbers here."""
    (index, low, high), *others = e.limits
    first, last = value(low, point), value(high, point)
    if others or not mpmath.isfinite(first) or not mpmath.isfinite(last):
        result = e.doit()
        if result.has(sympy.Sum, sympy.Product):
            raise NoValueError("a series that is not computed")
        return value(result, point)
    if last - first > MOST_TERMS:
        raise TooLargeError(f"a series of more than {MOST_TERMS} terms")
    terms = [value(e.function, {**point, index.name: mpmath.mpf(k)}) for k in range(int(first), int(last) + 1)]
    return mpmath.fsum(terms) if isinstance(e, sympy.Sum) else mpmath.fprod(terms)


# -------------------------------------------------------------------------------------------------------- comparison


def points(*expressions: Any) -> list[dict[str, Any]]:
    """Where to compare: at whole numbers where something counts, else at three positive and two negative points."""
    names = sorted({str(s) for e in expressions for s in e.free_symbols})
    whole = any(
        e.has(sympy.Sum, sympy.Product, sympy.factorial, sympy.floor, sympy.ceiling, sympy.Mod) for e in expressions
    )
    found: list[dict[str, Any]] = []
    for k in range(POINTS if names else 1):
        draw = {n: random.Random(f"{n}/{k}") for n in names}
        if whole:
            found.append({n: mpmath.mpf(r.randint(2, 9)) for n, r in draw.items()})
        else:
            sign = -1 if k >= 3 else 1
            found.append({n: sign * mpmath.mpf(r.uniform(0.3, 2.6)) for n, r in draw.items()})
    return found


def same_value(a: Any, b: Any, tolerance: str = "1e-25") -> bool | None:
    """Whether two expressions have equal values wherever both have one; None when that cannot be told.

    At negative points only real values count: which branch a root of a negative number takes is not an answer's fault.

    Raises TooLargeError.
    """
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return None
    if not (a.free_symbols or b.free_symbols):
        left, right = exact(a), exact(b)
        if left is not None and right is not None:
            return left == right
    if a.has(sympy.Float) or b.has(sympy.Float):
        tolerance = "1e-6"
    compared = 0
    with mpmath.workdps(DIGITS):
        for k, point in enumerate(points(a, b)):
            try:
                left, right = value(a, point), value(b, point)
            except NoValueError:
                continue
            if k >= 3 and (_is_complex(left) or _is_complex(right)):
                continue
            if mpmath.isnan(left) or mpmath.isnan(right):
                continue
            compared += 1
            if not _near(left, right, mpmath.mpf(tolerance)):
                return False
    return True if compared else None


def equals_number(e: Any, number: Plain) -> bool | None:
    """Whether an expression without variables has the value that a plain number says; None when that cannot be told."""
    if not isinstance(e, sympy.Expr) or {str(s) for s in e.free_symbols} - {"i"}:
        return None
    known = exact(e)
    if known is not None:
        return close(Plain(known), number)
    with mpmath.workdps(DIGITS):
        try:
            found = value(e, {})
        except NoValueError:
            return None
        if _is_complex(found) or not mpmath.isfinite(found):
            return False
        real = mpmath.re(found)
        rounded = Plain(Fraction(*map(int, sympy.Rational(str(mpmath.nstr(real, 40))).as_numer_denom())), 40, 60)
    return close(number, rounded)


def proportional(a: Any, b: Any) -> bool | None:
    """Whether one expression is a constant other than 0 times the other: equations `a = 0` and `b = 0` say the same."""
    ratios: list[Any] = []
    with mpmath.workdps(DIGITS):
        for point in points(a, b):
            try:
                left, right = value(a, point), value(b, point)
            except NoValueError:
                continue
            if abs(left) < 1e-30 or abs(right) < 1e-30:
                return abs(left) < 1e-30 and abs(right) < 1e-30
            ratios.append(left / right)
        if len(ratios) < 2:
            return None
        return all(_near(r, ratios[0], mpmath.mpf("1e-20")) for r in ratios)


def _is_complex(x: Any) -> bool:
    return abs(mpmath.im(x)) > mpmath.mpf("1e-30") * max(1, abs(mpmath.re(x)))


def _near(a: Any, b: Any, tolerance: Any) -> bool:
    if mpmath.isinf(a) or mpmath.isinf(b):
        return a == b
    size = max(abs(a), abs(b))
    return abs(a - b) <= tolerance * size or size < mpmath.mpf("1e-40")

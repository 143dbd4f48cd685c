"""Plain numbers and units in answers: exact values, given digits, and measured quantities."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_LONGEST = 1000  # most digits of a parsed number
_LARGEST_POWER = 400
_DECIMAL = r"\d+(?:\.\d*)?|\.\d+"
_SIGN = r"([+-]?)\s*"
_PLAIN = re.compile(rf"{_SIGN}({_DECIMAL})(?:[eE]([+-]?\d+))?")
_SCIENTIFIC = re.compile(
    rf"{_SIGN}(?:({_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*)?10\s*(?:\^|\*\*)\s*[{{(]?\s*([+-]?\d+)\s*[}})]?"
)
_FRACTION = re.compile(
    rf"{_SIGN}\\frac\s*(?:\{{\s*([+-]?(?:{_DECIMAL}))\s*\}}|(\d))\s*(?:\{{\s*([+-]?(?:{_DECIMAL}))\s*\}}|(\d+))"
)
_SLASHED = re.compile(rf"{_SIGN}\(?({_DECIMAL})\)?\s*/\s*\(?([+-]?(?:{_DECIMAL}))\)?")
_MIXED = re.compile(
    r"([+-]?)\s*(\d+)\s*(?:\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))|(?<=\d)\s(\d+)\s*/\s*(\d+))"
)
_REPEATING = re.compile(r"([+-]?)\s*(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d+)\s*\}?")


@dataclass(frozen=True)
class PlainNumber:
    """A number.

    Attributes:
        value: exact, before percent.
        digits: significant digits of a decimal; None for an integer or a fraction, which are exact.
        places: digits after the point of a decimal.
        percent: whether a percent sign follows.
    """

    value: Fraction
    digits: int | None = None
    places: int = 0
    percent: bool = False


@lru_cache(maxsize=4096)
def read_number(text: str) -> PlainNumber | None:
    """The number that a cleaned text is, or None."""
    text = text.strip()
    percent = text.endswith("%")
    if percent:
        text = text[:-1].rstrip(" \\")
    if not text or len(text) > _LONGEST:
        return None
    try:
        found = _decimal(text) or _fraction(text)
    except ZeroDivisionError:
        return None
    return None if found is None else PlainNumber(found.value, found.digits, found.places, percent)


def _decimal(text: str) -> PlainNumber | None:
    if (m := _PLAIN.fullmatch(text)) is not None:
        return _scaled(m[1], m[2], m[3])
    if (m := _SCIENTIFIC.fullmatch(text)) is not None:
        return _scaled(m[1], m[2] or "1", m[3])
    if (m := _REPEATING.fullmatch(text)) is not None:
        head, fixed, cycle = m[2] or "0", m[3], m[4]
        whole = Fraction(int(head + fixed or "0"), 10 ** len(fixed))
        tail = Fraction(int(cycle), 10 ** len(fixed) * (10 ** len(cycle) - 1))
        return PlainNumber(-(whole + tail) if m[1] == "-" else whole + tail)
    return None


def _scaled(sign: str, digits: str, power: str | None) -> PlainNumber | None:
    exponent = int(power or 0)
    if abs(exponent) > _LARGEST_POWER:
        return None
    value = Fraction(digits + "0" if digits.endswith(".") else digits) * Fraction(10) ** exponent
    value = -value if sign == "-" else value
    if "." not in digits and exponent >= 0:
        return PlainNumber(value)
    significant = len(digits.replace(".", "").lstrip("0"))
    return PlainNumber(value, significant, len(digits.partition(".")[2]) - exponent)


def _fraction(text: str) -> PlainNumber | None:
    if (m := _MIXED.fullmatch(text)) is not None:
        above, below = next(pair for pair in ((m[3] or m[4], m[5] or m[6]), (m[7], m[8])) if pair[0])
        value = int(m[2]) + Fraction(int(above), int(below))
        return PlainNumber(-value if m[1] == "-" else value)
    if (m := _FRACTION.fullmatch(text)) is not None:
        value = Fraction(m[2] or m[3]) / Fraction(m[4] or m[5])
    elif (m := _SLASHED.fullmatch(text)) is not None:
        value = Fraction(m[2]) / Fraction(m[3])
    else:
        return None
    return PlainNumber(-value if m[1] == "-" else value)


def same_number(a: PlainNumber, b: PlainNumber) -> bool:
    """Whether two numbers agree; with a percent sign on one side only, the value or its hundredth counts."""
    if a.percent == b.percent:
        return close(a, b)
    percent, other = (a, b) if a.percent else (b, a)
    hundredth = PlainNumber(percent.value / 100, percent.digits, percent.places + 2)
    return close(PlainNumber(percent.value, percent.digits, percent.places), other) or close(hundredth, other)


def close(a: PlainNumber, b: PlainNumber) -> bool:
    """Exact equality; rounding is allowed for values without an exact decimal.

    A decimal of six digits or more equals a value if it is its rounding or its beginning. 0.333333 is 1/3 and 1.41421
    is the root of 2, but 0.33 and 1.4 are not, and 2.5 is not 2.500001.
    """
    if a.value == b.value:
        return True
    if a.digits is None and b.digits is None:
        return False
    gap, size = abs(a.value - b.value), max(abs(a.value), abs(b.value))
    if gap <= size / 10**9 or (gap < Fraction(5, 10**7) and gap <= size / 10**6):
        return True
    coarse, fine = (a, b) if b.digits is None or (a.digits is not None and a.places < b.places) else (b, a)
    if coarse.digits is None or coarse.digits < 6 or (fine.digits is not None and fine.places <= coarse.places):
        return False
    if fine.digits is None and not _endless(fine.value):
        return False
    return gap < Fraction(10) ** -coarse.places


def _endless(value: Fraction) -> bool:
    """Whether the decimals of a fraction never end."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1


# ------------------------------------------------------------------------------------------------------------- units

_LENGTHS = {
    "nm": "1e-9", "mm": "0.001", "millimeter": "0.001", "millimetre": "0.001", "cm": "0.01", "centimeter": "0.01",
    "centimetre": "0.01", "dm": "0.1", "decimeter": "0.1", "m": "1", "meter": "1", "metre": "1", "mtr": "1",
    "km": "1000",
    "kilometer": "1000", "kilometre": "1000", "in": "0.0254", "inch": "0.0254", "inche": "0.0254", "ft": "0.3048",
    "feet": "0.3048", "foot": "0.3048", "yd": "0.9144", "yard": "0.9144", "mi": "1609.344", "mile": "1609.344",
}  # fmt: skip
_MASSES = {"mg": "1e-6", "g": "0.001", "gm": "0.001", "gram": "0.001", "kg": "1", "kilogram": "1", "lb": "0.45359237",
           "oz": "0.028349523125", "ounce": "0.028349523125"}  # fmt: skip
_TIMES = {"ms": "0.001", "s": "1", "sec": "1", "second": "1", "min": "60", "minute": "60", "h": "3600", "hr": "3600",
          "hour": "3600", "day": "86400", "week": "604800"}  # fmt: skip
_VOLUMES = {"ml": "0.001", "milliliter": "0.001", "millilitre": "0.001", "l": "1", "liter": "1", "litre": "1"}
_MONEY = {"＄": "1", "dollar": "1", "usd": "1", "buck": "1", "cent": "0.01", "¢": "0.01"}
_OTHER_MONEY = {"€": "€", "euro": "€", "eur": "€", "£": "£", "gbp": "£", "¥": "¥", "yen": "¥", "yuan": "¥", "rmb": "¥",
                "₹": "₹", "rupee": "₹", "rs": "₹", "inr": "₹"}  # fmt: skip
_SINGLE = {"degree": "°", "deg": "°", "^\\circ": "°", "radian": "rad", "rad": "rad", "^\\circ c": "°C",
           "^\\circ f": "°F",
           "n": "N", "j": "J", "w": "W", "v": "V", "hz": "Hz", "pa": "Pa", "kwh": "kWh", "mph": "mph", "kmph": "km/h",
           "kph": "km/h", "mol": "mol", "ohm": "Ω", "acre": "acre", "hectare": "ha", "gal": "gal", "gallon": "gal",
           "sq": "?", "pt": "?", "pct": "%"}  # fmt: skip

UNITS: dict[str, tuple[str, Fraction]] = {
    **{name: ("length", Fraction(size)) for name, size in _LENGTHS.items()},
    **{name: ("mass", Fraction(size)) for name, size in _MASSES.items()},
    **{name: ("time", Fraction(size)) for name, size in _TIMES.items()},
    **{name: ("volume", Fraction(size)) for name, size in _VOLUMES.items()},
    **{name: ("dollars", Fraction(size)) for name, size in _MONEY.items()},
    **{name: (what, Fraction(1)) for name, what in {**_OTHER_MONEY, **_SINGLE}.items()},
}
"""Lower-case singular name -> (quantity, size)."""

_MATH_WORDS = frozenset(
    {"sqrt", "theta", "alpha", "beta", "gamma", "infinity", "infty", "choose", "where", "with", "than"}
)
_PREFIX = re.compile(r"^([+-]?)\s*(?:(＄|€|£|¥|₹)|(?:(Rs|USD|EUR|GBP|INR|RMB|US)\b\.?\s*＄?))\s*([+-]?)(?=[\s\d.\\(])")
_SUFFIX_SIGN = re.compile(r"\s*(＄|€|£|¥|₹|¢)$")
_SUFFIX_DEGREE = re.compile(r"\s*(\^\\circ(?:\s*[CF])?)$")
_POWER = r"(?:\s*\^\s*\{?\s*([23])\s*\}?)?"
_ANGLE = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")  # sin 30 degrees is not an angle
_SUFFIX_TEXT = re.compile(rf"[\s\\]*\\text\{{\s*([^{{}}]*?)\s*\}}{_POWER}\s*$")
_NAME = r"\{\s*(?:\\text\{[^{}]*\}|m|g|s|h|L|l|N|J)\s*(?:\^\s*\{?\s*\d\s*\}?)?\s*\}"
_SUFFIX_FRACTION = re.compile(rf"\s*\\frac\s*{_NAME}\s*{_NAME}$")  # 60 \\frac{{\\text{{km}}}}{{h}}
_SUFFIX_WORDS = re.compile(rf"(?<=[\d)\]}}%])(\s*)((?:[A-Za-zΩ]+)(?:[ /.-]+[A-Za-z]+)*)\.?{_POWER}$")


@dataclass(frozen=True)
class Quantity:
    """A text without its unit.

    Attributes:
        unit: name of the unit, or `?` for unknown words; empty without a unit.
        power: of the unit.
    """

    text: str
    unit: str = ""
    power: int = 1


def without_unit(text: str) -> Quantity:
    """Remove a unit before or behind the text."""
    if (m := _PREFIX.match(text)) is not None:
        sign = "-" if "-" in (m[1], m[4]) else ""
        return Quantity(sign + text[m.end() :].strip(), _named(m[2] or m[3]))
    for pattern in (_SUFFIX_SIGN, _SUFFIX_DEGREE):
        if (m := pattern.search(text)) is not None and m.start() and not _ANGLE.search(text):
            return Quantity(text[: m.start()].strip(), _named(re.sub(r"\\circ\s*([CF])", r"\\circ \1", m[1])))
    if (m := _SUFFIX_TEXT.search(text)) is not None and m.start() and not re.search(r"(?i)\b(?:and|or|not)\b|\d", m[1]):
        inner = without_unit(text[: m.start()].strip())  # 5 \text{ miles} \text{ per hour}
        return Quantity(inner.text, "?" if inner.unit else _named(m[1]), int(m[2] or 1))
    if (m := _SUFFIX_FRACTION.search(text)) is not None and m.start():
        return Quantity(text[: m.start()].strip(), "?")
    if (m := _SUFFIX_WORDS.search(text)) is not None and _is_measure(m[2], spaced=bool(m[1])):
        rest = text[: m.start()].strip()
        if not re.search(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])", re.sub(r"\\[a-zA-Z]+", "", rest)):
            return Quantity(rest, _named(m[2]), int(m[3] or 1))
    return Quantity(text)


def _named(word: str) -> str:
    """The unit's name in UNITS, `?` for anything else."""
    name = word.lower().strip(" .")
    for form in (name, name.removesuffix("s"), name.removesuffix("es")):
        if form in UNITS:
            return form
    return "?"


def _is_measure(word: str, spaced: bool) -> bool:
    """Whether letters behind a number are a unit or a noun, rather than variables."""
    if word.lower() in _MATH_WORDS:
        return False
    if len(word) == 1:
        return word in "mgshLlNJWV"
    return _named(word) != "?" or "/" in word or (spaced and all(len(w) >= 3 for w in word.split()) and len(word) >= 4)


def comparable(a: Quantity, b: Quantity) -> Fraction | None:
    """Factor from a's unit to b's; None if they measure different quantities.

    A missing or unknown unit is compatible with every other.
    """
    known_a, known_b = UNITS.get(a.unit), UNITS.get(b.unit)
    if known_a is None or known_b is None or a.unit == b.unit or "?" in (known_a[0], known_b[0]):
        return Fraction(1)
    if known_a[0] != known_b[0] or a.power != b.power:
        return None
    return (known_a[1] / known_b[1]) ** a.power

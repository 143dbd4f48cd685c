"""Normalise the spelling of answers: LaTeX and Unicode, thousands, currencies, units.

Text in, text out; no evaluation and no library, so labels can be checked anywhere.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

OPENING, CLOSING = "([{", ")]}"

_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "⁻": "^{-}", "×": r"\times ", "⋅": r"\cdot ",
    "·": r"\cdot ",
    "∙": r"\cdot ", "•": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ",
    "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∞": r"\infty ", "∪": r"\cup ",
    "∩": r"\cap ", "∅": r"\emptyset ", "⌀": r"\emptyset ", "∈": r"\in ", "∖": r"\setminus ", "→": r"\to ",
    "°": r"^\circ ", "º": r"^\circ ", "℃": r"^\circ C", "℉": r"^\circ F", "∠": r"\angle ", "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "⟨": r"\langle ", "⟩": r"\rangle ",
    "π": r"\pi ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "θ": r"\theta ",
    "λ": r"\lambda ", "μ": r"\mu ", "ρ": r"\rho ", "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ", "ϕ": r"\phi ",
    "ω": r"\omega ", "Ω": r"\Omega ", "Δ": r"\Delta ", "Σ": r"\Sigma ", "…": r"\ldots ", "′": "'", "’": "'", "‘": "'",
    "“": '"', "”": '"', "％": "%", "，": ",", "；": ";", "。": ".", "√": r"\sqrt ", "∛": r"\sqrt[3] ",
    "∜": r"\sqrt[4] ",
    "∶": ":", "∣": "|", "₹": "₹", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}",
    "⅞": r"\frac{7}{8}", "⅙": r"\frac{1}{6}", "⅚": r"\frac{5}{6}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}",
    "⅘": r"\frac{4}{5}",
}  # fmt: skip
_RAISED, _LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹", "₀₁₂₃₄₅₆₇₈₉"
_THIN_SPACES = "\u00a0\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u2061\u2062\u2063"))

_SPOILT = (("\x08oxed", r"\boxed"), ("\x08egin", r"\begin"), ("\x0crac", r"\frac"), ("\x0cbox", r"\fbox"))
"""\\boxed, \\begin, \\frac and \\fbox, corrupted by string escapes."""
_SPOILT_TAB = re.compile(r"\t(?=(?:ext|frac|imes|heta|an|extbf|au)\b)")

_THOUSANDS = re.compile(
    rf"(?<![\d.])(\d{{1,3}})((?:(?:,\\!\s*|\{{,\}}\s*|\\[,;:!]\s*|\\ |~|[{_THIN_SPACES}'])\d{{3}})+)(?![\d])"
)
_SPACED_THOUSANDS = re.compile(r"^([+-]?\d{1,3})((?: \d{3})+)((?:\.\d+)?)$")
_ROW_SPACING = re.compile(r"\\\\\s*\[[^\]]*(?:pt|em|ex|mm|cm)\]")
_SIZES = re.compile(
    r"\\(?:left|right|mleft|mright|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|tiny|small|large|Large|LARGE|huge|Huge|limits|nolimits|hfill"
    r"|phantom\{[^{}]*\}|hspace\*?\{[^{}]*\}|vspace\*?\{[^{}]*\}|label\{[^{}]*\}|tag\*?\{[^{}]*\})(?![a-zA-Z])"
)
_BLANKS = re.compile(r"\\(?:qquad|quad|enspace|thinspace|,|;|:|!|>| |~)|~")
_NAMES = {
    r"\\[dtc]frac(?![a-zA-Z])": r"\\frac", r"\\leq?slant|\\leqq?(?![a-zA-Z])": r"\\le ",
    r"\\geq?slant|\\geqq?(?![a-zA-Z])": r"\\ge ", r"\\neq(?![a-zA-Z])": r"\\ne ", r"\\lt(?![a-zA-Z])": "<",
    r"\\gt(?![a-zA-Z])": ">", r"\\varnothing(?![a-zA-Z])": r"\\emptyset ", r"\\(?:lbrace|lbrack\{)(?![a-zA-Z])": r"\\{",
    r"\\rbrace(?![a-zA-Z])": r"\\}", r"\\lbrack(?![a-zA-Z])": "[", r"\\rbrack(?![a-zA-Z])": "]",
    r"\\[lr]vert(?![a-zA-Z])|\\vert(?![a-zA-Z])|\\mid(?![a-zA-Z])": "|", r"\\colon(?![a-zA-Z])": ":",
    r"\\ast(?![a-zA-Z])": r"\\cdot ", r"\\dots[bcimo]?(?![a-zA-Z])|\\cdots(?![a-zA-Z])": r"\\ldots ",
    r"\\degrees?(?![a-zA-Z])": r"^\\circ ", r"\^\s*\{\s*\\circ\s*\}": r"^\\circ ", r"\\slash(?![a-zA-Z])": "/",
    r"\\div(?![a-zA-Z])": "/", r"\\(?:simeq|thickapprox|doteq|fallingdotseq)(?![a-zA-Z])": r"\\approx ",
    r"\\(?:land|wedge)(?![a-zA-Z])": r"\\text{ and }", r"\\(?:lor|vee)(?![a-zA-Z])": r"\\text{ or }",
    r"\\Reals(?![a-zA-Z])": r"\\mathbb{R}", r"\\R(?![a-zA-Z])": r"\\mathbb{R}",
    r"\\backslash(?![a-zA-Z])": r"\\setminus ",
    r"\\(?:pounds|textsterling)(?![a-zA-Z])": "£", r"\\(?:euro|texteuro)(?![a-zA-Z])": "€",
    r"\\textdollar(?![a-zA-Z])": r"\\$",
    r"\\(?:cents?|textcent)(?![a-zA-Z])": "¢", r"\\times(?![a-zA-Z])": r"\\times ", r"\\mathrm\{~": r"\\mathrm{",
    r"\\mathbb\s+([RNZQC])(?![a-zA-Z])": r"\\mathbb{\1}", r"\\(?:operatorname|mathop)\*?": r"\\mathrm",
}  # fmt: skip
_RENAMES = tuple((re.compile(pattern), name) for pattern, name in _NAMES.items())
_FONTS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up|sc)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|emph|bm|boldsymbol|pmb|underline|textcolor\{[a-z]+\}"
    r"|color\{[a-z]+\})\s*\{"
)
_BARE_FONTS = re.compile(r"\\(?:rm|bf|it|sf|tt|color\{[a-z]+\})(?![a-zA-Z])\s*")
_BOXES = re.compile(r"\\(?:boxed|fbox|framebox|bbox)\s*\{")
_FUNCTIONS = re.compile(
    r"^(?:sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|arccot|sinh|cosh|tanh|log|ln|lg|exp|min|max|gcd|lcm|det|arg|deg"
    r"|dim|ker|rank|tr|mod)$"
)
_ESCAPED_COMMAND = re.compile(r"\\\\(?=[a-zA-Z])")


def matching(text: str, start: int) -> int:
    """Index of the brace that closes the `{` at `start`, escaped braces aside; -1 if there is none."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
        i += 1
    return -1


def unwrap(text: str, command: re.Pattern[str], wrap: str = "{}") -> str:
    """`text` with each `\\command{content}` replaced by `wrap.format(content)`; an unclosed one stays."""
    parts, at = list[str](), 0
    while (found := command.search(text, at)) is not None:
        end = matching(text, found.end() - 1)
        if end < 0:
            break
        content = text[found.end() : end]
        parts += [text[at : found.start()], wrap.format(content) if wrap != "{}" else content]
        at = end + 1
    return "".join([*parts, text[at:]])


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """Normalise an answer: no delimiters, sizes, fonts or thousands separators; text stays in `\\text{...}`."""
    for spoilt, intended in _SPOILT:
        text = text.replace(spoilt, intended)
    text = _SPOILT_TAB.sub(r"\\t", text).translate(_INVISIBLE)
    text = _symbols(text)
    if not re.search(r"matrix|cases|array|aligned", text):
        text = _ESCAPED_COMMAND.sub(r"\\", text)
    text = _ROW_SPACING.sub(r"\\\\ ", text)
    text = _THOUSANDS.sub(lambda m: m[1] + re.sub(r"\D", "", m[2]), text)
    text = re.sub(r"(?<=\d)\s*\{,\}\s*(?=\d)", ",", text)
    text = _SIZES.sub("", text)
    for pattern, name in _RENAMES:
        text = pattern.sub(name, text)
    text = _currencies(text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)  # the delimiters \( \) \[ \]
    text = _BLANKS.sub(" ", text.replace(r"\\", "\x00")).replace("\x00", r"\\")
    text = re.sub(f"[{_THIN_SPACES}\\s]+", " ", text)
    for _ in range(3):  # nested fonts
        text = unwrap(unwrap(text, _BOXES), _FONTS, r"\text{{{}}}") if "\\" in text else text
    text = re.sub(r"\\text\{((?:[^{}]|\{[^{}]*\})*)\}", lambda m: _plain_text(m[1]), _BARE_FONTS.sub("", text))
    text = text.replace(r"\%", "%").replace(r"\#", "").replace(r"\&", r"\&").strip()
    return _tidy(text)


def _symbols(text: str) -> str:
    """Unicode mathematics as LaTeX; full-width characters as ASCII."""
    if text.isascii():
        return text
    for digits, mark in ((_RAISED, "^"), (_LOWERED, "_")):
        text = re.sub(f"⁻?[{digits}]+", lambda m, d=digits, s=mark: f"{s}{{{_shifted(m[0], d)}}}", text)
    text = re.sub(r"(?<=\d)\s*(?=[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])", " ", text)
    text = "".join(_SYMBOLS.get(c, c) for c in text)
    kept = re.compile(f"[{_THIN_SPACES}€£¥₹¢]")
    return "".join(c if kept.match(c) else unicodedata.normalize("NFKC", c) for c in text)


def _shifted(text: str, digits: str) -> str:
    return "".join("-" if c == "⁻" else str(digits.index(c)) for c in text)


def _currencies(text: str) -> str:
    """Resolve dollar signs: a currency if escaped or unpaired, else delimiters of mathematics."""
    text = text.replace(r"\$", "\x01")
    if text.count("$") % 2 == 1:
        text = re.sub(r"\$(?=\s*[\d.])|(?<=\d)\s*\$", "\x01", text, count=1)
    return text.replace("$", " ").replace("\x01", "＄")


def _plain_text(content: str) -> str:
    """Read `\\text{...}` as a name of one letter or of a function, a number, or words."""
    content = content.replace("\\", "\\")
    bare = content.strip()
    if not bare:
        return " "
    if _FUNCTIONS.match(bare):
        return f"\\{bare} "
    if not re.search(r"[^\W\d_]{2}", bare):  # no two adjacent letters: a letter, a number, punctuation
        return f" {bare} " if len(bare) > 1 else bare
    return f"\\text{{{content}}}"


_DECIMAL_HEAD = re.compile(r"(?<![\d.\w}])\.(?=\d)")


def _tidy(text: str) -> str:
    """Remove decoration of an answer: markdown, quotes, a final full stop, empty braces."""
    text = re.sub(r"^\s*(?:\*\*|__|`|\")|(?:\*\*|__|`|\")\s*$", "", text)
    text = re.sub(r"^(?:\*\*|`)|(?:\*\*|`)$", "", text.strip()).strip()
    text = re.sub(r"(?<![\\.])[.,;:]+$", "", text).strip()
    text = re.sub(r"(?<!\\)\\$", "", text).strip()  # a stray backslash
    text = _DECIMAL_HEAD.sub("0.", text)
    text = _SPACED_THOUSANDS.sub(lambda m: m[1] + m[2].replace(" ", "") + m[3], text)
    return re.sub(r"\s+", " ", text)


def balanced(text: str) -> bool:
    """Whether every unescaped brace has its partner."""
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def split_top(text: str, pattern: re.Pattern[str]) -> list[str]:
    """`text` cut at matches of `pattern` that lie outside of all brackets.

    Half-open intervals make (1, 2] a pair, so any closing bracket closes the innermost open one.
    """
    parts, depth, start, i = list[str](), 0, 0, 0
    while i < len(text):
        if depth == 0 and (found := pattern.match(text, i)) and found.end() > i:
            parts.append(text[start:i])
            start = i = found.end()
            continue
        width, step = bracket_at(text, i)
        depth = max(0, depth + step)
        i += width
    return [*parts, text[start:]]


def bracket_at(text: str, i: int) -> tuple[int, int]:
    """(characters to advance by, +1 for an opening bracket, -1 for a closing one) at position `i`."""
    if text[i] == "\\":
        command = re.compile(r"\\(?:[a-zA-Z]+|.)", re.DOTALL).match(text, i)
        width = 1 if command is None else command.end() - i
        word = text[i : i + width]
        opens = word in (r"\{", r"\langle", r"\lfloor", r"\lceil", r"\begin")
        closes = word in (r"\}", r"\rangle", r"\rfloor", r"\rceil", r"\end")
        return width, opens - closes
    return 1, (text[i] in OPENING) - (text[i] in CLOSING)


def key(text: str) -> str:
    """Comparison key of a cleaned answer: without blanks and redundant braces."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\{([^{}\\])\}", r"\1", text)
    text = text.replace("＄", "")
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_", text)  # 2 1/2 is not 21/2
    return re.sub(r"[\s]|\\cdot|\\times|\*", "", text)


def words(text: str) -> str:
    """Letters and digits of an answer in lower case, to compare names and sentences."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[a-zA-Z]+", " ", text)
    return " ".join(w for w in re.findall(r"[^\W_]+", text.lower()) if w not in ("the", "a", "an"))

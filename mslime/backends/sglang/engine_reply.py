"""Parse an engine's answer: JSON except for its two large parts, which bypass the JSON parser.

Most bytes of an answer are the base64 of routes and the ids of sampling masks. They are cut out, placeholders are
parsed in their place, and they are inserted afterwards: routes as a view of the bytes, masks as two arrays.

The result equals that of plain JSON for any bytes:

- A cut is always a whole value. Masks are compared with the grammar of a list of lists of integers, byte for byte.
  Routes end at the next quote, since base64 has neither quotes nor backslashes; decoding rejects anything but a tag and
  base64.
- Its place is verified. The key's own bytes prove nothing: a longer key may end in them, or the object may have the key
  elsewhere. But the placeholder is a text unknown to engines. If parsing finds it as `meta_info[key]`, the replaced
  value was there. (Within a text, the placeholder's first quote would end that text, and the rest would not be JSON.)
- Plain JSON handles everything else: white space, small masks, negative numbers, invalid answers.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

ROUTES, MASKS = "routed_experts", "output_token_sampling_mask"
_STAND_IN = secrets.token_hex(16)
_STAND_IN_BYTES = orjson.dumps(_STAND_IN)
_ROUTES_START, _MASKS_START = f'"{ROUTES}":"'.encode(), f'"{MASKS}":[['.encode()

SMALLEST_MASKS = 16384
"""Bytes. Below this, JSON creates its objects faster than NumPy starts."""

_COMMA, _OPEN, _CLOSE, _ZERO = b",[]0"
_DIGITS = 8
"""Digits of the longest number that is parsed: the bytes of a machine word. Token ids have fewer."""
_OTHER_BITS = (8 * (_DIGITS - np.arange(_DIGITS + 1))).astype(np.uint64)
_LEAST = np.asarray([0, 0, *(10**k for k in range(1, _DIGITS))], np.uint32)
"""Smallest valid number by number of digits: a smaller one has a leading zero, which JSON forbids."""
_BLOCK = 4096


@dataclass(frozen=True)
class IntegerRows:
    """A list of lists of integers.

    Attributes:
        values: [sum of sizes] uint32, rows laid end to end.
        sizes: [rows] int64.
    """

    values: NDArray[np.uint32]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class _Cut:
    """The bytes [start, end) of an answer: the `value` of a key, or a part of its text."""

    key: str
    start: int
    end: int
    value: memoryview | IntegerRows


def load_answer(content: bytes) -> dict[str, Any]:
    """The JSON object of an answer, {} for an empty or plain-text one. Raises ValueError for invalid JSON.

    In `meta_info`, routes are a view of `content` if they are a text, and large masks are IntegerRows.
    """
    if content.lstrip()[:1] != b"{":
        return {}
    cuts = _cuts(content)
    if cuts and (answer := _loaded_without(content, cuts)) is not None:
        return answer
    return orjson.loads(content)


def _loaded_without(content: bytes, cuts: list[_Cut]) -> dict[str, Any] | None:
    """The object with the cut values inserted; None if a value does not belong to its key."""
    edges = [0, *(edge for cut in cuts for edge in (cut.start, cut.end)), len(content)]
    try:
        answer = orjson.loads(_STAND_IN_BYTES.join(content[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)))
    except ValueError:
        return None
    meta = answer.get("meta_info")
    if not isinstance(meta, dict) or any(meta.get(cut.key) != _STAND_IN for cut in cuts):
        return None
    meta.update({cut.key: cut.value for cut in cuts})
    return answer


def _cuts(content: bytes) -> list[_Cut]:
    """Possible cuts, in byte order."""
    routes = _routes(content)
    if routes is None:
        masks = _masks(content, 0, len(content))
    else:  # they are long and contain no masks
        masks = _masks(content, 0, routes.start) or _masks(content, routes.end, len(content))
    return sorted((cut for cut in (routes, masks) if cut is not None), key=lambda cut: cut.start)


def _routes(content: bytes) -> _Cut | None:
    """The text of the routes, quotes included."""
    found = content.find(_ROUTES_START)
    start = found + len(_ROUTES_START)
    end = content.find(b'"', start) if found >= 0 else -1
    return _Cut(ROUTES, start - 1, end + 1, memoryview(content)[start:end]) if end >= 0 else None


def _masks(content: bytes, begin: int, end: int) -> _Cut | None:
    """The sampling masks in content[begin:end], if they are large enough."""
    found = content.find(_MASKS_START, begin, end)
    if found < 0:
        return None
    start = found + len(_MASKS_START) - 2
    quote = content.find(b'"', start, end)  # the next key's; masks contain none
    stop = content.rfind(b"]]", start, quote if quote >= 0 else end) + 2
    if stop - start < SMALLEST_MASKS or (rows := integer_rows(content, start, stop)) is None:
        return None
    return _Cut(MASKS, start, stop, rows)


def integer_rows(content: bytes, start: int, stop: int) -> IntegerRows | None:
    """content[start:stop], JSON's `[[1,23],[],[4]]`, as arrays; at least 8 bytes precede it.

    Returns:
        None for any other text, including white space, no rows, signs and more than 8 digits.
    """
    # Starts 8 bytes earlier: a number is read as the word that ends with it.
    text = np.frombuffer(content, np.uint8, stop - start + _DIGITS, start - _DIGITS)
    digits = text - np.uint8(_ZERO)
    marks = (np.flatnonzero(digits[_DIGITS:] > 9) + _DIGITS).astype(np.int32)
    between = np.diff(marks) - 1
    sizes = _row_sizes(text[marks], between)
    if sizes is None or between.max() > _DIGITS:
        return None
    ends, lengths = marks[1:][between > 0], between[between > 0]
    values = np.empty(len(ends), np.uint32)
    for at in range(0, len(ends), _BLOCK):  # arrays that fit into the processor's cache
        block = slice(at, at + _BLOCK)
        values[block] = _numbers(digits, ends[block], lengths[block])
        if (values[block] < _LEAST[lengths[block]]).any():
            return None
    return IntegerRows(values, sizes)


def _row_sizes(marks: NDArray[np.uint8], digits: NDArray[np.int32]) -> NDArray[np.int64] | None:
    """Number of integers in each row, or None if this is not a list of lists of integers.

    Args:
        marks: [n] the non-digit bytes, in order.
        digits: [n - 1] number of digits between a mark and the next.
    """
    # The outer brackets; then every row opens after the previous one closes, with a comma between.
    opens, closes = np.flatnonzero(marks == _OPEN)[1:], np.flatnonzero(marks == _CLOSE)[:-1]
    n, rows = len(marks), len(opens)
    framed = rows > 0 and len(closes) == rows and marks[0] == _OPEN and opens[0] == 1 and closes[-1] == n - 2
    if not framed or marks[-1] != _CLOSE or (opens[1:] != closes[:-1] + 2).any() or (closes < opens).any():
        return None
    if np.count_nonzero(marks == _COMMA) != n - 2 * rows - 2:
        return None
    # No digits at the outer brackets and between rows, some before every other mark; rows may be empty.
    outside = np.concatenate([[0, n - 2], closes[:-1], closes[:-1] + 1])
    empty = (closes == opens + 1) & (digits[opens] == 0)
    if digits[outside].any() or np.count_nonzero(digits == 0) != len(outside) + np.count_nonzero(empty):
        return None
    return closes - opens - empty


def _numbers(digits: NDArray[np.uint8], ends: NDArray[np.int32], lengths: NDArray[np.int32]) -> NDArray[np.uint32]:
    """The numbers of `lengths` digits that end at `ends`. All digits of a number are combined at once in a word:
    digits, then pairs, then fours (Langdale and Lemire, https://arxiv.org/abs/1902.08318)."""
    words = np.ndarray((len(digits) - _DIGITS + 1,), "<u8", digits, strides=(1,))
    other = _OTHER_BITS[lengths]
    # Shift out the bytes before the number. Eight digits leave nothing to shift.
    word = (words[ends - _DIGITS] >> other) << other
    for bits, ten, kept in ((8, 10, 0x00FF00FF00FF00FF), (16, 100, 0x0000FFFF0000FFFF), (32, 10_000, 0xFFFFFFFF)):
        word = (word * np.uint64(ten) + (word >> np.uint64(bits))) & np.uint64(kept)
    return word.astype(np.uint32)

"""Routes and sampling masks are cut out of an answer's bytes, and the result is what plain JSON gives of any bytes."""

from __future__ import annotations

import base64
import itertools
import json
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mslime.backends.sglang import engine_reply
from mslime.backends.sglang.engine_reply import MASKS, ROUTES, IntegerRows, integer_rows, load_answer
from mslime.backends.sglang.generating import GenerateRequest, parse_generation
from tests.fixtures.model_facts import model_facts
from tests.fixtures.supports import rows_of

BEFORE = b'"before":'
IMITATIONS = (
    "\\", "]]", f'"{ROUTES}":"', f'"{MASKS}":[[1,2],[3]]', f',"{MASKS}":[[5]],"', f'\\"{ROUTES}\\":\\"x"',
    f'{{"{MASKS}":[[',
)  # fmt: skip
TEXTS = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), st.sampled_from(IMITATIONS))
TEXTS = st.builds("".join, st.lists(TEXTS, max_size=3))
ROWS = st.lists(st.lists(st.integers(0, 99_999_999), max_size=5), max_size=5)
ODD_NUMBERS = st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False), st.none())
ODD_MASKS = st.one_of(
    st.recursive(ODD_NUMBERS, lambda inner: st.lists(inner, max_size=3), max_leaves=8), TEXTS, st.just([[]])
)
ENCODED = st.binary(max_size=30).map(lambda data: base64.b64encode(data).decode())
VALUES = st.one_of(ROWS, ODD_MASKS, ENCODED, st.dictionaries(TEXTS, ODD_NUMBERS, max_size=2))


def as_json(value: Any) -> Any:
    """What was cut out as JSON would have made it. Routes that are no base64 are all one: decoding refuses them."""
    if isinstance(value, dict):
        return {key: as_json(inner) if key != ROUTES else base64_of(as_json(inner)) for key, inner in value.items()}
    if isinstance(value, IntegerRows):
        ends = np.cumsum(value.sizes)[:-1]
        return [row.tolist() for row in np.split(value.values, ends)]
    return bytes(value).decode() if isinstance(value, memoryview) else value


def base64_of(routes: Any) -> Any:
    """Routes that can be decoded, and in the place of others one and the same text."""
    if not isinstance(routes, str):
        return routes
    try:
        return pybase64.b64encode(pybase64.b64decode(routes, validate=True)).decode()
    except ValueError:
        return "no base64"


def outcome(load: Any, content: bytes) -> Any:
    """What comes of the bytes, as text; or that they are refused, and why."""
    try:
        return repr(as_json(load(content)))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


@pytest.fixture(autouse=True)
def cut_also_small_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_reply, "SMALLEST_MASKS", 0)


@st.composite
def objects(draw: st.DrawFn) -> str:
    """JSON of an answer, or of something like one: fields in any order, twice, elsewhere, with names that end in
    another's, with white space."""
    keys = st.one_of(st.sampled_from([ROUTES, MASKS, f'x"{ROUTES}', f'x"{MASKS}', "output_ids"]), TEXTS)
    usual = {ROUTES: ENCODED, MASKS: ROWS}

    def fields(most: int) -> list[str]:
        found: list[str] = []
        for key in draw(st.lists(keys, max_size=most)):
            value = draw(usual[key] if key in usual and draw(st.booleans()) else VALUES)
            found.append(f"{dumps(key)}{colon}{dumps(value)}")
        return found

    spaced = draw(st.sampled_from([None, None, (", ", ": "), (" ,\n", " :\t")]))
    comma, colon = spaced or (",", ":")
    ascii_only = draw(st.booleans())

    def dumps(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii_only, separators=(comma, colon))

    metas = [f'"meta_info"{colon}{{{comma.join(fields(4))}}}' for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2])))]
    return "{" + comma.join(draw(st.permutations([*fields(3), *metas]))) + "}"


@settings(max_examples=250, deadline=None)
@given(objects())
def test_an_answer_is_what_json_makes_of_it(text: str) -> None:
    content = text.encode()
    assert outcome(load_answer, content) == outcome(orjson.loads, content)


def test_the_parts_of_an_honest_answer_are_cut_out_in_any_order() -> None:
    values = {"a": "\\", MASKS: [[7, 12], [0, 88], [12345678]], "b": [[1]], ROUTES: "AAAA"}
    for names in itertools.permutations(values):
        answer = {"text": "]]", "meta_info": {name: values[name] for name in names}, "z": [[2]]}
        found = load_answer(orjson.dumps(answer))
        rows, routes = found["meta_info"][MASKS], found["meta_info"][ROUTES]
        assert isinstance(rows, IntegerRows) and isinstance(routes, memoryview) and as_json(found) == answer
        assert rows.values.tolist() == [7, 12, 0, 88, 12345678] and rows.sizes.tolist() == [2, 2, 1] and len(rows) == 3


@pytest.mark.parametrize(
    "content",
    [
        '{"routed_experts":"AAAA","meta_info":{}}',
        '{"a":{"routed_experts":"AAAA"},"meta_info":{"routed_experts":""}}',
        '{"meta_info":{"x\\"routed_experts":"AAAA"}}',
        '{"meta_info":{"routed_experts":"AAAA","routed_experts":"BBBB"}}',
        '{"meta_info":{"a":{"output_token_sampling_mask":[[1]]},"output_token_sampling_mask":[[2]]}}',
        '{"meta_info":{"output_token_sampling_mask":[[1]],"output_token_sampling_mask":null}}',
        '{"meta_info":[{"output_token_sampling_mask":[[1]]}]}',
    ],
)
def test_a_value_that_stands_elsewhere_is_left_there(content: str) -> None:
    assert as_json(load_answer(content.encode())) == json.loads(content)


def read(text: str) -> list[list[int]] | None:
    """`integer_rows` of a text."""
    content = BEFORE + text.encode()
    rows = integer_rows(content, len(BEFORE), len(content))
    return None if rows is None else as_json(rows)


def defined(text: str) -> list[list[int]] | None:
    """What it must be: JSON's rows of integers of up to 8 digits, one row at least."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    plain = isinstance(found, list) and found and all(isinstance(row, list) for row in found)
    numbers = [value for row in found for value in row] if plain else []
    small = all(type(value) is int and 0 <= value < 10**8 for value in numbers)
    return found if plain and small and not set(text) & set(" \t\n\r-") else None


def test_rows_of_integers_are_those_of_the_grammar_for_every_short_text() -> None:
    read_some = 0
    for length in range(6):
        for letters in itertools.product("[],01", repeat=length):
            text = f"[[{''.join(letters)}]]"
            assert read(text) == defined(text), text
            read_some += defined(text) is not None
    assert read_some > 30


LIKE_ROWS = st.one_of(
    ROWS.map(lambda rows: json.dumps(rows, separators=(",", ":"))),
    st.text("[],0123456789 -.e;:", max_size=12),
    st.text("[],0123456789 -.e;:", max_size=6).map("[[1{}2]]".format),
)


@settings(max_examples=250, deadline=None)
@given(LIKE_ROWS)
@example("[[1,]1,[1]]")
@example("[[1]1,[,1]]")
@example("[,1[2]]")
@example("[[1.2]]")
@example("[[1 2]]")
def test_rows_of_integers_are_those_of_the_grammar(text: str) -> None:
    assert read(text) == defined(text)


@pytest.mark.parametrize("end", ["0", "9", "9" * 8, "1" + "0" * 7])
def test_numbers_are_read_across_blocks(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_reply, "_BLOCK", 3)
    text = f"[[10,2,{end}],[],[345,67,8,9]]"
    assert read(text) == json.loads(text) and read(f"[[1,2,3,{end},0{end}]]") is None


def test_masks_are_read_the_same_by_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    request = GenerateRequest("a", [1, 2], 40, top_p=0.9, top_k=20)
    rows = [[t, *range(40, 40 + t % 5)] for t in range(40)]
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-1.0, t, None] for t in range(40)],
        "output_token_sampling_logprobs": [-0.5] * 40,
        "weight_versions": [{"version": "1", "start": 0, "end": 40}],
        MASKS: rows,
    }
    content, found = orjson.dumps({"output_ids": list(range(40)), "meta_info": meta}), []
    for smallest in (0, 1 << 20):
        monkeypatch.setattr(engine_reply, "SMALLEST_MASKS", smallest)
        answer = load_answer(content)
        assert isinstance(answer["meta_info"][MASKS], IntegerRows) == (smallest == 0)
        found.append(parse_generation(request, answer, "engine0", model_facts(100)).supports)
    assert rows_of(found[0]) == rows_of(found[1]) == rows and found[0].ids.dtype == found[1].ids.dtype == np.int32

"""Answers of an engine as foreign bytes: what cannot be is an EngineError, and nothing else ever comes out."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest

from mslime.backends.sglang.client import EngineBusy, EngineClient
from mslime.backends.sglang.engine_reply import load_answer
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult, answer_limit, parse_generation
from mslime.config.errors import MALFORMED, EngineError
from mslime.config.schema import DeadlineConfig
from tests.fixtures.model_facts import model_facts
from tests.fixtures.supports import rows_of
from tests.unit.fake_engine import LAYERS, TOP_K, VOCABULARY, FakeEngine

MODEL = model_facts(VOCABULARY, num_layers=LAYERS, top_k=TOP_K, num_experts=64)
ASKED = GenerateRequest("a", [9, 9, 9], 4, want_routes=True, routes_start=2)
Spoil = Callable[[dict[str, Any]], object]


def honest() -> dict[str, Any]:
    """What a fake engine answers to `ASKED`."""
    return FakeEngine().answer(ASKED.payload())


def ask(engine: FakeEngine, work: Callable[[EngineClient], Any], **deadlines: float) -> Any:
    limits = DeadlineConfig.model_validate({"engine_request_s": 10, "engine_control_s": 10, **deadlines})

    async def session() -> Any:
        async with engine, EngineClient(engine.url, "engine0", limits, MODEL) as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(session(), 30))


def answered(content: bytes) -> GenerateResult:
    """The result of `ASKED` when the engine answers `content` over HTTP."""
    engine = FakeEngine()
    engine.raw = content
    return ask(engine, lambda client: client.generate(ASKED))


def _meta(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["meta_info"]


SPOILT: dict[str, Spoil] = {
    "a log-prob too few": lambda a: _meta(a)["output_token_logprobs"].pop(),
    "a log-prob of another token": lambda a: _meta(a)["output_token_logprobs"].__setitem__(0, [-1.0, 42, None]),
    "a positive log-prob": lambda a: _meta(a)["output_token_logprobs"].__setitem__(0, [3.0, 1, None]),
    "an impossible log-prob": lambda a: _meta(a)["output_token_logprobs"].__setitem__(0, [-1e30, 1, None]),
    "a log-prob as text": lambda a: _meta(a)["output_token_logprobs"].__setitem__(0, ["-1.0", 1, None]),
    "no log-prob": lambda a: _meta(a)["output_token_logprobs"].__setitem__(0, [None, 1, None]),
    "a token beyond the vocabulary": lambda a: _with_tokens(a, [1, 2, 3, VOCABULARY]),
    "a negative token": lambda a: _with_tokens(a, [1, 2, 3, -1]),
    "a token beyond int32": lambda a: _with_tokens(a, [1, 2, 3, 2**40]),
    "a token beyond int64": lambda a: _with_tokens(a, [1, 2, 3, 2**64 - 1]),
    "a fraction of a token": lambda a: _with_tokens(a, [1, 2, 3, 1.5]),
    "a token as text": lambda a: _with_tokens(a, ["1", "2", "3", "4"]),
    "more tokens than asked for": lambda a: _with_tokens(a, [1] * 40),
    "an unknown end": lambda a: _meta(a).update(finish_reason={"type": "evil"}),
    "an end that is a number": lambda a: _meta(a).update(finish_reason=7),
    "no version": lambda a: _meta(a).update(weight_versions=[]),
    "a version as words": lambda a: _meta(a)["weight_versions"][0].update(version="new"),
    "version spans that end early": lambda a: _spans(a, (0, 2)),
    "version spans with a gap": lambda a: _spans(a, (0, 2), (3, 4)),
    "version spans that overlap": lambda a: _spans(a, (0, 3), (2, 4)),
    "version spans backwards": lambda a: _spans(a, (0, 4), (4, 2), (2, 4)),
    "no routes": lambda a: _meta(a).pop("routed_experts"),
    "a row of routes too many": lambda a: _meta(a).update(routed_experts=_routes(0, rows=5)),
    "routes cut short": lambda a: _meta(a).update(routed_experts=_meta(a)["routed_experts"][:-3]),
    "routes that are not base64": lambda a: _meta(a).update(routed_experts="?" * len(_meta(a)["routed_experts"])),
    "routes as a number": lambda a: _meta(a).update(routed_experts=12),
    "an unknown expert": lambda a: _meta(a).update(routed_experts=_routes(64)),
    "the largest number as an expert": lambda a: _meta(a).update(routed_experts=_routes(2**31 - 1)),
    "a negative expert": lambda a: _meta(a).update(routed_experts=_routes(-1)),
    "no meta_info": lambda a: a.pop("meta_info"),
    "meta_info of another kind": lambda a: a.update(meta_info=[1]),
    "tokens of another kind": lambda a: a.update(output_ids={"0": 1}),
}


def _with_tokens(answer: dict[str, Any], ids: list[Any]) -> None:
    n = len(ids)
    answer["output_ids"] = ids
    _meta(answer)["output_token_logprobs"] = [[-1.0, t, None] for t in ids]
    _meta(answer)["weight_versions"] = [{"version": "0", "start": 0, "end": n}]
    _meta(answer)["routed_experts"] = base64.b64encode(bytes(4 * (3 + n - 1 - 2) * LAYERS * TOP_K)).decode()


def _spans(answer: dict[str, Any], *edges: tuple[int, int]) -> None:
    _meta(answer)["weight_versions"] = [{"version": "0", "start": a, "end": b} for a, b in edges]


def _routes(expert: int, rows: int = 4) -> str:
    routes = np.zeros((rows, LAYERS, TOP_K), np.int32)
    routes[2, 1, 1] = expert
    return base64.b64encode(routes.tobytes()).decode()


def test_an_honest_answer_is_taken_whole() -> None:
    result = answered(json.dumps(honest()).encode())
    assert result.output_ids.tolist() == [1, 2, 3, 4] and result.log_probs.tolist() == [-1.0] * 4
    assert (result.output_ids.dtype, result.log_probs.dtype) == (np.int32, np.float32)
    assert (result.versions, result.finish, result.engine) == (((0, 0, 4),), "length", "engine0")
    assert result.routes is not None and result.routes.dtype == np.uint8 and result.supports is None
    np.testing.assert_array_equal(result.routes.reshape(-1), np.arange(4 * LAYERS * TOP_K))


@pytest.mark.parametrize("what", list(SPOILT))
def test_an_answer_that_cannot_be_is_an_engine_error(what: str) -> None:
    answer = honest()
    SPOILT[what](answer)
    with pytest.raises(EngineError, match="invalid answer") as caught:
        answered(orjson.dumps(answer) if what != "a token beyond int64" else json.dumps(answer).encode())
    assert caught.value.field == "engine0"


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"meta_info": NaN}',
        b'{"text": "\xff\xfe"}',
        b"",
        b"oops",
        b"[]",
        b'{"a":' * 2000,
        b'{"routed_experts":"',
    ],
)
def test_bytes_that_are_no_answer_are_an_engine_error(content: bytes) -> None:
    with pytest.raises(EngineError, match="invalid answer"):
        answered(content)


DRAWN = GenerateRequest("a", [9, 9, 9], 4, top_p=0.9, top_k=20)
SPOILT_MASKS: dict[str, tuple[Spoil, str]] = {
    "no mask": (lambda m: m.pop("output_token_sampling_mask"), "returned no sampling mask"),
    "a mask too few": (lambda m: m["output_token_sampling_mask"].pop(), "3 sampling masks for 4 tokens"),
    "an empty mask": (
        lambda m: m["output_token_sampling_mask"].__setitem__(2, []),
        r"token 3 is not in its sampling mask, \[\]",
    ),
    "a token outside": (
        lambda m: m["output_token_sampling_mask"].__setitem__(1, [4, 7]),
        "token 2 is not in its sampling mask",
    ),
    "the token twice": (
        lambda m: m["output_token_sampling_mask"].__setitem__(1, [2, 5, 2]),
        "token 2 is not in its sampling mask",
    ),
    "another id twice": (lambda m: m["output_token_sampling_mask"].__setitem__(3, [4, 6, 6]), "an id twice"),
    "an id beyond the vocabulary": (lambda m: m["output_token_sampling_mask"][0].append(VOCABULARY), "token id 50"),
    "a negative id": (lambda m: m["output_token_sampling_mask"][0].append(-1), "token id -1"),
    "a fraction": (lambda m: m["output_token_sampling_mask"][0].append(5.5), "expected integers"),
    "text": (lambda m: m["output_token_sampling_mask"].__setitem__(0, "12"), "expected integers"),
    "a number": (lambda m: m["output_token_sampling_mask"].__setitem__(0, 1), "len"),
    "no log-probs over it": (lambda m: m.pop("output_token_sampling_logprobs"), "output_token_sampling_logprobs"),
    "a log-prob too few": (lambda m: m["output_token_sampling_logprobs"].pop(), "3 log-probs for 4 tokens"),
    "a positive log-prob": (lambda m: m["output_token_sampling_logprobs"].__setitem__(0, 0.5), "log-prob 0.5"),
}


@pytest.mark.parametrize("what", list(SPOILT_MASKS))
def test_a_sampling_mask_that_cannot_be_is_an_engine_error(what: str) -> None:
    spoil, told = SPOILT_MASKS[what]
    engine, answer = FakeEngine(), FakeEngine().answer(DRAWN.payload())
    spoil(answer["meta_info"])
    engine.raw = orjson.dumps(answer)
    with pytest.raises(EngineError, match=told) as caught:
        ask(engine, lambda client: client.generate(DRAWN))
    assert caught.value.field == "engine0"


def test_an_honest_sampling_mask_is_taken_whole() -> None:
    result = parse_generation(DRAWN, FakeEngine().answer(DRAWN.payload()), "engine0", MODEL)
    assert result.supports is not None and result.supports.ids.dtype == np.int32
    assert rows_of(result.supports) == [[1, 2], [2, 3], [3, 4], [4, 5]]
    assert result.log_probs.tolist() == [-0.5] * 4, "renormalised"


def test_a_prompt_can_be_scored_and_a_restricted_draw_have_log_probs_of_the_whole_vocabulary() -> None:
    request = GenerateRequest("r", [7, 8, 9], 2, top_p=0.5, masked=False, scored_from=2)
    body = request.payload()
    assert body["sampling_params"]["top_p"] == 0.5 and body["logprob_start_len"] == 1
    assert not request.restricted and not body.pop("return_sampling_mask")
    del body["logprob_start_len"]
    answer = FakeEngine().answer(body | {"return_sampling_mask": False})
    answer["meta_info"]["input_token_logprobs"] = [[None, 8, None], [-0.5, 9, None]]
    result = parse_generation(request, answer, "engine0", MODEL)
    assert result.supports is None and result.log_probs.tolist() == [-1.0, -1.0] and result.scores is not None
    assert np.isnan(result.scores[:2]).all() and result.scores[2] == -0.5
    answer["meta_info"]["input_token_logprobs"] = [[None, 8, None], [-0.5, 5, None]]
    with pytest.raises(AssertionError, match="of other tokens"):
        parse_generation(request, answer, "engine0", MODEL)


def test_an_answer_without_end_is_given_up_at_what_the_request_can_give() -> None:
    engine = FakeEngine()
    engine.endless = True
    with pytest.raises(EngineError, match="exceeds the limit"):
        ask(engine, lambda client: client.generate(ASKED), engine_request_s=20)


def test_the_largest_honest_answer_is_within_its_limit() -> None:
    model = model_facts(200_000, num_layers=61, top_k=8, num_experts=256)
    request = GenerateRequest("a", list(range(100)), 4096, want_routes=True, top_k=20)
    n, rows = 4096, 100 + 4096 - 1
    pairs = [[-12.345678901234567, 199_999, None]] * n
    meta = {
        "output_token_logprobs": pairs,
        "output_token_sampling_logprobs": [-12.345678901234567] * n,
        "output_token_sampling_mask": [[199_999] * 20] * n,
        "routed_experts": "A" * (rows * 61 * 8 * 4 * 4 // 3 + 4),
        "weight_versions": [{"version": "12345", "start": t, "end": t + 1} for t in range(n)],
    }
    answer = {"text": "\\u1234" * 8 * n, "output_ids": [199_999] * n, "meta_info": meta}
    assert len(orjson.dumps(answer)) < answer_limit(request, model)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_engine_is_asked_again_by_control_calls_and_named_to_who_generates(status: int) -> None:
    engine = FakeEngine()
    engine.busy = [status, status]
    ask(engine, lambda client: client.begin_weight_update())
    assert [path for path, _ in engine.seen] == ["/begin_weight_update"] * 3
    engine.busy = [status]
    with pytest.raises(EngineBusy, match="queue is full"):
        ask(engine, lambda client: client.generate(ASKED))


def _mutated(chance: random.Random) -> bytes:
    """An honest answer with one to three things changed, in the object or in its bytes."""
    answer = honest()
    for _ in range(chance.randint(0, 2)):
        holder, key = chance.choice(list(_places(answer)))
        holder[key] = chance.choice(
            [None, True, -1, 0, 3, 10**9, 2**70, 1.5, -1e30, 3.0, "", "x", "-1.0", [], {}, [[]], [None], [1, 2]]
        )
    content = bytearray(json.dumps(answer).encode())
    for _ in range(chance.randint(0, 2)):
        at = chance.randrange(len(content))
        if chance.random() < 0.5:
            content[at] = chance.randrange(256)
        else:
            del content[at : at + chance.randint(1, 40)]
    return bytes(content)


def _places(value: Any) -> Any:
    """(container, key) of every value inside."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=pytest.mark.nightly if s else ()) for s in range(10)])
def test_no_change_of_an_answer_brings_anything_but_an_engine_error_or_a_result_that_adds_up(seed: int) -> None:
    chance, refused = random.Random(seed), 0
    for _ in range(400):
        content = _mutated(chance)
        try:
            result = parse_generation(ASKED, load_answer(content), "engine0", MODEL)
        except MALFORMED:
            refused += 1
            continue
        n = len(result.output_ids)
        assert n <= 4 and result.log_probs.shape == (n,) and ((result.output_ids >= 0) & (result.output_ids < 50)).all()
        assert np.isfinite(result.log_probs).all() and (result.log_probs <= 0).all() and (result.log_probs > -2e4).all()
        assert result.finish in ("stop", "length", "abort") and (n == 0 or result.versions[-1][2] == n)
        assert n == 0 or (result.routes is not None and result.routes.shape == (n, LAYERS, TOP_K))
    assert refused > 100

"""Results of a real SGLang server, against transformers on the same fp32 weights."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.engine_reply import MASKS, ROUTES, IntegerRows, load_answer
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.config.errors import EngineError
from tests.engines.conftest import SharedServer
from tests.engines.reference import Reference, log_softmax
from tests.fixtures.engine_calls import load, load_beneath_the_cache
from tests.fixtures.tiny_models import make_tiny_qwen3_moe

FLOAT32 = 2e-5
"""Log-probs of two float32 implementations, logits divided by 0.7: 1.1e-5 was seen."""
PROMPTS = [[7], list(range(3, 36)), [(i * 37) % 250 for i in range(100)]]


@pytest.fixture(scope="module")
def reference(sglang_server: SharedServer) -> Reference:
    return Reference(sglang_server.checkpoint)


def run(server: SharedServer, work: Any) -> Any:
    """`await work(client)` on a fresh loop and client."""

    async def main() -> Any:
        async with server.client() as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(main(), 120))


def generate(server: SharedServer, *requests: GenerateRequest) -> list[GenerateResult]:
    return run(server, lambda client: asyncio.gather(*(client.generate(r) for r in requests)))


def _sequence(request: GenerateRequest, result: GenerateResult) -> list[int]:
    return [*map(int, request.input_ids), *result.output_ids.tolist()]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_log_probs_are_those_of_the_sampled_distribution_with_temperature(
    sglang_server: SharedServer, reference: Reference, temperature: float
) -> None:
    requests = [
        GenerateRequest(f"t{temperature}-{i}", prompt, 40, temperature=temperature, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    for request, result in zip(requests, generate(sglang_server, *requests), strict=True):
        ids = _sequence(request, result)
        assert len(result.output_ids) == 40 and result.finish == "length" and result.supports is None
        expected = log_softmax(reference(ids)[0] / temperature)[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(result.log_probs, expected[len(request.input_ids) - 1 :], atol=FLOAT32, rtol=0)
        assert result.versions == ((0, 0, 40),)


def test_greedy_log_probs_are_of_the_unscaled_distribution(sglang_server: SharedServer, reference: Reference) -> None:
    request = GenerateRequest("greedy", PROMPTS[1], 10, temperature=0.0, ignore_eos=True)
    (result,) = generate(sglang_server, request)
    ids = _sequence(request, result)
    logits = reference(ids)[0][len(PROMPTS[1]) - 1 : -1]
    assert result.output_ids.tolist() == logits.argmax(-1).tolist()
    np.testing.assert_allclose(result.log_probs, log_softmax(logits).max(-1), atol=FLOAT32, rtol=0)


def test_routes_are_exactly_those_of_transformers(sglang_server: SharedServer, reference: Reference) -> None:
    requests = [
        GenerateRequest(f"routes-{i}", prompt, 30, want_routes=True, ignore_eos=True)
        for i, prompt in enumerate(PROMPTS)
    ]
    for request, result in zip(requests, generate(sglang_server, *requests), strict=True):
        expected = reference(_sequence(request, result)[:-1])[1]
        assert result.routes is not None
        np.testing.assert_array_equal(np.sort(result.routes, -1), np.sort(expected, -1))


def test_the_bytes_of_a_real_answer_are_read_without_json_and_say_the_same(sglang_server: SharedServer) -> None:
    """The shapes that `load_answer` cuts out are those that SGLang writes."""
    asked = GenerateRequest("raw", PROMPTS[1], 80, top_p=0.99, top_k=4096, want_routes=True, ignore_eos=True).payload()
    headers = sglang_server.address.keys.headers("/generate")
    request = urllib.request.Request(
        f"{sglang_server.url}/generate", orjson.dumps(asked), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        content = response.read()
    meta, plain = load_answer(content)["meta_info"], json.loads(content)["meta_info"]
    rows, routes = meta.pop(MASKS), meta.pop(ROUTES)
    assert isinstance(rows, IntegerRows) and isinstance(routes, memoryview), "the answer was read by JSON"
    assert [row.tolist() for row in np.split(rows.values, np.cumsum(rows.sizes)[:-1])] == plain.pop(MASKS)
    assert bytes(routes).decode() == plain.pop(ROUTES) and meta == plain


def test_an_abort_keeps_the_tokens_and_a_continuation_completes_the_routes(
    sglang_server: SharedServer, reference: Reference
) -> None:
    first = GenerateRequest("cut", PROMPTS[1], 1900, want_routes=True, ignore_eos=True)

    async def cut(client: EngineClient) -> GenerateResult:
        running = asyncio.create_task(client.generate(first))
        while await load(client, "used_tokens") < 60:
            await asyncio.sleep(0.02)
        await client.abort("cut")
        return await running

    partial = run(sglang_server, cut)
    n = len(partial.output_ids)
    assert partial.finish == "abort" and 0 < n < 1900 and len(partial.log_probs) == n
    assert partial.routes is not None and len(partial.routes) == len(PROMPTS[1]) + n - 1
    ids = _sequence(first, partial)
    second = GenerateRequest("rest", ids, 12, want_routes=True, routes_start=len(partial.routes), ignore_eos=True)
    (rest,) = generate(sglang_server, second)
    assert rest.routes is not None and len(rest.routes) == 12, "only the rows that were missing"
    whole = _sequence(second, rest)
    logits, routes = reference(whole)
    joined = np.concatenate([partial.routes, rest.routes])
    np.testing.assert_array_equal(np.sort(joined, -1), np.sort(routes[:-1], -1))
    got = np.concatenate([partial.log_probs, rest.log_probs])
    expected = log_softmax(logits)[np.arange(len(whole) - 1), whole[1:]][len(PROMPTS[1]) - 1 :]
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_holds_requests_back_and_spans_show_the_version_change(
    sglang_server: SharedServer, reference: Reference, mode: Any
) -> None:
    request = GenerateRequest(f"paused-{mode}", [5, 6, 7], 300, want_routes=True, ignore_eos=True)

    async def pause(client: EngineClient) -> tuple[GenerateResult, GenerateResult, bool, bool]:
        running = asyncio.create_task(client.generate(request))
        while await load(client, "used_tokens") < 20:
            await asyncio.sleep(0.02)
        await client.pause(mode)
        late = asyncio.create_task(client.generate(GenerateRequest(f"late-{mode}", [1, 2], 3, ignore_eos=True)))
        await asyncio.sleep(0.3)
        held, ready = not late.done(), await client.ready()
        await client.stamp(5)
        if mode != "in_place":
            await client.flush_cache()
        await client.resume()
        results = await running, await late
        await client.stamp(0)
        return *results, held, ready

    result, late, held, ready = run(sglang_server, pause)
    assert held and not ready and late.versions == ((5, 0, 3),)
    if mode == "abort":
        assert result.finish == "abort" and result.versions == ((0, 0, len(result.output_ids)),)
    else:
        cut = result.versions[0][2]
        assert result.versions == ((0, 0, cut), (5, cut, 300)) and 0 < cut < 300
        assert result.retractions == (mode == "retract")
    ids = _sequence(request, result)
    logits, routes = reference(ids)
    expected = log_softmax(logits)[np.arange(len(ids) - 1), ids[1:]][2:]
    np.testing.assert_allclose(result.log_probs, expected, atol=2e-5, rtol=0)
    assert result.routes is not None
    np.testing.assert_array_equal(np.sort(result.routes, -1), np.sort(routes[:-1], -1))


def test_what_a_request_leaves_in_the_cache_is_found_under_its_own_key_only(
    sglang_server: SharedServer, reference: Reference, tmp_path: Path
) -> None:
    """A request lives across an update of the weights beneath its cache. Both versions contribute to its cache
    entry."""
    other = make_tiny_qwen3_moe(tmp_path / "other", seed=1)
    long = GenerateRequest("across", [5, 6, 7], 300, ignore_eos=True, cache_key="0")

    async def across(client: EngineClient) -> list[GenerateResult]:
        await client.flush_cache()  # of what other tests left under no key
        running = asyncio.create_task(client.generate(long))
        while await load(client, "used_tokens") < 20:
            await asyncio.sleep(0.02)
        await client.pause("in_place")
        await load_beneath_the_cache(client, other, 1)
        await client.resume()
        crossed = await running
        again = GenerateRequest("new", _sequence(long, crossed), 10, ignore_eos=True, cache_key="1")
        return [crossed, *[await client.generate(replace(again, rid=key, cache_key=key)) for key in ("1", "0", "")]]

    try:
        crossed, new, old, none = run(sglang_server, across)
    finally:
        sglang_server.restore()
    cut = crossed.versions[0][2]
    assert crossed.versions == ((0, 0, cut), (1, cut, 300)) and 0 < cut < 300
    assert (new.cached_tokens, none.cached_tokens) == (0, 0) and old.cached_tokens >= 300, "one key finds what it left"
    newer, ids = Reference(other), [*_sequence(long, crossed)]
    for result, exact in ((new, True), (none, True), (old, False)):
        whole = [*ids, *result.output_ids.tolist()]
        expected = log_softmax(newer(whole)[0])[np.arange(len(whole) - 1), whole[1:]][len(ids) - 1 :]
        assert bool(np.abs(result.log_probs - expected).max() < FLOAT32) == exact


def test_a_cache_in_use_is_not_flushed(sglang_server: SharedServer) -> None:
    async def flush(client: EngineClient) -> GenerateResult:
        running = asyncio.create_task(client.generate(GenerateRequest("busy", [5, 6], 200, ignore_eos=True)))
        while await load(client, "running") == 0:
            await asyncio.sleep(0.02)
        await client.pause("in_place")
        with pytest.raises(EngineError, match="flush_cache"):
            await client.flush_cache(patience_s=0.2)
        await client.resume()
        return await running

    assert len(run(sglang_server, flush).output_ids) == 200


def test_a_request_aborted_while_it_waits_returns_nothing(sglang_server: SharedServer) -> None:
    async def retract_and_abort(client: EngineClient) -> GenerateResult:
        request = GenerateRequest("waiting", [5, 6], 1500, want_routes=True, ignore_eos=True)
        running = asyncio.create_task(client.generate(request))
        while await load(client, "used_tokens") < 30:
            await asyncio.sleep(0.02)
        await client.pause("retract")
        await client.abort("waiting")
        result = await running
        await client.resume()
        return result

    result = run(sglang_server, retract_and_abort)
    assert result.finish == "abort" and len(result.output_ids) == 0 and result.versions == ()


def test_stop_ids_and_stop_strings_end_a_response(sglang_server: SharedServer) -> None:
    every = tuple(range(320))
    by_id, by_text = generate(
        sglang_server,
        GenerateRequest("stop-id", [1, 2], 50, stop_token_ids=every),
        GenerateRequest("stop-text", [1, 2], 400, stop=tuple("abcdefghijklmnopqrstuvwxyzABCDE"), ignore_eos=True),
    )
    assert by_id.finish == "stop" and len(by_id.output_ids) == 1
    assert by_text.finish == "stop" and len(by_text.output_ids) < 400


def test_a_prompt_beyond_the_vocabulary_is_refused_before_it_kills_the_server(sglang_server: SharedServer) -> None:
    with pytest.raises(EngineError, match="vocabulary of engine0 .320 ids"):
        generate(sglang_server, GenerateRequest("beyond", [1, 320], 5))
    with pytest.raises(EngineError, match="longer than the model's context"):
        generate(sglang_server, GenerateRequest("long", [1] * 3000, 5))
    assert sglang_server.process.alive

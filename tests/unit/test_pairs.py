"""Engines that are pairs of servers: what they go with, and how two answers become one.

No half is real here: a stand-in for each speaks SGLang's HTTP with invented numbers.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from mslime.backends.sglang.client import EngineClient, EngineDied
from mslime.backends.sglang.generating import GenerateRequest, ProbeRequest
from mslime.backends.sglang.handshake import EngineNeeds, handshake
from mslime.backends.sglang.pair import client_of
from mslime.backends.sglang.port import compare
from mslime.backends.sglang.server_process import EngineAddress
from mslime.config.errors import ConfigError, EngineError, WeightSyncError
from mslime.config.loader import build
from mslime.data.probe import NEW_TOKENS
from tests.fixtures.model_facts import model_facts
from tests.unit.fake_engine import LAYERS, TOP_K, VOCABULARY, FakeEngine

MODEL = model_facts(vocab_size=VOCABULARY, num_layers=LAYERS, moe_layer_ids=tuple(range(LAYERS)), num_experts=8,
                    top_k=TOP_K)  # fmt: skip
BOOTSTRAP_PORT = 4711


def run_config(**sections: Any) -> Any:
    return build({"model": {"path": "."}, "data": {"prompts": ["p.jsonl"]}} | sections)


# --------------------------------------------------------------------------------------------------------- the settings


def test_a_pair_has_the_gpus_of_two_engines_and_each_half_its_own_place() -> None:
    config = run_config(sglang={"num_engines": 3, "tp_size": 4, "pairs": "mooncake"}, cluster={"device": "cuda"})
    (engines,) = [claim for claim in config.claims() if claim.what == "engines"]
    assert (engines.count, engines.gpus, config.sglang.gpus, config.sglang.servers) == (6, 4, 24, 3)
    assert config.sglang.shape == "(TP4 to prefill, TP4 to decode)"


PAIRED = {"pairs": "mooncake"}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"sglang": PAIRED | {"urls": ["http://a:1"]}}, "sglang.pairs = .*mslime pairs only"),
        ({"sglang": PAIRED | {"tp_size": 2, "nnodes": 2}}, "sglang.nnodes = 2: each server of a pair"),
        ({"sglang": PAIRED, "rollout": {"pause_mode": "in_place"}}, "rollout.pause_mode = .*one weight version"),
        ({"sglang": PAIRED, "rollout": {"pause_mode": "retract"}}, "rollout.pause_mode = .*one weight version"),
        ({"sglang": PAIRED, "cluster": {"placement": "colocated"}, "weights": {"transport": "shm"}},
         "tested with pairs"),
        ({"sglang": PAIRED, "lora": {"rank": 4, "sync": "adapter"}}, "sglang.pairs = .*lora.sync: adapter"),
        ({"sglang": PAIRED, "cluster": {"device": "cpu"}}, r"(?s)sglang.pairs = .*GPU memory.*mooncake_tcp"),
        ({"sglang": {"disaggregation_mode": "prefill"}}, "disaggregation_mode.*sglang.pairs"),
        ({"sglang": {"disaggregation_transfer_backend": "nixl"}}, "disaggregation_transfer_backend.*sglang.pairs"),
        ({"teacher": PAIRED | {"path": "t"}, "algorithm": {"opd_coef": 1.0}}, "teacher.pairs = .*only prefills"),
    ],
)  # fmt: skip
def test_what_a_pair_does_not_go_with_is_refused_by_name(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run_config(**sections)


def test_a_pair_on_cpus_moves_its_cache_over_tcp() -> None:
    assert run_config(sglang={"pairs": "mooncake_tcp"}, cluster={"device": "cpu"}).sglang.gpus == 2


# --------------------------------------------------------------------------------------------------- two answers as one


class StandInHalf(FakeEngine):
    """One half of a pair, invented: the one that prefills has one token and routes of value 1, the other routes of
    value 2."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self.role, self.first_token = role, 1
        self.model |= {"disaggregation_mode": role, "weight_version": "5"}
        self.aborted, self.fails = False, ""
        self.sums = {}

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.fails:
            raise web.HTTPInternalServerError(text=json.dumps({"error": {"message": self.fails}}))
        prefills, asked = self.role == "prefill", body["sampling_params"]["max_new_tokens"]
        scores = self._scores(body)["meta_info"]["input_token_logprobs"] if "logprob_start_len" in body else None
        n = 1 if prefills else 2 if self.aborted else asked
        body = body | {"sampling_params": body["sampling_params"] | {"max_new_tokens": n}}
        body.pop("logprob_start_len", None)
        made = super().answer(body)
        meta = made["meta_info"]
        made["output_ids"][0], meta["output_token_logprobs"][0][1] = self.first_token, self.first_token
        meta["cached_tokens"] = 3 if prefills else 0
        if scores is not None:
            meta["input_token_logprobs"] = scores
        if n == 1 and not prefills:
            meta.pop("routed_experts", None)
        if "routed_experts" in meta:
            rows = len(body["input_ids"]) + n - 1 - body["routed_experts_start_len"]
            routes = np.full((rows, LAYERS, TOP_K), 1 if prefills else 2, np.int32)
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        if self.aborted:
            meta["finish_reason"] = {"type": "abort"}
            if prefills:
                made["output_ids"] = []
        return made


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[EngineClient, StandInHalf, StandInHalf]]:
    """A client of a pair, the half that prefills and the one that decodes."""
    async with StandInHalf("prefill") as prefill, StandInHalf("decode") as decode:
        other = EngineAddress("engine0_prefill", prefill.url, bootstrap_port=BOOTSTRAP_PORT)
        async with client_of(EngineAddress("engine0", decode.url, prefill=other), model=MODEL) as client:
            yield client, prefill, decode


REQUEST = GenerateRequest("r", [7, 8, 9, 10], 3, want_routes=True, routes_start=1)


async def test_the_prompts_routes_are_of_the_half_that_prefills_and_the_rest_is_the_others() -> None:
    async with pair() as (client, prefill, decode):
        result = await client.generate(REQUEST)
        assert result.output_ids.tolist() == [1, 2, 3] and result.versions == ((5, 0, 3),)
        assert result.engine == "engine0" and result.cached_tokens == 3 and result.routes is not None
        assert result.routes[:, 0, 0].tolist() == [1, 1, 1, 2, 2]  # tokens 1 to 3 of the prompt, and 2 of 3 new ones
        (of_first,), (of_rest,) = ([b for p, b in half.seen if p == "/generate"] for half in (prefill, decode))
        assert of_first["rid"] == of_rest["rid"] and of_first["bootstrap_room"] == of_rest["bootstrap_room"]
        assert (of_rest["bootstrap_host"], of_rest["bootstrap_port"]) == ("127.0.0.1", BOOTSTRAP_PORT)
        assert (of_first["routed_experts_start_len"], of_rest["routed_experts_start_len"]) == (1, 4)
        await client.generate(replace(REQUEST, rid="other"))
        assert prefill.seen[-1][1]["bootstrap_room"] != of_first["bootstrap_room"]


async def test_a_response_that_its_first_token_ends_has_the_prompts_routes_alone() -> None:
    async with pair() as (client, _, _):
        result = await client.generate(replace(REQUEST, max_new_tokens=1))
        assert result.output_ids.tolist() == [1] and result.routes is not None
        assert result.routes[:, 0, 0].tolist() == [1, 1, 1]


async def test_supports_and_log_probs_are_of_the_half_that_decodes() -> None:
    async with pair() as (client, _, _):
        result = await client.generate(GenerateRequest("r", [7, 8], 3, top_k=4))
        assert result.routes is None and result.supports is not None and len(result.supports.sizes) == 3


async def test_halves_that_do_not_agree_on_the_first_token_are_no_answer() -> None:
    async with pair() as (client, prefill, _):
        prefill.first_token = 2
        with pytest.raises(EngineError, match="disagree on the first token"):
            await client.generate(REQUEST)
        prefill.first_token, prefill.model["weight_version"] = 1, "4"
        with pytest.raises(EngineError, match="disagree on the first token and its version"):
            await client.generate(REQUEST)


async def test_of_a_request_that_is_aborted_between_the_halves_nothing_is_used() -> None:
    async with pair() as (client, prefill, decode):
        prefill.aborted = decode.aborted = True
        result = await client.generate(REQUEST)
        assert result.finish == "abort" and not len(result.output_ids) and result.routes is None
        decode.aborted = False
        with pytest.raises(EngineError, match="no token"):
            await client.generate(REQUEST)


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_an_abort_while_the_cache_is_on_its_way_is_no_failure_and_a_lost_half_is_a_death(half: str) -> None:
    """The texts are SGLang's, of a real pair."""
    async with pair() as (client, prefill, decode):
        fails = prefill if half == "prefill" else decode
        fails.fails = "Decode transfer failed for request rank=0 with exception KVTransferError: Aborted by AbortReq."
        result = await client.generate(REQUEST)
        assert result.finish == "abort" and not len(result.output_ids) and result.routes is None
        fails.fails = "Decode transfer failed for request rank=0 with exception KVTransferError: Lost connection"
        with pytest.raises(EngineDied, match="Lost connection"):
            await client.generate(REQUEST)
        fails.fails = "the prompt is too long"
        with pytest.raises(EngineError, match="too long") as refused:
            await client.generate(REQUEST)
        assert not isinstance(refused.value, EngineDied)


async def test_tokens_that_were_decoded_before_an_abort_are_kept() -> None:
    async with pair() as (client, _, decode):
        decode.aborted = True
        result = await client.generate(GenerateRequest("r", [7, 8], 3))
        assert result.finish == "abort" and result.output_ids.tolist() == [1, 2]


@pytest.mark.parametrize("dead", ["prefill", "decode"])
async def test_a_pair_dies_with_either_half_and_nobody_waits_for_the_other(dead: str) -> None:
    async with pair() as (client, prefill, decode):
        gone, other = (prefill, decode) if dead == "prefill" else (decode, prefill)
        gone.drop_connections, other.delay_s = True, 60.0
        async with asyncio.timeout(20):
            with pytest.raises(EngineDied):
                await client.generate(REQUEST)
        while other.running:  # its request is given up, too
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_what_one_half_refuses_is_refused(half: str) -> None:
    async with pair() as (client, prefill, decode):
        refusing = prefill if half == "prefill" else decode
        refusing.refused.add("/update_weight_version")
        with pytest.raises(EngineError, match="told to refuse"):
            await client.stamp(6)


async def test_both_halves_are_told_what_an_engine_is_told() -> None:
    async with pair() as (client, prefill, decode):
        for call in (client.abort("r"), client.pause("abort"), client.flush_cache(), client.begin_weight_update(),
                     client.end_weight_update(), client.stamp(6), client.resume()):  # fmt: skip
            await call
        paths = ["/abort_request", "/pause_generation", "/flush_cache", "/begin_weight_update", "/end_weight_update",
                 "/update_weight_version", "/continue_generation"]  # fmt: skip
        assert [p for p, _ in prefill.seen] == [p for p, _ in decode.seen] == paths
        assert await client.version() == 6 and prefill.model["weight_version"] == "6"
        prefill.paused = True
        assert not await client.ready() and await client.answers()
        prefill.broken.add("/begin_weight_update")
        with pytest.raises(EngineError, match="told to fail"):
            await client.begin_weight_update()


async def test_what_both_halves_hold_is_compared() -> None:
    async with pair() as (client, prefill, decode):
        prefill.sums, decode.sums = {"w": "3 9"}, {"w": "3 9"}
        held = await client.weight_checksums()
        assert held is not None and len(held) == 2 and compare("here", held, {"w": "3 9"}) == 1
        prefill.sums = {"w": "4 9"}
        held = await client.weight_checksums()
        assert held is not None
        with pytest.raises(WeightSyncError, match="has other values"):
            compare("here", held, {"w": "3 9"})


async def test_a_probe_has_the_text_of_one_half_and_the_new_tokens_of_the_other() -> None:
    async with pair() as (client, _, decode):
        found = await client.probe(ProbeRequest("p", [7, 8, 9], 5, want_routes=True))
        assert found.tokens.tolist() == [7, 8, 9, *range(1, NEW_TOKENS + 1)]
        assert found.log_probs.tolist() == [0, -1, -2, *[-1] * NEW_TOKENS]
        assert found.routes is not None and found.routes[:, 0, 0].tolist() == [1] * 3 + [2] * (NEW_TOKENS - 1)
        assert "logprob_start_len" not in decode.seen[-1][1]


async def test_the_handshake_wants_each_half_in_its_role() -> None:
    async with pair() as (client, prefill, decode):
        decode.info["max_req_input_len"] = 40
        assert await handshake(client, EngineNeeds(routes=True)) == 40
        prefill.model["disaggregation_mode"] = "null"
        with pytest.raises(EngineError, match="engine0_prefill.*--disaggregation-mode null"):
            await handshake(client, EngineNeeds(routes=True))
        prefill.model["disaggregation_mode"] = "prefill"
        prefill.info["enable_return_routed_experts"] = False
        with pytest.raises(EngineError, match="engine0_prefill.*routed experts"):
            await handshake(client, EngineNeeds(routes=True))
        with pytest.raises(EngineError, match="one half of a pair"):
            async with EngineClient(decode.url, "alone", model=MODEL) as alone:
                await handshake(alone, EngineNeeds(routes=False))


def test_all_servers_of_a_pair_take_weights() -> None:
    other = EngineAddress("engine0_prefill", "http://b", bootstrap_port=1)
    assert [e.url for e in EngineAddress("engine0", "http://a", prefill=other).endpoints] == ["http://a", "http://b"]
    assert [e.url for e in other.endpoints] == ["http://b"]

"""A fake SGLang server: it speaks the HTTP of 0.5.23 with invented numbers, and misbehaves when told to.

Only for provoking failures and for tests of who gets which request; what a real server answers is tested in
tests/engines.
"""

from __future__ import annotations

import asyncio
import base64
import copy
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from aiohttp import web

from mslime.engine_plugin.wire import Sums, encode

LAYERS, TOP_K, VOCABULARY = 3, 2, 50


def _body(*fields: str, **enums: list[str]) -> dict[str, Any]:
    properties: dict[str, Any] = {name: {} for name in fields} | {n: {"enum": e} for n, e in enums.items()}
    return {"post": {"requestBody": {"content": {"application/json": {"schema": {"properties": properties}}}}}}


SCHEMA: dict[str, Any] = {
    "paths": {
        "/generate": _body(
            "input_ids", "rid", "return_logprob", "return_routed_experts", "routed_experts_start_len",
            "return_sampling_mask", "extra_key",
        ),
        "/abort_request": _body("rid", "abort_all"),
        "/pause_generation": _body(mode=["abort", "retract", "in_place"]),
        "/continue_generation": _body(),
        "/begin_weight_update": _body(),
        "/end_weight_update": _body(),
        "/init_weights_update_group": _body("master_address", "rank_offset", "group_name"),
        "/update_weights_from_distributed": _body("names", "dtypes", "shapes", "load_format"),
        "/update_weight_version": _body("new_version", "abort_all_requests"),
        "/weights_checker": _body(),
    }
}  # fmt: skip


class FakeEngine:
    """`async with FakeEngine() as engine:` serves on a free port of loopback.

    Attributes:
        schema, info, model: answers to be spoilt by a test.
        delay_s: how long /generate takes.
        broken: routes that answer 500.
        busy: statuses that the next POSTs are answered with, one each, before anything is done.
        raw: what /generate answers instead of a result. endless: it goes on sending, without an end.
        drop_connections: /generate closes the connection instead of answering, always or for so many requests.
        masks: whether it returns sampling masks.
        routes_rows_off: rows of routes too many. scores_off: log-probs of given tokens too many.
        sums: what its one rank says to /weights_checker; None: it has no plug-in that could.
        tokens: text -> ids, the answer of /tokenize.
        seen: (path, body) of every POST.
    """

    def __init__(self) -> None:
        self.schema = copy.deepcopy(SCHEMA)
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "enable_return_routed_experts": True,
            "max_req_input_len": 58,
        }
        self.busy: list[int] = []
        self.raw: bytes | None = None
        self.endless = False
        self.model: dict[str, Any] = {"architectures": ["Qwen3MoeForCausalLM"], "weight_version": "default"}
        self.delay_s, self.routes_rows_off, self.pause_works = 0.0, 0, True
        self.drop_connections: bool | int = False
        self.scores_off = 0
        self.masks = True
        self.sums: dict[str, str] | None = {}
        self.tokens: Callable[[str], list[int]] = lambda text: [ord(c) for c in text]
        self.broken: set[str] = set()
        self.refused: set[str] = set()
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.running = self.most_running = 0
        self.paused = False
        self.hangs, self.asked, self.beats = False, 0, 0
        self.deceived, self.given_up = False, False
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/{name:.*}", self._get)
        app.router.add_post("/{name:.*}", self._post)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        answers = {
            "/server_info": self.info,
            "/model_info": self.model,
            "/openapi.json": self.schema,
            "/v1/loads": {"loads": [{"num_running_reqs": self.running, "num_waiting_reqs": 0, "num_used_tokens": 0}]},
        }
        if request.path == "/health":
            self.asked += 1
            if self.hangs and self.given_up:
                self.given_up = False
                return web.Response()
            if self.hangs:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    self.given_up = self.deceived
                    raise
            self.beats += 1
            return web.Response()
        if request.path == "/ready":
            return web.Response(status=503 if self.paused else 200)
        return web.json_response(answers[request.path])

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.seen.append((request.path, body))
        if self.busy:
            return web.json_response({"error": {"message": "the queue is full"}}, status=self.busy.pop(0))
        if request.path in self.broken:
            return web.json_response({"error": {"message": "told to fail"}}, status=500)
        if request.path in self.refused:  # as SGLang does in some places: with status 200
            return web.json_response({"success": False, "message": "told to refuse"})
        if request.path == "/tokenize":
            return web.json_response({"tokens": [self.tokens(text) for text in body["prompt"]]})
        if request.path == "/weights_checker":
            return self._ask(body["action"])
        if request.path == "/pause_generation":
            self.paused = self.pause_works
        if request.path == "/continue_generation":
            self.paused = False
        if request.path == "/update_weight_version":
            self.model["weight_version"] = body["new_version"]
        return web.json_response({"success": True})

    def _ask(self, action: str) -> web.Response:
        if self.sums is None:
            return web.json_response({"success": False, "message": f"Unsupported action='{action}'"}, status=400)
        return web.json_response({"success": True, "message": encode(Sums((self.sums,)))})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(("/generate", body))
        if self.busy:
            return web.json_response({"error": {"message": "the queue is full"}}, status=self.busy.pop(0))
        if self.endless:
            return await self._without_end(request)
        if self.raw is not None:
            return web.Response(body=self.raw)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.running -= 1
        if self.drop_connections:
            assert request.transport is not None
            if self.drop_connections is not True:
                self.drop_connections -= 1
            request.transport.close()
        return web.json_response(self.answer(body))

    async def _without_end(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """What /generate returns: token i is i + 1 with log-prob -1; given tokens have -position."""
        if "logprob_start_len" in body:
            return self._scores(body)
        n, prompt = body["sampling_params"]["max_new_tokens"], len(body["input_ids"])
        ids = [i + 1 for i in range(n)]
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-1.0, t, None] for t in ids],
            "weight_versions": [{"version": self.model["weight_version"], "start": 0, "end": n}],
            "cached_tokens": 0,
            "num_retractions": 0,
        }
        if body["return_routed_experts"]:
            rows = prompt + n - 1 - body["routed_experts_start_len"] + self.routes_rows_off
            routes = np.arange(rows * LAYERS * TOP_K, dtype=np.int32)
            meta["routed_experts"] = base64.b64encode(routes.tobytes()).decode()
        if body["return_sampling_mask"] and self.masks:
            meta["output_token_sampling_mask"] = [[t, t + 1] for t in ids]
            meta["output_token_sampling_logprobs"] = [-0.5] * n
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _scores(self, body: dict[str, Any]) -> dict[str, Any]:
        start, ids = body["logprob_start_len"], body["input_ids"]
        pairs = [[None if t == start else float(-t), ids[t], None] for t in range(start, len(ids))]
        pairs += [[-1.0, 1, None]] * self.scores_off
        meta = {"finish_reason": {"type": "length", "length": 0}, "input_token_logprobs": pairs}
        return {"text": "", "output_ids": [], "meta_info": meta}

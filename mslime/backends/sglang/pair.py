"""Two SGLang servers (0.5.23) as one engine: one prefills, the other decodes (`sglang.pairs`).

Both get the same request with a shared rendezvous number; SGLang transfers the cache and the first token. The decode
server's answer has all tokens, with their log-probs and supports. The prefill server's answer has the prompt's
log-probs and routes, which SGLang does not transfer. All other calls, weights and pauses above all, go to both.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from mslime.backends.sglang.client import CONNECT_S, LARGEST_ANSWER, EngineClient, EngineDied, R
from mslime.backends.sglang.generating import (
    GenerateRequest,
    GenerateResult,
    ProbeRequest,
    ScoreRequest,
    answer_limit,
    nothing,
    parse_generation,
    parse_scores,
    probed,
)
from mslime.config.errors import EngineError
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import DeadlineConfig
from mslime.data.probe import ProbeScores
from mslime.engine_plugin import wire

if TYPE_CHECKING:
    from mslime.backends.sglang.server_process import EngineAddress

T = TypeVar("T")
_ABORTED = "Aborted by AbortReq"
"""Error text (HTTP 500) of a server for a request aborted during the cache transfer."""
_LOST = re.compile(r"(transfer|bootstrap|handshake) failed for request")
"""Error text of a server for a request that failed on the other server."""


def client_of(
    address: EngineAddress, deadlines: DeadlineConfig | None = None, model: ModelFacts | None = None
) -> EngineClient:
    """A client of an engine: one server, or a pair."""
    kind = EngineClient if address.prefill is None else PairClient
    client = kind(
        address.url, address.name, deadlines, model, address.log_path, address.keys, address.identity
    )  # fmt: skip
    if isinstance(client, PairClient):
        client.prefills(address)
    return client


class PairClient(EngineClient):
    """Client of both servers of a pair. Its URL, name and log are the decode server's; see `client_of`."""

    def prefills(self, address: EngineAddress) -> None:
        assert address.prefill is not None and address.prefill.bootstrap_port, "a pair has two servers"
        self._prefill = client_of(address.prefill, self.deadlines, self.model)
        self._decode = client_of(replace(address, prefill=None), self.deadlines, self.model)
        self._bootstrap = {
            "bootstrap_host": urlsplit(address.prefill.url).hostname, "bootstrap_port": address.prefill.bootstrap_port,
        }  # fmt: skip

    @property
    def servers(self) -> tuple[EngineClient, ...]:
        return self._prefill, self._decode

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self.servers))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._check_ids(request)
        try:
            first, rest = await self._both_halves(request, self.deadlines.engine_request_s)
        except EngineError as error:
            if _ABORTED in error.rule:
                return nothing(request, self.name, {})
            if _LOST.search(error.rule):
                raise self.error("/generate", error.rule, EngineDied) from error
            raise
        with self.reading(f"request {request.rid}"):
            return self._joined(request, first, rest)

    async def score(self, request: ScoreRequest) -> NDArray[np.float32]:
        """Not supported: teachers are never pairs."""
        raise self.error("score", "not supported by a pair of servers")

    async def probe(self, request: ProbeRequest) -> ProbeScores:
        assert self.model is not None, "a probe needs a client with the model"
        self._check_ids(request.generation)
        limit_s = self.deadlines.weight_sync_s
        first, rest = await self._both_halves(request.generation, limit_s, {"logprob_start_len": 0})
        with self.reading(f"request {request.rid}"):
            text = parse_scores(ScoreRequest(request.rid, request.input_ids), first, self.model.vocab_size)
            return probed(request, text, self._joined(request.generation, first, rest), self.model)

    async def ask(self, request: wire.Request, reply: type[R], *, repeat: bool = False) -> R:
        """Request both servers: returns checksums of both, else the decode server's reply. See `EngineClient`."""
        first, rest = await _together(*(server.ask(request, reply, repeat=repeat) for server in self.servers))
        if isinstance(first, wire.Sums) and isinstance(rest, wire.Sums):
            return cast("R", wire.Sums((*first.ranks, *rest.ranks)))
        return rest

    async def _both_halves(
        self, request: GenerateRequest, limit_s: float, of_prompt: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The two answers to a request.

        Args:
            of_prompt: additional fields for the prefill server.
        """
        bootstrap, limit = self._bootstrap | {"bootstrap_room": secrets.randbits(62)}, answer_limit(request, self.model)
        bodies = request.payload() | (of_prompt or {}) | bootstrap, _after_prompt(request).payload() | bootstrap
        return await _together(
            *(
                server._call("POST", "/generate", body, limit_s, limit)
                for server, body in zip(self.servers, bodies, strict=True)
            )
        )

    def _joined(self, request: GenerateRequest, first: dict[str, Any], rest: dict[str, Any]) -> GenerateResult:
        """Merge two answers into one result. Raises one of MALFORMED.

        A request aborted before it was decoded, or before the prompt's routes arrived, has no usable tokens.
        """
        prompt = parse_generation(request, first, self.name, self.model)
        after = _after_prompt(request)
        if len(rest["output_ids"]) == 1:  # the first token ended it: nothing was decoded or returned
            after = replace(after, want_routes=False)
        result = parse_generation(after, rest, self.name, self.model)
        if not len(result.output_ids):
            return result
        if not len(prompt.output_ids):
            assert result.finish == "abort", (
                f"the prefill server returned no token, but the decode server finished by {result.finish}"
            )
            return replace(
                result, output_ids=result.output_ids[:0], log_probs=result.log_probs[:0], versions=(), routes=None,
                supports=None if result.supports is None else prompt.supports,
            )  # fmt: skip
        prefilled, had = (prompt.output_ids[0], prompt.versions[0][0]), (result.output_ids[0], result.versions[0][0])
        assert prefilled == had, f"the servers disagree on the first token and its version: {prefilled} and {had}"
        routes = [part for part in (prompt.routes, result.routes) if part is not None]
        routes = np.concatenate(routes) if routes else None
        return replace(result, routes=routes, cached_tokens=prompt.cached_tokens)

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None,
        timeout_s: float,
        limit: int = LARGEST_ANSWER,
        connect_s: float = CONNECT_S,
    ) -> dict[str, Any]:
        """Send control calls to both servers at the same time, and queries to the decode server. Raises the first
        failure."""
        if method == "GET" or path == "/tokenize":
            return await self._decode._call(method, path, body, timeout_s, limit, connect_s)
        answers = await _together(
            *(server._call(method, path, body, timeout_s, limit, connect_s) for server in self.servers)
        )
        return next((answer for answer in answers if answer.get("success") is False), answers[1])

    async def _status(self, path: str, patience_s: float) -> int | None:
        found = await asyncio.gather(*(server._status(path, patience_s) for server in self.servers))
        return None if None in found else max(status for status in found if status is not None)


def _after_prompt(request: GenerateRequest) -> GenerateRequest:
    """The request for the decode server, which has no routes of the prompt's tokens."""
    return replace(request, routes_start=len(request.input_ids)) if request.want_routes else request


async def _together(one: Coroutine[Any, Any, T], other: Coroutine[Any, Any, T]) -> tuple[T, T]:
    """The results of both; if one fails, the other is cancelled, because its server waits for the failed one."""
    tasks = asyncio.ensure_future(one), asyncio.ensure_future(other)
    try:
        await asyncio.gather(*tasks)
        return tasks[0].result(), tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()

"""A typed asynchronous client of one SGLang server (0.5.23) over HTTP.

Everything but the weights themselves (`mslime.weights.transport`) goes through `EngineClient`: generation, abort,
pause and resume, versions. It parses, checks lengths and never repairs: an answer that does not add up
is an `EngineError` that names the engine and its log. Every request has a deadline; only calls that may be repeated
without harm are retried, and only when the connection failed.

Which log-prob is the behaviour policy's (read in sglang/srt/layers/sampler.py, kept by tests):
`output_token_logprobs` is log softmax(logits / temperature), that is, temperature is in it. Top-k and top-p are not, so
a restricted draw asks for the sampling mask and uses `output_token_sampling_logprobs`, which is renormalised over the
kept ids. Greedy requests (temperature 0) report log softmax(logits).
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
import numpy as np
import orjson
import tenacity
from numpy.typing import NDArray

from mslime.backends.sglang.scoring import ScoreRequest, parse_scores
from mslime.config.errors import EngineError
from mslime.config.schema import DeadlineConfig

PauseMode = Literal["abort", "retract", "in_place"]

Finish = Literal["stop", "length", "abort"]

KEEPALIVE_S = 2.0
"""After so long an idle connection is given up. The server closes it after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE), and a
request sent into a connection that is just being closed fails as if the engine were dead."""


class EngineDied(EngineError):
    """The connection to an engine broke, or it missed a deadline: nothing more is to be expected of it."""


@dataclass(frozen=True)
class GenerateRequest:
    """One continuation of one token sequence.

    Attributes:
        rid: request id, unique among the requests in flight; `abort` takes it.
        input_ids: [prompt] token ids.
        top_k: -1 for the whole vocabulary.
        seed: honoured only by servers with `enable_deterministic_inference`.
        ignore_eos: go on to `max_new_tokens` whatever is sampled.
        want_routes: return the experts of every position from `routes_start` on.
        routes_start: first position whose routes are returned, at most len(input_ids).
        want_support: return the ids that survived top-k and top-p for every token (empty for unrestricted draws).
        session_id: requests of one session go to one engine (see `EnginePool`), which then reuses its prefix cache.
    """

    rid: str
    input_ids: Sequence[int] | NDArray[np.int32]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    want_routes: bool = False
    routes_start: int = 0
    want_support: bool = False
    session_id: str = ""

    @property
    def restricted(self) -> bool:
        """Whether the draw is from less than the whole vocabulary."""
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)

    def payload(self) -> dict[str, Any]:
        """The body of POST /generate. Raises EngineError for a draw whose log-probs the engine cannot report."""
        if self.restricted and self.top_k < 1:
            raise EngineError(
                "rollout.top_p",
                self.top_p,
                "SGLang reports the log-probs of a top-p draw only together with a finite top_k",
                "set rollout.top_k (for example 4096, the most that the engine allows by default), or top_p 1.0",
            )
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": False,
        }
        if self.stop:
            params["stop"] = list(self.stop)
        if self.stop_token_ids:
            params["stop_token_ids"] = list(self.stop_token_ids)
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": [int(t) for t in self.input_ids],
            "sampling_params": params,
            "return_logprob": True,
            "return_routed_experts": self.want_routes,
            "return_sampling_mask": self.restricted,
        }
        if self.want_routes:
            body["routed_experts_start_len"] = self.routes_start
        return body


@dataclass(frozen=True)
class GenerateResult:
    """What came back for a request.

    Attributes:
        output_ids: [n] int32 new tokens; fewer than asked for after an abort, none when it came before the first.
        log_probs: [n] float32, natural log of the probability each token was drawn with (see the module's text).
        finish: stop (end of sequence, stop id or stop string), length, or abort.
        versions: (weight version, start, end) spans over the n new tokens.
        routes: [prompt + n - 1 - routes_start, layers, top-k] int32 global expert ids, dense layers as zeros; None when
            not asked for. After a pause in mode `retract` the engine prefills again, so that rows of tokens sampled
            before the pause then describe the newest weights.
        supports: n rows of kept token ids, None when not asked for.
        cached_tokens: prompt tokens found in the prefix cache.
        text: the new tokens as text.
        engine: name of the engine.
        retractions: how often the request was pushed back to the queue while running.
    """

    output_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    finish: Finish
    versions: tuple[tuple[int, int, int], ...]
    routes: NDArray[np.int32] | None
    supports: list[list[int]] | None
    cached_tokens: int
    text: str
    engine: str
    retractions: int = 0


@dataclass(frozen=True)
class ServedModel:
    """What a client must know of the model to check requests and read answers.

    Attributes:
        layers: all decoder layers, dense ones counted.
        top_k: experts per token; 0 for a dense model.
        vocab_size: rows of the embedding. A token id beyond it kills the server, so it is refused here.
    """

    layers: int
    top_k: int
    vocab_size: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ServedModel:
        """From the contents of a checkpoint's config.json."""
        return cls(config["num_hidden_layers"], config.get("num_experts_per_tok") or 0, config["vocab_size"])


@dataclass(frozen=True)
class EngineLoad:
    """Work on an engine: requests running and waiting, tokens held in its cache."""

    running: int
    waiting: int
    used_tokens: int


def format_version(version: int) -> str:
    """A weight version as the engine stores it."""
    return str(version)


def parse_version(text: str) -> int:
    """A weight version as we count it; the engine calls weights it loaded itself `default`, which is version 0."""
    return 0 if text == "default" else int(text)


def decode_routes(encoded: str, rows: int, shape: tuple[int, int]) -> NDArray[np.int32]:
    """Base64 of C-ordered int32 -> [rows, layers, top-k], a read-only view of the decoded bytes."""
    flat = np.frombuffer(base64.b64decode(encoded), np.int32)
    expected = rows * shape[0] * shape[1]
    assert flat.size == expected, f"{flat.size} route entries, expected {rows} x {shape[0]} x {shape[1]} = {expected}"
    return flat.reshape(rows, *shape)


def parse_generation(
    request: GenerateRequest, answer: dict[str, Any], engine: str, model: ServedModel | None
) -> GenerateResult:
    """One answer of /generate, checked for consistency.

    A request that is aborted while it waits in the engine's queue comes back without routes and supports, even when it
    had run before; its tokens cannot be replayed then, and the result holds none of them.
    """
    meta = answer["meta_info"]
    ids = np.asarray(answer["output_ids"], np.int32)
    finish = meta["finish_reason"]["type"]
    restricted, encoded = request.restricted, meta.get("routed_experts")
    incomplete = (request.want_routes and encoded is None) or (restricted and "output_token_sampling_mask" not in meta)
    if finish == "abort" and (incomplete or len(ids) == 0):
        return _nothing(request, engine, meta)
    n = len(ids)
    pairs = meta["output_token_logprobs"]
    assert [int(p[1]) for p in pairs] == ids.tolist(), f"{len(pairs)} log-probs for {n} tokens, or for other tokens"
    values = meta["output_token_sampling_logprobs"] if restricted else [p[0] for p in pairs]
    log_probs = np.asarray(values, np.float32)
    assert log_probs.shape == (n,) and np.isfinite(log_probs).all(), f"log-probs {log_probs} for {n} tokens"
    routes = None
    if request.want_routes:
        assert encoded is not None, "the engine returned no routed experts"
        assert model is not None, "routes were asked of a client that does not know the model"
        rows = len(request.input_ids) + n - 1 - request.routes_start
        routes = decode_routes(encoded, rows, (model.layers, model.top_k))
    supports = None
    if request.want_support:
        supports = meta["output_token_sampling_mask"] if restricted else [[]] * n
        assert len(supports) == n, f"{len(supports)} supports for {n} tokens"
    spans = tuple((parse_version(s["version"]), s["start"], s["end"]) for s in meta["weight_versions"])
    assert n == 0 or spans[-1][2] == n, f"version spans {spans} for {n} tokens"
    return GenerateResult(
        ids,
        np.minimum(log_probs, 0.0),  # log of a rounded probability can exceed 0 by an ulp
        finish,
        spans if n else (),
        routes,
        supports,
        int(meta.get("cached_tokens") or 0),
        answer.get("text", ""),
        engine,
        int(meta.get("num_retractions") or 0),
    )


def _nothing(request: GenerateRequest, engine: str, meta: dict[str, Any]) -> GenerateResult:
    """The result of a request that was aborted before it produced anything that can be used."""
    retractions = int(meta.get("num_retractions") or 0)
    supports = [] if request.want_support else None
    ids, log_probs = np.empty(0, np.int32), np.empty(0, np.float32)
    return GenerateResult(ids, log_probs, "abort", (), None, supports, 0, "", engine, retractions)


class EngineClient:
    """Talks to one server. Belongs to one event loop; close it there.

    Args:
        url: `http://host:port`.
        name: how the engine is called in samples, metrics and errors.
        deadlines: seconds for generation and for control calls.
        model: needed to read routes and to refuse token ids that the model does not have.
        log_path: the server's log, named in errors; None for servers that somebody else started.
    """

    def __init__(
        self,
        url: str,
        name: str,
        deadlines: DeadlineConfig | None = None,
        model: ServedModel | None = None,
        log_path: Path | None = None,
    ) -> None:
        self.url, self.name, self.model, self.log_path = url.rstrip("/"), name, model, log_path
        self.deadlines = deadlines or DeadlineConfig()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ------------------------------------------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue a sequence. Raises EngineError when the server dies, refuses, or misses its deadline."""
        self._check_ids(request)
        answer = await self._call("POST", "/generate", request.payload(), self.deadlines.engine_request_s)
        try:
            return parse_generation(request, answer, self.name, self.model)
        except (AssertionError, KeyError, TypeError) as error:
            raise self.error(f"request {request.rid}", f"an answer that does not add up: {error!r}") from error

    async def score(self, request: ScoreRequest) -> NDArray[np.float32]:
        """[n] float32 log-probs of given tokens, see `scoring.parse_scores`; tried again when the connection fails.

        Raises EngineError when the server dies, refuses, misses its deadline, or returns what does not add up.
        """
        self._check_ids(request)
        answer = await self._retrying("POST", "/generate", request.payload(), self.deadlines.engine_request_s)
        try:
            return parse_scores(request, answer, None if self.model is None else self.model.vocab_size)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise self.error(f"request {request.rid}", f"an answer that does not add up: {error!r}") from error

    def _check_ids(self, request: GenerateRequest | ScoreRequest) -> None:
        """Raise EngineError for a token id that would kill the server."""
        top = max(request.input_ids, default=0)
        if self.model is not None and top >= self.model.vocab_size:
            raise EngineError(
                f"request {request.rid}",
                int(top),
                f"the prompt holds a token id beyond the vocabulary of {self.model.vocab_size} that {self.name} serves",
                "check that the tokenizer belongs to the model",
            )

    async def abort(self, rid: str | None = None) -> None:
        """Stop one request, or all of them; each returns what it has so far with finish `abort`."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._control("/abort_request", body, retry=True)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating and hold new requests back until `resume`.

        abort: running requests return what they have. retract: they go back to the queue, and the cache may be flushed.
        in_place: they stay where they are and go on with the old cache.
        """
        await self._control("/pause_generation", {"mode": mode}, retry=True)

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._control("/continue_generation", {}, retry=True)

    async def flush_cache(self, patience_s: float = 5.0) -> None:
        """Forget all cached prefixes. Raises EngineError when requests still hold the cache after `patience_s`.

        The engine refuses while a request is running, also one that is paused in place, and for a moment after the last
        one has returned. Requests that wait in a paused engine are no obstacle (the server's own `timeout` parameter
        would wait for them in vain).
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                await self._control("/flush_cache", {}, retry=True)
                return
            except EngineError as error:
                if "HTTP 400" not in error.rule or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.05)

    async def drain(self, poll_s: float = 0.05) -> None:
        """Abort everything, again and again until nothing runs or waits: late arrivals slip past a single abort."""
        deadline = time.monotonic() + self.deadlines.engine_control_s
        while True:
            await self.abort()
            load = await self.loads()
            if load.running + load.waiting == 0:
                return
            if time.monotonic() > deadline:
                raise self.error(
                    "abort", f"{load.running} requests still run after {self.deadlines.engine_control_s} s"
                )
            await asyncio.sleep(poll_s)

    # --------------------------------------------------------------------------------------------------- weights

    async def begin_weight_update(self) -> None:
        """Open a weight-update session; the engine accepts weights only inside one."""
        await self._control("/begin_weight_update", {}, self.deadlines.weight_sync_s)

    async def end_weight_update(self) -> None:
        """Close the session: the engine finishes its own layout (quantised or packed weights)."""
        await self._control("/end_weight_update", {}, self.deadlines.weight_sync_s)

    async def update_weights_from_disk(self, path: Path | str, version: int) -> None:
        """Load a Hugging Face checkpoint that the server can read, and stamp its version."""
        body = {"model_path": str(path), "weight_version": format_version(version)}
        await self._control("/update_weights_from_disk", body, self.deadlines.weight_sync_s)

    async def set_version(self, version: int) -> None:
        """Stamp the weights; running requests go on, and their spans show the change."""
        body = {"new_version": format_version(version), "abort_all_requests": False}
        await self._control("/update_weight_version", body, retry=True)

    async def version(self) -> int:
        """The version of the weights that the engine serves."""
        text = (await self.model_info())["weight_version"]
        try:
            return parse_version(text)
        except ValueError as error:
            raise self.error("weight version", f"{text!r} was not stamped by mslime") from error

    async def checksum(self) -> dict[str, str]:
        """Checksums of every tensor under the engine's own names; `rank<i>/` is prefixed when it has several ranks."""
        answer = await self._control("/weights_checker", {"action": "checksum"}, self.deadlines.weight_sync_s, True)
        ranks = answer["ranks"]
        if len(ranks) == 1:
            return dict(ranks[0]["checksums"])
        return {f"rank{i}/{name}": value for i, rank in enumerate(ranks) for name, value in rank["checksums"].items()}

    # ------------------------------------------------------------------------------------------------- questions

    async def ready(self) -> bool:
        """Whether the server is up and not paused."""
        try:
            async with self._open().get(f"{self.url}/ready", timeout=_timeout(5.0)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def model_info(self) -> dict[str, Any]:
        """GET /model_info."""
        return await self._question("/model_info")

    async def server_info(self) -> dict[str, Any]:
        """GET /server_info: the resolved ServerArgs, the version, and the schedulers' state."""
        return await self._question("/server_info")

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text by the server's own tokenizer, without special tokens."""
        body = {"prompt": list(texts), "add_special_tokens": False}
        answer = await self._retrying("POST", "/tokenize", body, self.deadlines.engine_control_s)
        return [list(map(int, ids)) for ids in answer["tokens"]]

    async def openapi(self) -> dict[str, Any]:
        """GET /openapi.json: every route and the fields of its body."""
        return await self._question("/openapi.json")

    async def loads(self) -> EngineLoad:
        """Requests running and waiting, summed over data-parallel ranks."""
        ranks = (await self._question("/v1/loads"))["loads"]
        return EngineLoad(
            sum(r["num_running_reqs"] for r in ranks),
            sum(r["num_waiting_reqs"] for r in ranks),
            sum(r["num_used_tokens"] for r in ranks),
        )

    # ------------------------------------------------------------------------------------------------- transport

    def error(self, what: str, rule: str, kind: type[EngineError] = EngineError) -> EngineError:
        """An error that names this engine and says where to look."""
        where = f"read the engine's log {self.log_path}" if self.log_path else f"look at the server behind {self.url}"
        return kind(self.name, what, rule, where)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
            )
        return self._session

    async def _question(self, path: str) -> dict[str, Any]:
        return await self._retrying("GET", path, None, self.deadlines.engine_control_s)

    async def _control(
        self, path: str, body: dict[str, Any], timeout_s: float | None = None, retry: bool = False
    ) -> dict[str, Any]:
        timeout_s = timeout_s or self.deadlines.engine_control_s
        call = self._retrying if retry else self._call
        answer = await call("POST", path, body, timeout_s)
        if answer.get("success") is False:
            raise self.error(path, f"refused: {answer.get('message')}")
        return answer

    async def _retrying(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """`_call`, tried three times when the connection fails; only for calls that may be repeated without harm."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e.__cause__, aiohttp.ClientConnectionError)),
            stop=tenacity.stop_after_attempt(3),
            wait=tenacity.wait_exponential(multiplier=0.1, max=1.0),
            reraise=True,
        )
        return await retrying(self._call, method, path, body, timeout_s)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """One HTTP exchange; `{}` for empty and plain-text answers. Raises EngineError for all that goes wrong."""
        data = None if body is None else orjson.dumps(body)
        try:
            async with self._open().request(
                method,
                self.url + path,
                data=data,
                headers={"Content-Type": "application/json"},
                timeout=_timeout(timeout_s),
            ) as response:
                content, status = await response.read(), response.status
        except TimeoutError as error:
            raise self.error(path, f"no answer within {timeout_s:g} s", EngineDied) from error
        except aiohttp.ClientError as error:
            rule = f"the connection broke ({error!r}); the server is dead or unreachable"
            raise self.error(path, rule, EngineDied) from error
        if status != 200:
            raise self.error(path, f"HTTP {status}: {_message(content)}")
        return orjson.loads(content) if content.lstrip()[:1] == b"{" else {}


def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, 10.0))


def _message(content: bytes) -> str:
    """The human part of an error answer."""
    text = content.decode(errors="replace")
    if not text.lstrip().startswith("{"):
        return text.strip()[:2000]
    answer = orjson.loads(text)
    error = answer.get("error")
    return str(error["message"] if isinstance(error, dict) else answer.get("message", answer))[:2000]

"""A typed asynchronous client of one SGLang server (0.5.23) over HTTP.

Every request to an engine goes through `EngineClient`: generation, abort, pause and resume, weight updates, versions.
It parses, checks lengths and never repairs: an inconsistent answer is an `EngineError` with the engine's name and log.
Every request has a deadline. Only repeatable calls are retried: if the connection failed, or the engine was too busy
(HTTP 429 and 503).

Engine answers are untrusted. `EngineClient.reading` turns every exception of a parser into an EngineError; answers
above a size limit are not read to their end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import aiohttp
import numpy as np
import orjson
import tenacity
from numpy.typing import NDArray

from mslime.backends.sglang.engine_reply import load_answer
from mslime.backends.sglang.generating import (
    GenerateRequest,
    GenerateResult,
    ProbeRequest,
    ScoreRequest,
    answer_limit,
    of_version,
    parse_generation,
    parse_probe,
    parse_scores,
    parse_version,
)
from mslime.backends.sglang.serving_adapters import AdapterVersion, ServingAdapters
from mslime.config.base import EngineTag, PauseMode
from mslime.config.errors import MALFORMED, EngineError, UserError
from mslime.config.keys import NO_KEYS, EngineKeys
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import DeadlineConfig
from mslime.data.probe import ProbeScores
from mslime.engine_plugin import wire
from mslime.threads import in_thread

T = TypeVar("T")
R = TypeVar("R", bound=wire.Reply)
CONNECT_S = 10.0
KEEPALIVE_S = 2.0
"""Seconds after which an idle connection is closed. The server closes it after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE), and a
request on a closing connection fails as if the engine were dead."""

BUSY = (429, 503)
LARGEST_ANSWER = 256 << 20
"""Largest answer in bytes if no tighter limit is known: checksums of a large model's tensors are some 10 MiB."""


class EngineDied(EngineError):
    """The connection to an engine broke, or it missed a deadline; no further answer is expected."""


class NoPlugIn(EngineError):
    """The server was started without mslime's plug-in, which the request needs."""


class EngineBusy(EngineError):
    """The engine temporarily rejects requests (HTTP 429 or 503): the same one may be sent again later."""


def blocking(call: Coroutine[Any, Any, T]) -> T:
    """Run `call` and return its result, for callers without an event loop or within a foreign one (a notebook's).

    A signal interrupts the wait at once: the thread is not joined, and ends with the call.
    """
    return in_thread(asyncio.run, call).result()


class EngineClient:
    """Client of one server. It belongs to one event loop; close it there.

    Args:
        url: `http://host:port`.
        name: name of the engine in samples, metrics and errors.
        deadlines: seconds for generation and for control calls.
        model: needed to read routes and to reject token ids outside the vocabulary.
        log_path: the server's log, named in errors; None for servers not started by mslime.
        keys: API keys for the server.
        identity: the name under which it must serve its model, checked by the handshake; empty for any.

    Attributes:
        adapters: loaded adapters.
    """

    def __init__(
        self,
        url: str,
        name: str,
        deadlines: DeadlineConfig | None = None,
        model: ModelFacts | None = None,
        log_path: Path | None = None,
        keys: EngineKeys = NO_KEYS,
        identity: str = "",
    ) -> None:
        self.url, self.name, self.model, self.log_path = url.rstrip("/"), name, model, log_path
        self.keys, self.identity = keys, identity
        self.deadlines = deadlines or DeadlineConfig()
        self.adapters = ServingAdapters(self._unload_adapter)
        self._session: aiohttp.ClientSession | None = None

    @property
    def servers(self) -> tuple[EngineClient, ...]:
        """Clients of its servers: itself, or both servers of a pair."""
        return (self,)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ------------------------------------------------------------------------------------------------ generation

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue a sequence.

        Raises:
            EngineDied: the server died, or missed its deadline.
            EngineBusy: it takes no requests now.
            EngineError: it refused, or sent an invalid answer.
        """
        self._check_ids(request)
        limit = answer_limit(request, self.model)
        with self.adapters.used(request.rid, request.adapter) as adapter:
            body = request.payload() | _with(adapter)
            answer = await self._call("POST", "/generate", body, self.deadlines.engine_request_s, limit)
        with self.reading(f"request {request.rid}"):
            result = parse_generation(request, answer, self.name, self.model)
            return result if adapter is None else of_version(result, adapter.version)

    async def score(self, request: ScoreRequest) -> NDArray[np.float32]:
        """[n] float32 log-probs of given tokens, see `generating.parse_scores`; retried if the connection fails.

        Raises EngineError if the server dies, refuses, misses its deadline, or sends an inconsistent answer.
        """
        self._check_ids(request)
        answer = await self._retrying("POST", "/generate", request.payload(), self.deadlines.engine_request_s)
        with self.reading(f"request {request.rid}"):
            return parse_scores(request, answer, None if self.model is None else self.model.vocab_size)

    async def probe(self, request: ProbeRequest) -> ProbeScores:
        """Log-probs, routes and continuation of a fixed text; see `generating.parse_probe`.

        Raises EngineDied and EngineError as `generate` does, within the deadline of a weight sync.
        """
        assert self.model is not None, "a probe needs a client with the model"
        self._check_ids(request.generation)
        adapter = self.adapters.of_version(request.version, request.adapter)
        body = request.payload() | _with(adapter)
        answer = await self._retrying("POST", "/generate", body, self.deadlines.weight_sync_s)
        with self.reading(f"request {request.rid}"):
            return parse_probe(request, answer, self.name, self.model, adapter is not None)

    def _check_ids(self, request: GenerateRequest | ScoreRequest) -> None:
        """Raise EngineError for a token id that would kill the server."""
        top = np.asarray(request.input_ids, np.int64).max(initial=0)
        if self.model is not None and top >= self.model.vocab_size:
            raise EngineError(
                f"request {request.rid}",
                int(top),
                f"the prompt has a token id outside the vocabulary of {self.name} ({self.model.vocab_size} ids)",
                "check that the tokenizer belongs to the model",
            )

    async def abort(self, rid: str | None = None) -> None:
        """Stop one request, or all of them; each returns its tokens so far with finish `abort`."""
        body = {"abort_all": True} if rid is None else {"rid": rid}
        await self._control("/abort_request", body, retry=True)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating and hold new requests back until `resume`.

        abort: running requests return their tokens so far. retract: they go back to the queue, and the cache may be
        flushed. in_place: they keep their state and continue with the old cache.
        """
        await self._control("/pause_generation", {"mode": mode}, retry=True)

    async def resume(self) -> None:
        """Continue after `pause`."""
        await self._control("/continue_generation", {}, retry=True)

    async def flush_cache(self, patience_s: float = 5.0) -> None:
        """Drop all cached prefixes. Raises EngineError if requests still hold the cache after `patience_s`.

        The engine refuses while a request is running or paused in place, and for a moment after the last one. Requests
        queued in a paused engine do not block it, but the server's own `timeout` parameter would wait for them in vain.
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

    # --------------------------------------------------------------------------------------------------- weights

    async def begin_weight_update(self) -> None:
        """Open a weight-update session; the engine accepts weights only inside one."""
        await self._control("/begin_weight_update", {}, self.deadlines.weight_sync_s)

    async def end_weight_update(self) -> None:
        """Close the session: the engine finishes its own layout (quantised or packed weights)."""
        await self._control("/end_weight_update", {}, self.deadlines.weight_sync_s)

    async def join_group(self, host: str, port: int, rank: int, world_size: int, name: str, backend: str) -> None:
        """Make the engine's ranks, numbered from `rank` on, join a process group whose store is at `host`."""
        body = {"master_address": host, "master_port": port, "rank_offset": rank, "world_size": world_size,
                "group_name": name, "backend": backend}  # fmt: skip
        await self._once("/init_weights_update_group", body)

    async def receive_bucket(self, description: bytes) -> str:
        """Make the engine receive a broadcast (see `wire.update_request`).

        Returns:
            The engine's report, once it has loaded the bucket.
        """
        answer = await self._once("/update_weights_from_distributed", description)
        return str(answer.get("message"))

    async def leave_group(self, name: str) -> None:
        await self._once("/destroy_weights_update_group", {"group_name": name})

    async def ask(self, request: wire.Request, reply: type[R], *, repeat: bool = False) -> R:
        """Send a request to the plug-in in this server and return its reply.

        Args:
            reply: class of the reply.
            repeat: whether the request is sent again if the connection fails; a step of a weight update never is.

        Raises:
            NoPlugIn: the server has no plug-in.
            EngineError: the request failed. EngineDied: it died meanwhile.
        """
        path, body, limit = "/weights_checker", {"action": wire.encode(request)}, self.deadlines.weight_sync_s
        try:
            answer = await (self._control(path, body, limit, True) if repeat else self._once(path, body))
        except EngineError as error:
            if wire.UNKNOWN in error.rule:
                raise self.error(path, "it was started without mslime's plug-in", NoPlugIn) from error
            raise
        with self.reading(path):
            found = wire.decode(answer["message"])
            if not isinstance(found, reply):
                raise TypeError(f"unexpected reply to {type(request).__name__}: {answer['message']!r}")
            return found

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        """Load a further adapter into the engine while its requests run.

        Raises:
            EngineError: it refuses, or cannot read it. EngineDied: it died meanwhile.
        """
        if adapter in self.adapters.loaded:
            return
        body = {"lora_name": adapter.name, "lora_path": str(adapter.directory)}
        await self._control("/load_lora_adapter", body, self.deadlines.weight_sync_s)
        self.adapters.add(adapter)

    async def _unload_adapter(self, name: str) -> None:
        await self._control("/unload_lora_adapter", {"lora_name": name}, self.deadlines.weight_sync_s)

    async def weight_checksums(self, version: int | None = None, owner: str = "") -> Sequence[Mapping[str, str]] | None:
        """Checksums of every rank for the tensors that were sent; None if the server lacks the plug-in.

        Args:
            version: of the owner's loaded adapter, whose tensors they are; None: they are weights.
        """
        request = wire.WeightChecksums()
        if version is not None:
            adapter = self.adapters.of_version(version, owner)
            assert adapter is not None, f"{self.url} has no adapter of version {version}"
            request = wire.AdapterChecksums(adapter.name)
        try:
            return (await self.ask(request, wire.Sums, repeat=True)).ranks
        except NoPlugIn:
            return None

    async def hold_memory(self, tags: Collection[EngineTag]) -> None:
        """Make an engine on shared GPUs hold these parts and release the rest. Resumed weights are zeros.

        Raises:
            EngineError: it refuses, for example because requests run; or it lacks the plug-in, which reports the held
                parts.
        """
        limit, before = self.deadlines.weight_sync_s, await self.released_memory()
        if give := before.to_release(tags):
            await self._control("/release_memory_occupation", {"tags": give}, limit)
        if take := before.to_resume(tags):
            await self._control("/resume_memory_occupation", {"tags": take}, limit)
        if not (give or take):
            return
        after = await self.released_memory()
        if give := after.to_release(tags) or after.to_resume(tags):
            why = after.refused or "no reason given"
            held, unchanged = ", ".join(tags) or "nothing", ", ".join(give)
            raise self.error("memory", f"must hold {held}, but {unchanged} did not change: {why}")

    async def released_memory(self) -> wire.Released:
        """Parts that an engine on shared GPUs has released."""
        return await self.ask(wire.ReleasedMemory(), wire.Released, repeat=True)

    async def stamp(self, version: int) -> None:
        """Set the version of the weights; running requests continue, and their spans show the change."""
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._control("/update_weight_version", body, retry=True)

    async def version(self) -> int:
        """The version of the weights that the engine serves."""
        text = (await self.model_info()).get("weight_version")
        try:
            return parse_version(str(text))
        except ValueError as error:
            raise self.error("weight version", f"{text!r} is not a version set by mslime") from error

    # ------------------------------------------------------------------------------------------------- questions

    async def ready(self) -> bool:
        """Whether the server is up and not paused."""
        return await self._status("/ready", 5.0) == 200

    async def answers(self) -> bool:
        """Whether a server answers within 5 s, paused or not."""
        return await self._status("/ready", 5.0) is not None

    async def healthy(self, patience_s: float) -> bool:
        """Whether its parts show a sign of life in that time; a paused engine shows none."""
        return await self._status("/health", patience_s) == 200

    async def _status(self, path: str, patience_s: float) -> int | None:
        try:
            async with self._open().get(self.url + path, timeout=_timeout(patience_s)) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def model_info(self) -> dict[str, Any]:
        return await self._question("/model_info")

    async def server_info(self) -> dict[str, Any]:
        """GET /server_info: the resolved ServerArgs, the version, and the schedulers' state."""
        return await self._question("/server_info")

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text by the server's own tokenizer, without special tokens."""
        body = {"prompt": list(texts), "add_special_tokens": False}
        answer = await self._retrying("POST", "/tokenize", body, self.deadlines.engine_control_s)
        with self.reading("/tokenize"):
            return [list(map(int, ids)) for ids in answer["tokens"]]

    async def openapi(self) -> dict[str, Any]:
        """GET /openapi.json: every route and the fields of its body."""
        return await self._question("/openapi.json")

    # ------------------------------------------------------------------------------------------------- transport

    def error(self, operation: str, rule: str, kind: type[EngineError] = EngineError) -> EngineError:
        """An error with this engine's name and log."""
        where = f"read the engine's log {self.log_path}" if self.log_path else f"check the server at {self.url}"
        return kind(self.name, operation, rule, where)

    @contextmanager
    def reading(self, operation: str) -> Iterator[None]:
        """Context manager for untrusted answers: any exception inside becomes an EngineError."""
        try:
            yield
        except UserError:
            raise
        except MALFORMED as error:
            message = f"{type(error).__name__}: {error}"[:500]
            raise self.error(operation, f"invalid answer: {message}") from error

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
        answer = await self._retrying("POST", path, body, timeout_s, connection=retry)
        self._refuse(path, answer)
        return answer

    async def _once(self, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        """Send a step of a weight update without retries: a peer waits for it in a collective."""
        limit = self.deadlines.weight_sync_s
        answer = await self._call("POST", path, body, limit, connect_s=limit)
        self._refuse(path, answer)
        return answer

    def _refuse(self, path: str, answer: dict[str, Any]) -> None:
        if answer.get("success") is False:
            raise self.error(path, f"refused: {answer.get('message')}")

    async def _retrying(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float, connection: bool = True
    ) -> dict[str, Any]:
        """`_call`, retried while the engine is too busy.

        Args:
            connection: also retry failed connections, three attempts in total; only for repeatable calls.
        """

        def should_retry(state: tenacity.RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome is not None else None
            broke = connection and error is not None and isinstance(error.__cause__, aiohttp.ClientConnectionError)
            return isinstance(error, EngineBusy) or (broke and state.attempt_number < 3)

        retrying = tenacity.AsyncRetrying(
            retry=should_retry, stop=tenacity.stop_after_delay(timeout_s), reraise=True,
            wait=tenacity.wait_exponential(multiplier=0.1, max=2.0),
        )  # fmt: skip
        return await retrying(self._call, method, path, body, timeout_s)

    async def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None,
        timeout_s: float,
        limit: int = LARGEST_ANSWER,
        connect_s: float = CONNECT_S,
    ) -> dict[str, Any]:
        """One HTTP exchange; `{}` for empty and plain-text answers. Raises EngineError for every failure.

        Args:
            body: bytes are sent unchanged.
            limit: largest answer, in bytes.
            connect_s: seconds of `timeout_s` for the connection.
        """
        data = orjson.dumps(body) if isinstance(body, dict) else body
        try:
            async with self._open().request(
                method,
                self.url + path,
                data=data,
                headers={"Content-Type": "application/json", **self.keys.headers(path)},
                timeout=_timeout(timeout_s, connect_s),
            ) as response:
                content, status = await _read(response, limit), response.status
        except aiohttp.ConnectionTimeoutError as error:
            rule = f"no connection within {min(connect_s, timeout_s):g} s; the server is dead or unreachable"
            raise self.error(path, rule, EngineDied) from error
        except TimeoutError as error:
            raise self.error(path, f"no answer within {timeout_s:g} s", EngineDied) from error
        except aiohttp.ClientError as error:
            rule = f"the connection broke ({str(error) or repr(error)}); the server is dead or unreachable"
            raise self.error(path, rule, EngineDied) from error
        if content is None:
            raise self.error(path, f"the answer exceeds the limit of {limit:,} bytes")
        if status != 200:
            kind = EngineBusy if status in BUSY else EngineError
            raise self.error(path, f"HTTP {status}: {_message(content)}", kind)
        with self.reading(path):
            return load_answer(content)


def _with(adapter: AdapterVersion | None) -> dict[str, Any]:
    return {} if adapter is None else {"lora_path": adapter.name}


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """The body; None if it exceeds `limit` bytes, after which reading stops."""
    parts, length = list[bytes](), 0
    async for part in response.content.iter_any():
        length += len(part)
        if length > limit:
            return None
        parts.append(part)
    return b"".join(parts)


def _timeout(seconds: float, connect_s: float = CONNECT_S) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, connect_s))


def _message(content: bytes) -> str:
    """The readable part of an error answer in any format."""
    text = content.decode(errors="replace").strip()[:2000]
    try:
        answer = orjson.loads(content)
        error = answer.get("error")
        return str(error["message"] if isinstance(error, dict) else answer.get("message", answer))[:2000]
    except MALFORMED:
        return text

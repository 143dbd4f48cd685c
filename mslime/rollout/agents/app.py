"""The HTTP server for agents: aiohttp, one per process; each rollout has its own path and key.

A reply is sent when the turn is complete, since its parts are unknown before. Until then, blanks or comments keep the
connection alive: a weight update takes longer than most clients' time-out.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from mslime import network
from mslime.config.errors import ConfigError, UserError
from mslime.network import url_of
from mslime.rollout.agents.anthropic import Messages
from mslime.rollout.agents.messages import ChatError, ContextFull, SessionOver
from mslime.rollout.agents.openai_chat import ChatCompletions, Completions
from mslime.rollout.agents.requests import MODEL, Dialect, Request, ServedReply
from mslime.rollout.agents.responses import Responses
from mslime.rollout.agents.session import ChatSession, ReplyTurn
from mslime.web_server import BodyError, ListeningServer, admitted, read_body, same_key, serve

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelEndpoint:
    """Address of one rollout's model for an agent.

    Attributes:
        url: for clients that append /v1, such as Anthropic's.
        openai_url: for clients that do not, such as OpenAI's.
        key: the API key; of this rollout alone.
        model: a name for the model. Any other works too.
    """

    url: str
    openai_url: str
    key: str
    model: str


class ServedRollout:
    """A served rollout.

    Args:
        token: prefix of its key, by which a proxy in front can refuse all other requests.

    Attributes:
        name: in its URL. key: API key of its agents.
        under_way: unfinished attempts, awaited or not. on_end: called when one ends.
    """

    def __init__(self, chat: ChatSession, token: str = "") -> None:
        self.chat, self.name = chat, secrets.token_hex(8)
        self.key = f"{token}{'.' if token else ''}{secrets.token_urlsafe(24)}"
        self._attempts: dict[bytes, asyncio.Task[list[ReplyTurn]]] = {}
        self.under_way = 0
        self.on_end: Callable[[], None] = lambda: None

    def attempt(self, request: Request, body: bytes, marked: bool) -> asyncio.Task[list[ReplyTurn]]:
        """Task of the replies to a request. A caller that gives up leaves it running: a repeat may join it.

        It ends with a ChatError if the request cannot be answered; see `ChatSession`.

        Args:
            body: with the path; equal for a repeat. marked: the client marked the request as a repeat.
        """
        digest = hashlib.blake2b(body, digest_size=16).digest()
        attempt = self._attempts.get(digest) if marked else None
        if attempt is not None and not _failed(attempt):
            self.chat.counts["joined_retries"] += 1
            return attempt
        attempt = self._attempts[digest] = asyncio.create_task(self._replies(request))
        self.under_way += 1
        attempt.add_done_callback(self._ended)
        return attempt

    def _ended(self, attempt: asyncio.Task[list[ReplyTurn]]) -> None:
        self.under_way -= 1
        if not attempt.cancelled() and attempt.exception() is not None:  # else asyncio logs it if no client waits
            log.debug("a request failed: %s", attempt.exception())
        self.on_end()

    async def served_replies(self, turns: Sequence[ReplyTurn], log_probs: bool) -> list[ServedReply]:
        """Replies with the data that the client receives."""
        return [
            ServedReply(turn, tuple(await self.chat.spell(ServedReply(turn).ids)) if log_probs else ())
            for turn in turns
        ]

    @property
    def recorded(self) -> Mapping[str, ReplyTurn]:
        """Turns by the name that clients use."""
        return self.chat.forest.named

    async def _replies(self, request: Request) -> list[ReplyTurn]:
        self.chat.ignore(request.ignored)
        self.chat.check_replies(max(1, len(request.prompts)) * request.count)
        asked = [
            self.chat.complete(prompt if isinstance(prompt, str) else list(prompt), max_tokens=request.max_tokens,
                               stop=request.stop)
            for prompt in request.prompts for _ in range(request.count)
        ] or [
            self.chat.reply(request.messages, request.tools, max_tokens=request.max_tokens, stop=request.stop)
            for _ in range(request.count)
        ]  # fmt: skip
        try:
            turns = [await asked[0]] if len(asked) == 1 else await _concurrently(asked)
        except asyncio.CancelledError:
            if not self.chat.closed:
                raise
            raise SessionOver("rollout", "over", "ended while the reply was generated", "stop the agent") from None
        self.chat.answered(turns)
        return turns


async def _concurrently(asked: Sequence[Coroutine[Any, Any, ReplyTurn]]) -> list[ReplyTurn]:
    """All replies; if one fails, all are cancelled."""
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _failed(attempt: asyncio.Task[list[ReplyTurn]]) -> bool:
    return attempt.done() and (attempt.cancelled() or attempt.exception() is not None)


DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Completions(), Responses(), Messages())
COUNT = "/v1/messages/count_tokens"
NO_RETRY = {"x-should-retry": "false"}
_SSE = "text/event-stream"


@dataclass(frozen=True)
class ServerTimings:
    """Timings of the server, in seconds.

    Attributes:
        quiet: wait for a reply before the first keep-alive. beat: interval of keep-alives.
        body: limit for receiving the whole body of a request.
    """

    quiet: float = 5.0
    beat: float = 10.0
    body: float = 60.0


class ModelServer:
    """Serves the model to the rollouts of a process.

    Args:
        host, port: address to listen on; port 0: any.
        token: prefix of every key.
        max_body: largest request, bytes.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, token: str = "", max_body: int = 64 << 20,
        patience: ServerTimings | None = None,
    ) -> None:  # fmt: skip
        self._host, self._port, self._token = host, port, token
        self._max_body, self._patience = max_body, patience or ServerTimings()
        self._sessions: dict[str, ServedRollout] = {}
        self._ended: dict[str, None] = {}
        self._listening: ListeningServer | None = None
        self._starting = asyncio.Lock()
        self._address = ""

    async def open(self, chat: ChatSession) -> tuple[ModelEndpoint, ServedRollout]:
        """Serve a rollout. The first one starts the server.

        Raises:
            ConfigError: the server cannot listen on the address.
        """
        async with self._starting:
            if self._listening is None:
                await self._start()
        session = ServedRollout(chat, self._token)
        self._sessions[session.name] = session
        url = f"{self._address}/{session.name}"
        return ModelEndpoint(url, f"{url}/v1", session.key, MODEL), session

    async def end(self, session: ServedRollout) -> None:
        """The rollout has ended: refuse its requests from now on, and cancel running turns."""
        if self._sessions.pop(session.name, None) is not None:
            self._ended[session.name] = None
            while len(self._ended) > 100_000:  # names are kept to explain the refusal to a late agent
                del self._ended[next(iter(self._ended))]
        await session.chat.stop()

    async def close(self) -> None:
        """Stop serving."""
        for session in list(self._sessions.values()):
            await self.end(session)
        if self._listening is not None:
            await self._listening.close()
            self._listening = None

    async def _start(self) -> None:
        app = web.Application(client_max_size=self._max_body)
        for dialect in DIALECTS:
            app.router.add_post("/{session}" + dialect.path, partial(self.answer, dialect=dialect))
        app.router.add_post("/{session}" + COUNT, self._count)
        app.router.add_get("/{session}/v1/models", self._models)
        app.router.add_get("/{session}/v1/models/{name:.+}", self._models)
        try:
            listening = listen(self._host, self._port)
        except OSError as error:
            hint = "set an address of this machine and a free port, or remove the settings"
            rule = f"cannot listen on this address ({error})"
            raise ConfigError("rollout.server", f"{self._host}:{self._port}", rule, hint) from error
        self._listening = await serve(app, listening, handler_cancellation=True, shutdown_timeout=1.0)
        self._address = url_of(self._host, listening.getsockname()[1])
        log.info("the model server for agents listens at %s", self._address)

    # --------------------------------------------------------------------------------------------------- one request

    async def answer(self, http: web.Request, dialect: Dialect) -> web.StreamResponse:
        """Answer a request for replies."""
        try:
            session, raw = await self._admit(http)
            request = dialect.read(body_of(raw), session.recorded)
        except Exception as error:  # any error goes to the client
            return refusal(dialect, error)
        return await deliver(http, dialect, session, request, raw, self._patience)

    async def _admit(self, http: web.Request) -> tuple[ServedRollout, bytes]:
        """The session of a request, and the request's body."""
        name = http.match_info["session"]
        session = self._sessions.get(name)
        if session is None:
            rule = "the rollout has ended" if name in self._ended else "there is no rollout at this URL"
            raise _Refused(400 if name in self._ended else 404, "url", rule, "stop the agent")
        keys = http.headers.get("authorization", "").removeprefix("Bearer ").strip(), http.headers.get("x-api-key", "")
        if not any(same_key(key, session.key) for key in keys):
            raise _Refused(401, "api_key", "is not the key of this rollout", "use the key of its endpoint")
        admitted(http)
        try:
            return session, await read_body(http, self._patience.body, "rollout.server.max_request_mib")
        except BodyError as error:
            raise _Refused(error.status, "body", error.rule, error.hint) from error

    async def _count(self, http: web.Request) -> web.Response:
        """Anthropic's count_tokens."""
        dialect = DIALECTS[-1]
        try:
            session, raw = await self._admit(http)
            request = dialect.read(body_of(raw), {})
            return _json({"input_tokens": await session.chat.count(request.messages, request.tools)})
        except Exception as error:  # any error goes to the client
            return refusal(dialect, error)

    async def _models(self, http: web.Request) -> web.Response:
        try:
            await self._admit(http)
        except _Refused as error:
            return refusal(DIALECTS[0], error)
        name = http.match_info.get("name")  # any name, as in requests
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "mslime"}
        return _json(model if name else {"object": "list", "data": [model]})


async def deliver(
    http: web.Request, dialect: Dialect, session: ServedRollout, request: Request, raw: bytes, patience: ServerTimings
) -> web.StreamResponse:
    """Answer a request for replies of a session.

    Args:
        raw: the request's body.
    """
    marked = http.headers.get("x-stainless-retry-count", "0") != "0"
    try:
        attempt = session.attempt(request, http.path.encode() + b"\0" + raw, marked)
        response = await _wait(http, attempt, request.stream, patience)
        try:
            replies = await session.served_replies(attempt.result(), request.logprobs)
        except Exception as error:  # any error goes to the client
            return await _fail(http, dialect, response, error)
        response = await _send_event(http, dialect, request, replies, response)
    except ConnectionError:  # the client has disconnected: not an error, and its turn is not trained
        log.debug("a client disconnected before its reply was sent")
        return web.Response(status=499)
    for reply in replies:
        reply.turn.delivered = True
    return response


async def _wait(
    http: web.Request, attempt: asyncio.Task[list[ReplyTurn]], stream: bool, patience: ServerTimings
) -> web.StreamResponse | None:
    """Wait for the replies. Returns the response if it was begun as a keep-alive."""
    await asyncio.wait([attempt], timeout=patience.quiet)
    if attempt.done():
        return None
    response = web.StreamResponse(headers={"Content-Type": _SSE if stream else "application/json"})
    await response.prepare(http)
    while not attempt.done():
        await response.write(b": waiting\n\n" if stream else b" ")
        await asyncio.wait([attempt], timeout=patience.beat)
    return response


class _Refused(Exception):
    """A request without a valid session, with its HTTP status."""

    def __init__(self, status: int, field: str, rule: str, hint: str) -> None:
        self.status, self.field = status, field
        super().__init__(f"{field}: {rule}\n  hint: {hint}")


LOOPBACK = ("127.0.0.1", "localhost", "::1")


def own_clients(host: str) -> Any:
    """Middleware that refuses requests that a web page could send: a body whose content type is not JSON and, if the
    server listens on loopback, a foreign host name.

    Args:
        host: address of the server.
    """

    @web.middleware
    async def check(http: web.Request, handler: Any) -> web.StreamResponse:
        name = re.sub(r":\d*$", "", http.host).strip("[]").lower()
        if host in LOOPBACK and name not in LOOPBACK:
            return _json({"detail": f"{name} is not a name of this server: send requests to {host}"}, 421, NO_RETRY)
        if http.body_exists and http.content_type != "application/json":
            return _json({"detail": f"{http.content_type} is not supported: send application/json"}, 415, NO_RETRY)
        return await handler(http)

    return check


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any. Raises OSError."""
    if port == 0:
        return network.listen(host)
    return socket.create_server((host, port), backlog=1024, family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def body_of(raw: bytes) -> Mapping[str, Any]:
    """JSON object of a request. Raises ChatError for any other body."""
    try:
        found = orjson.loads(raw)
    except ValueError as error:
        raise ChatError("body", f"{raw[:40]!r}", f"is not valid JSON ({error})", "fix the request") from error
    if not isinstance(found, dict):
        raise ChatError("body", f"{found!r:.40}", "must be an object", "fix the request")
    return found


def _dumped(data: object) -> bytes:
    """JSON; falls back for numbers that orjson cannot write, since a model may have written them."""
    try:
        return orjson.dumps(data)
    except TypeError:
        return json.dumps(data).encode()


def _json(data: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=_dumped(data), status=status, headers=headers, content_type="application/json")


def _described(dialect: Dialect, error: BaseException) -> tuple[int, Mapping[str, Any]]:
    """(HTTP status, JSON) of an error. A client's mistake would fail again if repeated; other errors may not."""
    status, field, code, words = 503, "", "unavailable", str(error)
    if isinstance(error, _Refused):
        status, field, code = error.status, error.field, "refused"
    elif isinstance(error, ContextFull):
        status, field, code = 400, error.field, "context_length_exceeded"
        if error.most:
            words = f"{dialect.too_long(error.tokens, error.most)}\n{error}"
    elif isinstance(error, ChatError):
        status, field = 400, error.field
        code = "limit_reached" if field.startswith("rollout") else "invalid_request"
    return status, dialect.error(status, words, field, code)


def refusal(dialect: Dialect, error: BaseException) -> web.Response:
    """Error response in the form of its API."""
    status, body = _described(dialect, error)
    if status == 503 and not isinstance(error, UserError):
        log.warning("a request failed", exc_info=error)
    return _json(body, status, {} if status in (408, 503) else NO_RETRY)


async def _fail(
    http: web.Request, dialect: Dialect, begun: web.StreamResponse | None, error: BaseException
) -> web.StreamResponse:
    """Send an error. If a response was begun with status 200, a stream can carry it; else only the connection can be
    closed, and clients receive the error when they retry."""
    if begun is None:
        return refusal(dialect, error)
    if begun.content_type == _SSE:
        _, body = _described(dialect, error)
        await begun.write(_written("error", body))
        await begun.write_eof()
    elif http.transport is not None:
        http.transport.abort()
    return begun


async def _send_event(
    http: web.Request,
    dialect: Dialect,
    request: Request,
    replies: Sequence[ServedReply],
    begun: web.StreamResponse | None,
) -> web.StreamResponse:
    """Write the replies, and return when they are written."""
    if request.stream:
        body = b"".join(_written(name, data) for name, data in dialect.events(request, replies))
    else:
        body = _dumped(dialect.answer(request, replies))
    if begun is None:
        begun = web.Response(body=body, content_type=_SSE if request.stream else "application/json")
        await begun.prepare(http)
    else:
        await begun.write(body)
    await begun.write_eof()
    return begun


def _written(name: str, data: Mapping[str, Any] | str) -> bytes:
    """Bytes of a server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {text}\n\n".encode()

"""Accepted requests and their answers, which clients fetch by id.

A request is accepted once: sent again with the same id, it is the same future. Requests of one model run in the order
of their numbers, not of arrival, as the SDK sends parts of a batch concurrently and the first one last.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import orjson

from mslime.config.errors import UserError
from mslime_plugins.serve.client_errors import BUSY, ServeError, category_of

KEPT_S = 300.0
"""Seconds for which a fetched answer is kept, in case the client's connection broke during the fetch."""
JSON, PROTOBUF = "application/json", "application/x-protobuf"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FutureResult:
    """The body of a finished request, and its content type."""

    body: bytes
    kind: str = JSON

    @classmethod
    def of(cls, **values: object) -> FutureResult:
        """Of JSON values."""
        return cls(orjson.dumps(values))

    @classmethod
    def failed(cls, error: Exception) -> FutureResult:
        """A failure, which the SDK raises as RequestFailedError."""
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return cls.of(error=text, category=category_of(error))


Work = Callable[[], Awaitable[FutureResult]]


@dataclass
class Future:
    """A request: its owner, its answer, and the time of the first fetch."""

    owner: str
    task: asyncio.Task[FutureResult]
    fetched: float | None = None


class RequestOrder:
    """Runs numbered requests in order: each waits until the earlier ones are done."""

    def __init__(self) -> None:
        self._next = 0
        self._moved = asyncio.Event()

    async def wait(self, number: int) -> None:
        """Wait for the turn of `number`."""
        while number > self._next:
            await self._moved.wait()

    def done(self, number: int) -> None:
        """Pass the turn to the next number."""
        self._next = max(self._next, number + 1)
        self._moved.set()
        self._moved = asyncio.Event()


@dataclass
class Futures:
    """All requests of a server.

    Args:
        most: most unfinished requests.
    """

    most: int
    _all: dict[str, Future] = field(default_factory=dict[str, Future])
    _running: set[asyncio.Task[FutureResult]] = field(default_factory=set[asyncio.Task[FutureResult]])

    def take(self, request_id: str, owner: str, work: Work, turn: tuple[RequestOrder, int] | None = None) -> str:
        """Begin a request, unless it has already begun; returns its id.

        Args:
            owner: model or session: `drop` removes all requests of one.
            turn: of the model's requests.

        Raises:
            ServeError: there are too many (HTTP 429, after which the SDK waits).
        """
        if request_id in self._all:
            return request_id
        if self.unfinished >= self.most:
            raise ServeError("requests", self.unfinished, "too many requests are waiting (serve.max_requests)",
                             "retry later", BUSY)  # fmt: skip
        task = asyncio.create_task(_answered(request_id, work, turn), name=request_id)
        self._all[request_id] = Future(owner, task)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return request_id

    @property
    def unfinished(self) -> int:
        """Number of waiting or running requests."""
        return len(self._running)

    async def fetch(self, request_id: str, patience_s: float) -> FutureResult | None:
        """A request's answer; None if it is not ready within `patience_s`. Raises KeyError for an unknown id."""
        future = self._all[request_id]
        await asyncio.wait([future.task], timeout=patience_s)
        if not future.task.done():
            return None
        future.fetched = future.fetched or time.monotonic()
        if future.task.cancelled():
            return FutureResult.of(error="the request was cancelled", category="user")
        return future.task.result()

    def cancel(self, request_id: str) -> None:
        """Stop a request, if it exists."""
        if request_id in self._all:
            self._all[request_id].task.cancel()

    async def drop(self, owner: str) -> None:
        """Stop and remove all requests of an owner."""
        mine = {rid: future for rid, future in self._all.items() if future.owner == owner}
        for future in mine.values():
            future.task.cancel()
        if mine:
            await asyncio.wait([future.task for future in mine.values()])
        for rid in mine:
            del self._all[rid]

    def forget_fetched(self) -> None:
        """Remove answers that were fetched long ago."""
        now = time.monotonic()
        old = [rid for rid, each in self._all.items() if each.fetched is not None and now - each.fetched > KEPT_S]
        for rid in old:
            del self._all[rid]


async def _answered(request_id: str, work: Work, turn: tuple[RequestOrder, int] | None) -> FutureResult:
    begin = time.monotonic()
    try:
        if turn is not None:
            await turn[0].wait(turn[1])
        answer = await work()
    except Exception as error:  # reported to the client, whatever it is
        level = logging.INFO if category_of(error) == "user" else logging.ERROR
        _log.log(level, "%s failed: %s", request_id, error, exc_info=not isinstance(error, UserError))
        return FutureResult.failed(error)
    finally:
        if turn is not None:
            turn[0].done(turn[1])
    _log.info("%s: done in %.2f s", request_id, time.monotonic() - begin)
    return answer

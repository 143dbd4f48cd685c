"""Listening sockets of mslime's HTTP servers, their requests' bodies, and limits for connections without a key.

aiohttp limits neither connections nor the time until a request's headers arrive, and a process without free file
descriptors cannot reach its engines. So a connection is untrusted until a request on it carries the key: it is closed
after a while, and the oldest one is closed if there are too many. Trusted connections have no limits.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import socket
from contextlib import suppress
from typing import Any

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

STRANGER_S = 30.0
"""Seconds that a connection may last without a key."""
MOST_STRANGERS = 4096
"""Most connections without a key; at most a quarter of the process's file descriptors."""
_LOOK_S = 1.0
_MOST_FILES = 1 << 20
_UNREADABLE = (HttpProcessingError, ClientPayloadError, web.RequestPayloadError)


def _not_the_clients(record: logging.LogRecord) -> bool:
    """Whether a log record is not about an unreadable body: aiohttp logs these when it discards a body."""
    return record.exc_info is None or not isinstance(record.exc_info[1], _UNREADABLE)


_log = logging.getLogger(__name__)
_log.addFilter(_not_the_clients)


class ListeningServer:
    """A listening server. Belongs to one event loop; close it there."""

    def __init__(self, runner: web.AppRunner, most: int, patience_s: float) -> None:
        self._runner, self._most, self._patience_s = runner, most, patience_s
        self._server: asyncio.Server | None = None
        self._strangers: dict[RequestHandler, float] = {}
        self._looking: asyncio.Task[None] | None = None

    async def start(self, listening: socket.socket) -> None:
        """Accept connections."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accepted, sock=listening, backlog=1024)
        self._looking = asyncio.create_task(self._look(), name="connections without a key")

    async def close(self) -> None:
        """Stop accepting, and close existing connections."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def trust(self, http: web.BaseRequest) -> None:
        """Mark the request's connection as trusted: the request carries the key."""
        self._strangers.pop(http.protocol, None)

    def _accepted(self) -> RequestHandler:
        assert self._runner.server is not None, "it is set up"
        handler = self._runner.server()
        self._strangers[handler] = asyncio.get_running_loop().time()
        if len(self._strangers) > self._most:
            self._forget_ended()
        while len(self._strangers) > self._most:
            self._turn_out(next(iter(self._strangers)))
        return handler

    def _forget_ended(self) -> None:
        begun = asyncio.get_running_loop().time() - _LOOK_S  # a newer one may have no transport yet
        for handler in [h for h, since in self._strangers.items() if h.transport is None and since < begun]:
            del self._strangers[handler]

    def _turn_out(self, handler: RequestHandler) -> None:
        self._strangers.pop(handler, None)
        handler.force_close()

    async def _look(self) -> None:
        """Check connections every second. Late ones are closed at the next check: after a stall of the loop, their
        request may have arrived unread.
        """
        late = list[RequestHandler]()
        while True:
            await asyncio.sleep(_LOOK_S)
            self._forget_ended()
            for handler in late:
                if handler in self._strangers:
                    self._turn_out(handler)
            before = asyncio.get_running_loop().time() - self._patience_s
            late = [handler for handler, since in self._strangers.items() if since < before]


_LISTENING = web.AppKey("listening", ListeningServer)


async def serve(
    app: web.Application, listening: socket.socket, *, most: int | None = None, patience_s: float = STRANGER_S,
    **runner: Any,
) -> ListeningServer:  # fmt: skip
    """Serve an application on a socket. Handlers call `admitted` once a request carries the key.

    Args:
        most, patience_s: see `MOST_STRANGERS`, `STRANGER_S`.
        runner: of `web.AppRunner`.
    """
    files = raise_file_limit()
    set_up = web.AppRunner(app, access_log=None, logger=_log, **runner)
    served = ListeningServer(set_up, most or max(16, min(MOST_STRANGERS, files // 4)), patience_s)
    app[_LISTENING] = served
    await set_up.setup()
    await served.start(listening)
    return served


def admitted(http: web.Request) -> None:
    """Trust the connection of a request that carries the key."""
    if (served := http.app.get(_LISTENING)) is not None:
        served.trust(http)


class BodyError(Exception):
    """The body of a request cannot be read.

    Attributes:
        status: HTTP status. rule, hint: the reason, and an action of the client.
    """

    def __init__(self, status: int, rule: str, hint: str) -> None:
        super().__init__(f"{rule}\n  hint: {hint}")
        self.status, self.rule, self.hint = status, rule, hint


async def read_body(http: web.Request, patience_s: float | None = None, setting: str = "") -> bytes:
    """Body of a request, unpacked.

    Args:
        patience_s: limit for its arrival. setting: name of the setting of the largest body.

    Raises:
        BodyError: it is too large, too slow, or cannot be unpacked.
    """
    try:
        async with asyncio.timeout(patience_s):
            return await http.read()
    except TimeoutError:
        raise BodyError(408, f"did not arrive within {patience_s:g} s", "send it faster") from None
    except web.HTTPRequestEntityTooLarge:
        hint = f"send less, or raise {setting}" if setting else "send less"
        raise BodyError(413, f"is larger than {http.client_max_size} bytes", hint) from None
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())  # aiohttp's has two lines
        raise BodyError(400, f"cannot be read ({reason})", "fix the request") from error


def same_key(given: str, key: str) -> bool:
    """Whether a key from a header, whatever its bytes, equals this one; takes constant time."""
    return secrets.compare_digest(given.encode(errors="surrogateescape"), key.encode())


def raise_file_limit() -> int:
    """Raise this process's limit of file descriptors to its maximum; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft

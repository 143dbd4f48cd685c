"""How mslime's own HTTP servers listen, and what one who has shown no key may take of them.

aiohttp bounds neither connections nor the time in which a request's headers arrive, and a process without file
descriptors can reach its engines no more. So a connection is a stranger's until a request on it has shown the key: it
is closed after a while, and the oldest one where there are too many. What has shown the key is let alone.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

STRANGER_S = 30.0
"""For which a connection may show no key."""
MOST_STRANGERS = 4096
"""Connections without a key; at most a quarter of the descriptors that the process may have."""
_LOOK_S = 1.0
_MOST_FILES = 1 << 20


class Listening:
    """A server that listens. Belongs to one event loop; close it there."""

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
        """Accept no more, and end what there is."""
        if self._looking is not None:
            self._looking.cancel()
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def trust(self, http: web.BaseRequest) -> None:
        """The request has shown the key."""
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
        """Every second. Who is late is closed at the next look: where the loop stood still for long, the request may
        be here and unread."""
        late = list[RequestHandler]()
        while True:
            await asyncio.sleep(_LOOK_S)
            self._forget_ended()
            for handler in late:
                if handler in self._strangers:
                    self._turn_out(handler)
            before = asyncio.get_running_loop().time() - self._patience_s
            late = [handler for handler, since in self._strangers.items() if since < before]


_LISTENING = web.AppKey("listening", Listening)


async def serve(
    app: web.Application, listening: socket.socket, *, most: int | None = None, patience_s: float = STRANGER_S,
    **runner: Any,
) -> Listening:  # fmt: skip
    """Serve an application on a socket. Handlers call `admitted` once a request has shown its key.

    Args:
        most, patience_s: see `MOST_STRANGERS`, `STRANGER_S`.
        runner: of `web.AppRunner`.
    """
    files = raise_file_limit()
    set_up = web.AppRunner(app, access_log=None, **runner)
    served = Listening(set_up, most or max(16, min(MOST_STRANGERS, files // 4)), patience_s)
    app[_LISTENING] = served
    await set_up.setup()
    await served.start(listening)
    return served


def admitted(http: web.Request) -> None:
    """The request has shown its key, so its connection is no stranger's."""
    if (served := http.app.get(_LISTENING)) is not None:
        served.trust(http)


def same_key(given: str, key: str) -> bool:
    """Whether a key from a header, whatever bytes it has, is this one; takes as long for any."""
    return secrets.compare_digest(given.encode(errors="surrogateescape"), key.encode())


def raise_file_limit() -> int:
    """Let this process have as many file descriptors as it may give itself; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft

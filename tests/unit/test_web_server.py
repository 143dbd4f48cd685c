"""What a connection that has shown no key may take of mslime's HTTP servers."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from mslime import network, web_server
from mslime.web_server import admitted, raise_file_limit, same_key, serve

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Connection]]


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "_LOOK_S", 0.01)


@asynccontextmanager
async def served(most: int = 100, impatient: asyncio.Event | None = None) -> AsyncIterator[Connect]:
    """A server whose key is `k`, and what connects to it. It loses all patience with strangers when it is told to."""

    async def answer(http: web.Request) -> web.Response:
        if not same_key(http.headers.get("X-API-Key", ""), "k"):
            return web.Response(status=401)
        admitted(http)
        return web.Response(text="in")

    app = web.Application()
    app.router.add_get("/", answer)
    listening = network.listen()
    server = await serve(app, listening, most=most, shutdown_timeout=0.1)
    opened = list[asyncio.StreamWriter]()

    async def connect() -> Connection:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        opened.append(writer)
        if impatient is not None and impatient.is_set():
            server._patience_s = 0.0
        return reader, writer

    try:
        yield connect
    finally:
        for writer in opened:
            writer.close()
        await server.close()


async def status(connection: Connection, key: bytes) -> int:
    reader, writer = connection
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-API-Key: " + key + b"\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    if b"Content-Length: 2" in head:
        await reader.readexactly(2)
    return int(head.split()[1])


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))


def test_of_connections_without_a_key_the_oldest_are_closed_and_one_with_the_key_stays() -> None:
    async def work() -> None:
        async with served(most=5) as connect:
            known = await connect()
            assert await status(known, b"k") == 200
            crowd = [await connect() for _ in range(4)]
            for _, writer in crowd:
                writer.write(b"GET / HTTP/1.1\r\nX: ")
            late = [await connect() for _ in range(5)]
            assert [await reader.read() for reader, _ in crowd] == [b""] * 4, "closed"
            assert await status(late[-1], b"wrong") == 401 and await status(known, b"k") == 200
            more = await connect()
            assert await status(more, b"k") == 200

    run(work)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX-Slow: ", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_connection_that_shows_no_key_for_long_is_closed(sent: bytes) -> None:
    async def work() -> None:
        impatient = asyncio.Event()
        async with served(impatient=impatient) as connect:
            known = await connect()
            assert await status(known, b"k") == 200
            impatient.set()
            reader, writer = await connect()
            writer.write(sent)
            assert b"200" not in await reader.read(), "which ends when it is closed"
            assert await status(known, b"k") == 200, "with the key it may stay"

    run(work)


def test_a_key_of_any_bytes_is_only_wrong() -> None:
    async def work() -> None:
        async with served() as connect:
            assert await status(await connect(), b"\xff\xfe") == 401

    run(work)


def test_a_server_has_as_many_descriptors_as_it_may_have() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

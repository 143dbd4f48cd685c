"""What a connection that has shown no key may take of mslime's HTTP servers."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web

from mslime import network, web_server
from mslime.config.rollout import AtroposConfig
from mslime.rollout.agents.app import ModelEndpoint, ModelServer
from mslime.run.endpoint import FILE_NAME, ControlEndpoint, ScaleOrders
from mslime.web_server import admitted, raise_file_limit, same_key, serve
from mslime_plugins.atropos.atropos_server import AtroposServer
from mslime_plugins.environments.nemo_gym import GymRequestRouter
from tests.fixtures.fake_serve import KEY, fake_server
from tests.unit.test_chat_session import Chat

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


async def test_of_connections_without_a_key_the_oldest_are_closed_and_one_with_the_key_stays() -> None:
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


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX-Slow: ", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_a_connection_that_shows_no_key_for_long_is_closed(sent: bytes) -> None:
    impatient = asyncio.Event()
    async with served(impatient=impatient) as connect:
        known = await connect()
        assert await status(known, b"k") == 200
        impatient.set()
        reader, writer = await connect()
        writer.write(sent)
        assert b"200" not in await reader.read(), "which ends when it is closed"
        assert await status(known, b"k") == 200, "with the key it may stay"


Asked = tuple[str, str, dict[str, str]]
"""Method, URL and headers of a request."""


@asynccontextmanager
async def model_server(directory: Path) -> AsyncIterator[tuple[Asked, Asked]]:
    server = ModelServer()
    endpoint, _ = await server.open(Chat().session)
    url = f"{endpoint.url}/v1/models"
    yield ("GET", url, {"Authorization": f"Bearer {endpoint.key}"}), ("GET", url, {"Authorization": "Bearer x"})
    await server.close()


@asynccontextmanager
async def control_endpoint(directory: Path) -> AsyncIterator[tuple[Asked, Asked]]:
    with ControlEndpoint(directory, ScaleOrders()):
        found = json.loads((directory / FILE_NAME).read_text())
        url = f"{found['url']}/engines"
        yield ("GET", url, {"Authorization": f"Bearer {found['key']}"}), ("GET", url, {"Authorization": "Bearer x"})


@asynccontextmanager
async def tinker_server(directory: Path) -> AsyncIterator[tuple[Asked, Asked]]:
    with fake_server(directory) as server:
        url = f"{server.url}/api/v1/healthz"
        yield ("GET", url, {"X-API-Key": KEY}), ("GET", url, {"X-API-Key": "x"})


@asynccontextmanager
async def atropos_server(directory: Path) -> AsyncIterator[tuple[Asked, Asked]]:
    settings = AtroposConfig.model_validate({"port": network.free_port(), "token": "s3cret"})
    rollouts = SimpleNamespace(registry=SimpleNamespace(touch=lambda: None))
    server = AtroposServer(settings, directory / "atropos.json", 1 << 20, rollouts)  # type: ignore[arg-type]
    await server.start()
    wrong = server.address.replace("s3cret", "x")
    yield ("GET", f"{server.address}/health", {}), ("GET", f"{wrong}/health", {})
    await server.close()


@asynccontextmanager
async def relay_of_nemo_gym(directory: Path) -> AsyncIterator[tuple[Asked, Asked]]:
    relay = GymRequestRouter("127.0.0.1", 0, "k")
    async with relay.serving(ModelEndpoint("http://x", "http://x/v1", "key", "m")):
        url, json_body = f"http://127.0.0.1:{relay.port}/v1/responses", {"Content-Type": "application/json"}
        yield ("POST", url, {**json_body, "Authorization": "Bearer k"}), ("POST", url, json_body)


Opened = Callable[[Path], AbstractAsyncContextManager[tuple[Asked, Asked]]]
SERVERS: list[Opened] = [model_server, control_endpoint, tinker_server, atropos_server, relay_of_nemo_gym]


@pytest.mark.parametrize("opened", SERVERS, ids=lambda s: s.__name__)
async def test_every_server_lets_a_connection_stay_that_has_shown_its_key_and_no_other(
    opened: Opened,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trusted = list[str]()
    monkeypatch.setattr(web_server.ListeningServer, "trust", lambda self, http: trusted.append(http.path))

    async with opened(tmp_path) as (right, wrong), aiohttp.ClientSession() as http:
        for (method, url, headers), counted in ((wrong, 0), (right, 1)):
            async with http.request(method, url, headers=headers):
                assert len(trusted) == counted


@pytest.mark.parametrize("packed", ["gzip", "deflate"])
@pytest.mark.parametrize(
    ("opened", "method", "path"),
    [
        (model_server, "POST", "chat/completions"), (model_server, "GET", "models"), (control_endpoint, "POST", ""),
        (tinker_server, "POST", "create_session"), (tinker_server, "POST", "sessions/none/finish"),
        (atropos_server, "POST", "register-env"), (relay_of_nemo_gym, "POST", ""),
    ],
)  # fmt: skip
async def test_a_body_that_cannot_be_unpacked_is_the_clients_mistake(
    opened: Opened, method: str, path: str, packed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as ((_, url, headers), _), aiohttp.ClientSession() as http:
        url = url.rpartition("/")[0] + "/" + path if path else url
        given = {**headers, "Content-Type": "application/json", "Content-Encoding": packed}
        async with http.request(method, url, headers=given, data=b"x" * 99) as response:
            assert response.status == (422 if opened is atropos_server else 400), await response.text()
            assert "cannot be read" in json.dumps(await response.json())
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_a_key_of_any_bytes_is_only_wrong() -> None:
    async with served() as connect:
        assert await status(await connect(), b"\xff\xfe") == 401


async def test_strangers_have_half_a_minute_and_take_a_quarter_of_the_descriptors_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for files, most in ((400, 100), (1 << 20, web_server.MOST_STRANGERS), (8, 16)):
        monkeypatch.setattr(web_server, "raise_file_limit", lambda files=files: files)
        server = await serve(web.Application(), network.listen())
        assert (server._most, server._patience_s) == (most, 30.0)
        await server.close()


def test_a_server_has_as_many_descriptors_as_it_may_have() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

"""Where a running run can be asked about its engines: HTTP on loopback, with a key in a file that only its user reads.

`GET /engines` tells how they are, `POST /engines` gives an order (`orders.Order`). Both answer `Orders.standing`, the
second with the order's `number`. `mslime scale` is its client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import web

from mslime import network
from mslime.config.errors import ConfigError, UserError
from mslime.control.orders import Order, Orders
from mslime.logs import hide
from mslime.threads import in_thread
from mslime.web_server import admitted, same_key, serve

FILE_NAME = "control.json"
ANSWER_S = 10.0
LARGEST_BODY = 64 * 1024
_log = logging.getLogger(__name__)


class ControlEndpoint:
    """Takes orders in a thread of its own. A context manager.

    Args:
        run_dir: where `control.json` lies while it is open.
    """

    def __init__(self, run_dir: Path, orders: Orders) -> None:
        self._record, self._orders = run_dir / FILE_NAME, orders
        self._key = secrets.token_urlsafe(32)
        self._loop = asyncio.new_event_loop()
        hide(self._key)

    def __enter__(self) -> Self:
        listening = network.listen()
        ready: Future[None] = Future()
        self._done = in_thread(self._serve, listening, ready)
        ready.result(timeout=ANSWER_S)
        network.write_address(self._record, listening, self._key)
        return self

    def __exit__(self, *exc: object) -> None:
        self._record.unlink(missing_ok=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._done.exception(timeout=ANSWER_S)

    def _serve(self, listening: socket.socket, ready: Future[None]) -> None:
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_get("/engines", self._tell)
        app.router.add_post("/engines", self._order)
        loop = self._loop
        served = loop.run_until_complete(serve(app, listening))
        ready.set_result(None)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(served.close())
            loop.close()

    async def _tell(self, request: web.Request) -> web.Response:
        self._let_in(request)
        return web.json_response(self._orders.standing())

    async def _order(self, request: web.Request) -> web.Response:
        self._let_in(request)
        try:
            body: Any = json.loads(await request.text())
            if not isinstance(body, dict):
                raise ConfigError("order", body, "is no object", 'send {"engines": 3}')
            order = Order.read(body)
        except UserError as error:
            return web.json_response({"error": str(error)}, status=400)
        except ValueError as error:
            return web.json_response({"error": f"the body is no JSON: {error}"}, status=400)
        _log.info("asked for %s", order.describe())
        return web.json_response({"number": self._orders.give(order), **self._orders.standing()})

    def _let_in(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "")
        if not same_key(given, f"Bearer {self._key}"):
            raise web.HTTPUnauthorized(text="the key is in control.json of the run")
        admitted(request)


async def ask(run_dir: Path, order: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a running run says of its engines, after an order if there is one.

    Raises:
        ConfigError: no run is running there, or it refuses the order.
    """
    record = run_dir / FILE_NAME
    try:
        at = json.loads(record.read_text())
        url, key, host = str(at["url"]), str(at["key"]), str(at["host"])
    except FileNotFoundError:
        raise ConfigError("RUN", str(run_dir), f"no run is training there: it has no {FILE_NAME}",
                          "name the directory of one that is (output_dir/NAME)") from None  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("RUN", str(record), f"cannot be read: {error!r}",
                          "ask as the user who started the run; a run writes it when it starts") from None  # fmt: skip
    if host != socket.gethostname():
        raise ConfigError("RUN", str(run_dir), f"its driver runs on {host}, and listens there only",
                          f"call mslime scale on {host}")  # fmt: skip
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    try:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}, timeout=timeout) as session,
            session.request("GET" if order is None else "POST", f"{url}/engines", json=order) as response,
        ):
            text, status = await response.text(), response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConfigError("RUN", str(run_dir), f"the run does not answer ({error!r}): it has ended, or was killed",
                          "look at its console and logs; continue it with mslime train") from None  # fmt: skip
    if status != 200:
        said = json.loads(text).get("error", text) if text.startswith("{") else text
        raise ConfigError("order", str(order), f"the run refuses it: {said}", "see mslime scale --help")
    return json.loads(text)

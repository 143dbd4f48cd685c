"""Control endpoint of a running run's engines: HTTP on loopback, with a key in a file that only its user can read.

`GET /engines` returns their states, `POST /engines` gives an order (`ScaleOrder`). Both return `ScaleOrders.standing`,
the second with the order's `number`. `mslime scale` is its client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp
from aiohttp import web

from mslime import network
from mslime.config.errors import ConfigError, UserError
from mslime.config.keys import NO_KEYS, EngineKeys
from mslime.logs import hide
from mslime.threads import in_thread
from mslime.web_server import BodyError, admitted, read_body, same_key, serve

# Orders for a running run's engines, and their states. They are shared by the loop, which carries out orders at weight
# syncs, and the endpoint's thread, which takes orders at any time.

State = Literal["starting", "joining", "serving", "leaving", "gone"]
MOST_ENGINES = 4096


@dataclass
class EngineState:
    """One engine as `mslime scale` shows it.

    Attributes:
        url: empty until it has one.
        launched: by mslime; else attached.
        state: starting: not yet up. joining: checked, gets weights in the next sync. leaving: gets no further requests.
            gone: dead.
        why: cause of its death, or of a failed start.
        syncs: weight syncs that it took part in since it was started or attached.
    """

    name: str
    url: str
    launched: bool
    state: State
    why: str = ""
    syncs: int = 0


@dataclass(frozen=True)
class ScaleOrder:
    """One request; exactly one of engines, attach and drain is given.

    Attributes:
        engines: number of engines for mslime to run.
        attach: URL of a server to add. keys: API keys that it requires.
        drain: name or URL of an engine to remove.
    """

    engines: int | None = None
    attach: str = ""
    keys: EngineKeys = field(default=NO_KEYS, repr=False)
    drain: str = ""

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> ScaleOrder:
        """From the body of a request. Raises ConfigError."""
        known = ("engines", "attach", "drain", "api_key", "admin_api_key")
        for name, value in body.items():
            if name not in known:
                raise ConfigError(name, value, "unknown field", f"use one of {', '.join(known)}")
            if name != "engines" and not isinstance(value, str):
                raise ConfigError(name, value, "must be a string", "send a JSON string")
        given = [name for name in ("engines", "attach", "drain") if body.get(name) not in (None, "")]
        if len(given) != 1:
            raise ConfigError("order", ", ".join(given) or "nothing", "an order has exactly one of engines, attach and "
                              "drain", "send one of them")  # fmt: skip
        engines = body.get("engines")
        if engines is not None and (isinstance(engines, bool) or not isinstance(engines, int) or engines < 0):
            raise ConfigError("engines", engines, "must be an integer >= 0", "send the total number of engines")
        if engines is not None and engines > MOST_ENGINES:
            raise ConfigError("engines", engines, f"must be at most {MOST_ENGINES}", "request fewer engines")
        api = str(body.get("api_key") or "")
        keys = EngineKeys(api, str(body.get("admin_api_key") or api))
        return cls(engines, str(body.get("attach") or "").rstrip("/"), keys, str(body.get("drain") or "").rstrip("/"))

    def describe(self) -> str:
        """A description without the keys."""
        if self.engines is not None:
            return f"{self.engines} engines"
        return f"attach {self.attach}" if self.attach else f"drain {self.drain}"


class ScaleOrders:
    """Waiting orders, and the newest state of each engine. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[tuple[int, ScaleOrder]] = []
        self._count = 0
        self._results: dict[int, str] = {}
        self._engines: list[EngineState] = []

    def give(self, order: ScaleOrder) -> int:
        """Add an order; returns its number."""
        with self._lock:
            self._count += 1
            self._new.append((self._count, order))
            return self._count

    def take(self) -> list[tuple[int, ScaleOrder]]:
        """All orders not taken yet, in order. They count as waiting until `record`."""
        with self._lock:
            taken, self._new = self._new, []
            return taken

    def record(self, number: int, result: str) -> None:
        """Record the result of an order; call it after `show`, because clients then read the engines' states."""
        with self._lock:
            self._results[number] = result

    def show(self, engines: Sequence[EngineState]) -> None:
        """Record the engines' current states."""
        with self._lock:
            self._engines = [EngineState(**asdict(engine)) for engine in engines]

    def standing(self) -> dict[str, Any]:
        """For JSON: the engines, the numbers of waiting orders, and the result of each other order."""
        with self._lock:
            return {
                "engines": [asdict(engine) for engine in self._engines],
                "waiting": [number for number in range(1, self._count + 1) if number not in self._results],
                "results": {str(number): result for number, result in self._results.items()},
            }


FILE_NAME = "control.json"
ANSWER_S = 10.0
LARGEST_BODY = 64 * 1024
_log = logging.getLogger(__name__)


class ControlEndpoint:
    """Serves the control endpoint in a thread. A context manager.

    Args:
        run_dir: directory of `control.json` while it is open.
    """

    def __init__(self, run_dir: Path, orders: ScaleOrders) -> None:
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
        app.router.add_get("/engines", self._standing)
        app.router.add_post("/engines", self._order)
        loop = self._loop
        served = loop.run_until_complete(serve(app, listening))
        ready.set_result(None)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(served.close())
            loop.close()

    async def _standing(self, request: web.Request) -> web.Response:
        self._let_in(request)
        return web.json_response(self._orders.standing())

    async def _order(self, request: web.Request) -> web.Response:
        self._let_in(request)
        try:
            body: Any = json.loads(await read_body(request))
            if not isinstance(body, dict):
                raise ConfigError("order", body, "must be a JSON object", 'send {"engines": 3}')
            order = ScaleOrder.read(body)
        except UserError as error:
            return web.json_response({"error": str(error)}, status=400)
        except BodyError as error:
            return web.json_response({"error": f"body: {error}"}, status=error.status)
        except (ValueError, RecursionError) as error:
            return web.json_response({"error": f"the body is not valid JSON: {error}"}, status=400)
        _log.info("received an order: %s", order.describe())
        return web.json_response({"number": self._orders.give(order), **self._orders.standing()})

    def _let_in(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "")
        if not same_key(given, f"Bearer {self._key}"):
            raise web.HTTPUnauthorized(text="wrong or missing key: it is in control.json of the run")
        admitted(request)


async def ask(run_dir: Path, order: dict[str, Any] | None = None) -> dict[str, Any]:
    """States of a running run's engines, after sending an order if there is one.

    Raises:
        ConfigError: no run is running there, or it rejects the order.
    """
    record = run_dir / FILE_NAME
    try:
        at = json.loads(record.read_text())
        url, key, host = str(at["url"]), str(at["key"]), str(at["host"])
    except FileNotFoundError:
        raise ConfigError("RUN", str(run_dir), f"no run is training in this directory: it has no {FILE_NAME}",
                          "specify the directory of a running run (output_dir/NAME)") from None  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("RUN", str(record), f"cannot be read: {error!r}",
                          "call mslime scale as the user who started the run") from None  # fmt: skip
    if host != socket.gethostname():
        raise ConfigError("RUN", str(run_dir), f"its driver runs on {host}, and accepts connections only from there",
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
                          "read its console output and logs; continue it with mslime train") from None  # fmt: skip
    if status != 200:
        message = json.loads(text).get("error", text) if text.startswith("{") else text
        raise ConfigError("order", str(order), f"the run rejected it: {message}", "see mslime scale --help")
    return json.loads(text)

"""HTTP calls of a sync to its engines, over connections that are kept: a sender has one `EngineHttp`, a commit another.

A client for each call would build a TLS context each time, 17 ms of CPU even for plain http, which with 64 engines was
most of a sync.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import httpx

from mslime.config.keys import NO_KEYS, Endpoint, EngineKeys
from mslime.config.layout import EngineLayout
from mslime.weights.errors import sync_error

_P = ParamSpec("_P")
_R = TypeVar("_R")

KEEPALIVE_S = 2.0
"""Idle connections are given up before the server closes them, which it does after 5 s."""


@dataclass(frozen=True)
class EngineInfo:
    """One SGLang server: its URL, its parallel layout (every tensor-parallel rank receives weights) and its keys."""

    url: str
    layout: EngineLayout = field(default_factory=EngineLayout)
    keys: EngineKeys = NO_KEYS

    @property
    def ranks(self) -> int:
        """Processes that join the weight-update group."""
        return self.layout.tp


def in_thread(call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
    """`call(*args)` in a daemon thread: an abandoned wait must not keep the process from ending, as a pool's would."""
    future: Future[_R] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"weights-{call.__name__}").start()
    return future


def encode(body: Mapping[str, object]) -> bytes:
    """A request's body, for those that are sent more than once."""
    return json.dumps(dict(body), separators=(",", ":")).encode()


class EngineHttp:
    """Connections to some engines, for calls from any thread.

    Args:
        urls: of the engines; where none of them is https, no TLS context is made.
        deadline_s: for each call.
    """

    def __init__(self, urls: Sequence[str], deadline_s: float) -> None:
        self._deadline_s = deadline_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S)
        tls = any(url.startswith("https://") for url in urls)
        self._client = httpx.Client(timeout=deadline_s, trust_env=False, limits=limits, verify=tls)

    def post(
        self, engine: EngineInfo | Endpoint, path: str, body: Mapping[str, object] | bytes, phase: str
    ) -> dict[str, Any]:
        """POST to an engine and return its JSON answer.

        Raises:
            WeightSyncError: no answer in time, no connection, an HTTP error, or `success: false`.
        """
        where, content = engine.url + path, body if isinstance(body, bytes) else encode(body)
        headers = {"Content-Type": "application/json", **engine.keys.headers(path)}
        try:
            response = self._client.post(where, content=content, headers=headers)
            is_json = "json" in response.headers.get("content-type", "")
            answer = response.json() if is_json else {"message": response.text}
        except httpx.TimeoutException as error:
            raise sync_error(phase, where, f"no answer within {self._deadline_s:.0f} s") from error
        except httpx.HTTPError as error:
            raise sync_error(phase, where, f"the engine cannot be reached: {error!r}") from error
        if response.status_code != 200 or not answer.get("success", True):
            raise sync_error(phase, where, f"HTTP {response.status_code}: {answer.get('message', answer)}")
        return answer

    def describe(self, endpoint: Endpoint) -> EngineInfo:
        """Ask a running server for the number of processes that receive weights.

        Raises:
            WeightSyncError: it cannot be reached, or it runs pipeline- or data-parallel replicas, whose ranks SGLang
                0.5.23 does not count in a weight-update group.
        """
        path = "/server_info"
        try:
            response = self._client.get(endpoint.url + path, headers=endpoint.keys.headers(path))
            info = response.raise_for_status().json()
        except httpx.HTTPError as error:
            raise sync_error("connect", endpoint.url, f"the engine does not describe itself: {error!r}") from error
        for name in ("pp_size", "dp_size"):
            if info[name] != 1:
                raise sync_error(
                    "connect", endpoint.url,
                    f"{name} = {info[name]}; weights can be sent to engines with {name} 1 only",
                    "start more engines instead",
                )  # fmt: skip
        return EngineInfo(endpoint.url, EngineLayout(int(info["tp_size"]), int(info["ep_size"])), endpoint.keys)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

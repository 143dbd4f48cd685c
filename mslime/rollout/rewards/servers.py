"""Servers that rewards are asked of: JSON is posted to one of them, and again when the network or the server fails."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import numpy as np
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from mslime.config.errors import ConfigError
from mslime.config.reward import RewardServersConfig

MOST_BYTES = 64 * 2**20  # of an answer
AGAIN = (408, 425, 429)  # and every 5xx
T = TypeVar("T")


class AgainError(Exception):
    """A request failed in a way that may pass."""


class RewardRefusedError(Exception):
    """The server answered, and will not answer otherwise."""


class RewardServers:
    """One server, or a pool of equals. Belongs to one event loop.

    Args:
        place: the section that names them, for messages.
        limit_s: seconds for one attempt.
    """

    def __init__(self, config: RewardServersConfig, place: str, limit_s: float) -> None:
        self._config, self._place, self._limit_s = config, place, limit_s
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.concurrency)
        self._under_way = Counter(dict.fromkeys(config.urls, 0))

    async def start(self) -> None:
        """Open the connection pool. Raises ConfigError when the token's variable is not set."""
        headers = {"Content-Type": "application/json"}
        if self._config.auth_env is not None:
            headers["Authorization"] = f"Bearer {token_of(self._config.auth_env, self._place)}"
        timeout = aiohttp.ClientTimeout(total=self._limit_s)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=headers)

    async def ask(self, body: object, read: Callable[[Any], T]) -> T:
        """What `read` makes of the answer to `body`.

        Args:
            body: anything that JSON can hold.
            read: raises RewardRefusedError for an invalid answer, AgainError if another attempt may help.

        Raises:
            AgainError: the last attempt failed.
            RewardRefusedError: the server will not answer otherwise, or the body cannot be written as JSON.
        """
        if self._session is None:
            await self.start()
        data = as_json(body)
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._config.retries + 1), wait=wait_random_exponential(0.2, max=10), reraise=True,
            retry=retry_if_exception_type(AgainError),
        )  # fmt: skip
        failed = Counter[str]()
        async with self._slots:
            return await attempts(self._attempt, data, read, failed)

    async def close(self) -> None:
        """Give up the connections."""
        if self._session is not None:
            await self._session.close()

    async def _attempt(self, data: bytes, read: Callable[[Any], T], failed: Counter[str]) -> T:
        """Ask the server that has failed this request least, and of those the one with the fewest under way."""
        url = min(self._under_way, key=lambda u: (failed[u], self._under_way[u]))
        self._under_way[url] += 1
        try:
            return read(await self._post(url, data))
        except (AgainError, RewardRefusedError) as error:
            failed[url] += 1
            raise type(error)(f"{url} {error}") from error
        finally:
            self._under_way[url] -= 1

    async def _post(self, url: str, data: bytes) -> object:
        assert self._session is not None
        try:
            async with self._session.post(url, data=data, allow_redirects=False, proxy=proxy_of(url)) as answer:
                text = await _read(answer)
        except TimeoutError as error:
            raise AgainError(f"did not answer within {self._limit_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise AgainError(f"cannot be reached ({type(error).__name__}: {error})") from error
        if answer.status != 200:
            passing = answer.status in AGAIN or answer.status >= 500
            said = text[:200].decode(errors="replace")
            raise (AgainError if passing else RewardRefusedError)(f"answered HTTP {answer.status}: {said!r}")
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise RewardRefusedError(f"answered what is not JSON: {text[:80].decode(errors='replace')!r}") from error


def as_json(value: object) -> bytes:
    """A value as JSON, integers of any size included. Raises RewardRefusedError when there is no JSON of it."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # an integer beyond 64 bits, a lone surrogate, a key that is no text
        pass
    try:
        return json.dumps(
            value, default=lambda v: v.tolist() if isinstance(v, np.generic | np.ndarray) else str(v)
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardRefusedError(f"cannot be asked: the sample cannot be written as JSON ({error})") from error


def proxy_of(url: str) -> str | None:
    """The proxy that HTTP_PROXY, HTTPS_PROXY and NO_PROXY name for a URL; none for machines of one's own network."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        near = ipaddress.ip_address(host).is_private
    except ValueError:
        near = "." not in host  # localhost, a machine or service of the cluster
    return None if near or proxy_bypass(host) else getproxies().get(parts.scheme)


def token_of(variable: str, place: str) -> str:
    """The token that an environment variable holds. Raises ConfigError when it is not set.

    Args:
        place: the section that names it, for messages.
    """
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"{place}.auth_env", variable, "this environment variable is not set",
                          "export it where the run is started, or remove the setting")  # fmt: skip
    return token


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The body, up to MOST_BYTES. Raises RewardRefusedError when it goes on."""
    parts, size = list[bytes](), 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise RewardRefusedError(f"answered more than {MOST_BYTES} bytes")
    return b"".join(parts)

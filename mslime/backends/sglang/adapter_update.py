"""One engine's part in a sync of adapters: room for the newest, and what still runs under an older one.

Nothing is paused. The newest adapter is loaded beside those that requests have, new requests get it from one moment on,
and running ones keep theirs: they are interrupted, so that they go on under the new one, or end under their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from functools import partial

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.serving_adapters import AdapterVersion

ABORT_EVERY_S, LOOK_EVERY_S = 0.25, 0.01
"""A request can slip past an abort that reaches the engine before it does: it is told again."""


async def load(
    client: EngineClient, adapter: AdapterVersion, alive: int, others: Collection[AdapterVersion] = ()
) -> str:
    """Let an engine have an adapter; its URL.

    Args:
        alive: how many of this owner it serves at once, this one among them. Requests that have the oldest are
            interrupted until there is room.
        others: the newest of other owners, which an engine that joins gets as well: it may be asked for each.

    Raises:
        EngineError: it refuses, or holds on to its requests. EngineDied: it died meanwhile.
    """
    if adapter in client.adapters.loaded:
        return client.url
    while len(loaded := client.adapters.loaded_of(adapter.owner)) >= alive:
        oldest = loaded[0]
        requests = partial(client.adapters.requests_of, oldest)
        if not await _stopped(client, requests, client.deadlines.engine_control_s):
            raise client.error("/abort_request", f"requests with {oldest.name} were not stopped in time")
    await client.adapters.settled()
    joins = not client.adapters.newest
    if joins:
        for other in others:
            await client.load_adapter(other)
    await client.load_adapter(adapter)
    if joins:  # it was paused when it was admitted
        await client.resume()
        for other in others:
            client.adapters.switch(other)
    return client.url


async def interrupt_older(client: EngineClient, patience_s: float, owner: str = "") -> None:
    """Let requests with an older adapter of this owner than its newest return what they have. One that does not within
    `patience_s` ends under its own adapter."""
    requests = partial(client.adapters.requests_of_older, owner)
    if not owner and requests():
        await client.abort()  # one call for all; the few that are newer go on like the others
        await asyncio.sleep(LOOK_EVERY_S)
    await _stopped(client, requests, patience_s)


async def _stopped(client: EngineClient, requests: Callable[[], list[str]], patience_s: float) -> bool:
    """Whether none of these requests runs any more, within so many seconds. They are told now and then."""
    end = told = time.monotonic()
    end += patience_s
    while rids := requests():
        now = time.monotonic()
        if now > end:
            return False
        if now >= told:
            await asyncio.gather(*(client.abort(rid) for rid in rids))
            told = time.monotonic() + ABORT_EVERY_S
        await asyncio.sleep(LOOK_EVERY_S)
    return True

"""One engine's part in a sync of adapters: load the newest one and phase out older ones.

Nothing is paused. The newest adapter is loaded beside those in use, and new requests switch to it at one moment.
Running requests keep theirs: they are interrupted and continue under the new one, or finish under their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from functools import partial

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.serving_adapters import AdapterVersion

ABORT_EVERY_S, LOOK_EVERY_S = 0.25, 0.01
"""A request can reach the engine after an abort sent for it, so the abort is repeated."""


async def load(
    client: EngineClient, adapter: AdapterVersion, alive: int, others: Collection[AdapterVersion] = ()
) -> str:
    """Load an adapter into an engine; returns the engine's URL.

    Args:
        alive: how many of this owner it serves at once, including this one. Requests with the oldest are interrupted
            until a slot is free.
        others: the newest of other owners, which a joining engine also loads, because it may get requests for each.

    Raises:
        EngineError: it refuses, or its requests do not end. EngineDied: it died meanwhile.
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
    if joins:  # it was paused at its admission
        await client.resume()
        for other in others:
            client.adapters.switch(other)
    return client.url


async def interrupt_older(client: EngineClient, patience_s: float, owner: str = "") -> None:
    """Interrupt requests with an older adapter of this owner than its newest, so they return their tokens so far. A
    request that does not return within `patience_s` ends under its own adapter."""
    requests = partial(client.adapters.requests_of_older, owner)
    if not owner and requests():
        await client.abort()  # one call for all; the few newer requests continue like the others
        await asyncio.sleep(LOOK_EVERY_S)
    await _stopped(client, requests, patience_s)


async def _stopped(client: EngineClient, requests: Callable[[], list[str]], patience_s: float) -> bool:
    """Whether none of these requests runs any more within so many seconds; aborts are repeated."""
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

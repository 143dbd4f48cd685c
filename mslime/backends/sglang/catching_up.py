"""An engine that is back gets the weights of one that serves (`peers`), and counts as having their version."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from urllib.parse import urlsplit

from mslime.backends.sglang.client import EngineClient
from mslime.engine_plugin.wire import Offered, Transfer, Transferred


async def catch_up(client: EngineClient, giver: EngineClient) -> int:
    """Let a paused engine, which has no requests, serve the weights of another one, which goes on; their version.

    Nothing may send weights to either meanwhile. The version is stamped when the two hold the same bits: one that fails
    on the way claims nothing.

    Raises:
        EngineError: one of them has no plug-in for it, holds other tensors, or did not get through; it names which.
    """
    version, limit_s = await giver.version(), giver.deadlines.weight_sync_s
    name, host = uuid.uuid4().hex, urlsplit(giver.url).hostname or ""
    offer = Transfer("offer", name, host, limit_s / 2)
    port = (await giver.ask(offer, Offered)).port
    meeting = Transfer("give", name, host, limit_s / 2, port)
    given, taken = await asyncio.gather(
        giver.ask(meeting, Transferred), client.ask(replace(meeting, part="take"), Transferred), return_exceptions=True
    )
    for answer in (taken, given):
        if isinstance(answer, BaseException):
            raise answer
    assert isinstance(given, Transferred) and isinstance(taken, Transferred)
    if given != taken:
        sums = f"holds bits with the sums {[*taken.sums]}, and {giver.url}, which sent them, {[*given.sums]}"
        raise client.error("peer", sums)
    await client.flush_cache()
    await client.stamp(version)
    return version

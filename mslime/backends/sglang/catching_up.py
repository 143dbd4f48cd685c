"""An engine that is back gets the weights of one that serves (`peers`), and counts as having their version."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from urllib.parse import urlsplit

from mslime.backends.sglang.client import EngineClient
from mslime.config.errors import MALFORMED
from mslime.engine_plugin.wire import Transfer


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
    port = await giver.transfer(offer)
    try:
        meeting = Transfer("give", name, host, limit_s / 2, int(port))
    except MALFORMED as error:
        raise giver.error("peer", f"says {port!r} of the place to meet at") from error
    given, taken = await asyncio.gather(
        giver.transfer(meeting),
        client.transfer(replace(meeting, part="take")),
        return_exceptions=True,
    )
    for answer in (taken, given):
        if isinstance(answer, BaseException):
            raise answer
    if given != taken:
        raise client.error("peer", f"holds bits with the sums {taken}, and {giver.url}, which sent them, {given}")
    await client.flush_cache()
    await client.stamp(version)
    return version

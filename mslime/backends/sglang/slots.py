"""One engine of a pool, with its share of the requests."""

from __future__ import annotations

import asyncio
import time

from mslime.backends.sglang.client import EngineClient
from mslime.config.errors import EngineError


class EngineSlot:
    """One engine with its share of the requests.

    Args:
        concurrency: requests in flight; further ones wait, in order.
        ready: whether it may get requests at once.

    Attributes:
        error: cause of its death.
        answered: time (`time.monotonic`) of its last sign of life.
        missed: heartbeats since then.
        served: time (`time.monotonic`) of its last answer to a request: stronger than a sign of life, because SGLang
            also counts its scheduler's message about an aborted heartbeat.
        leaving: it gets no further requests, and is removed at the next weight update.
        ready: set when it has the adapters of the requests; until then they wait.
        proven: cleared while requests run under weights that are being probed; their answers wait until it is set.
    """

    def __init__(self, client: EngineClient, concurrency: int, ready: bool = True, *, leaving: bool = False) -> None:
        self.client = client
        self.assigned = 0
        self.limit = asyncio.Semaphore(concurrency)
        self.error: EngineError | None = None
        self.answered = self.served = time.monotonic()
        self.missed = 0
        self.leaving = leaving
        self.ready = asyncio.Event()
        if ready:
            self.ready.set()
        self.proven = asyncio.Event()
        self.proven.set()
        self._death: asyncio.Future[None] | None = None

    @property
    def death(self) -> asyncio.Future[None]:
        """Done when the engine is dead. Shared by all requests: a task for each would cost as much as the requests."""
        if self._death is None:
            self._death = asyncio.get_running_loop().create_future()
        return self._death

    def kill(self, error: EngineError) -> None:
        """Mark it as dead; the first cause is kept."""
        if self.error is None:
            self.error = error
            self.death.set_result(None)

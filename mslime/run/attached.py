"""Engines not launched by mslime (`sglang.urls`): take them over at the start of a run, and release them at its end.

A run that was killed leaves an attached engine with its process group, perhaps paused, perhaps with an open weight
update, and with abandoned requests. An engine does not report its groups. So every attempt records the names of its
groups in the run directory before it makes them, and the next attempt destroys them.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from mslime.backends.sglang.client import EngineClient, blocking
from mslime.config.errors import EngineError, UserError
from mslime.config.keys import Endpoint
from mslime.config.schema import DeadlineConfig
from mslime.weights.transport import group_name

RECORD = "weight_groups.json"
LEAVE_SECONDS = 15.0


def new_group(name: str) -> str:
    """Prefix of the names of an attempt's process groups with the engines; `name` is the run's."""
    return f"{name}-{uuid.uuid4().hex[:12]}"


class AttachedEngines:
    """The attached engines of one attempt of a run.

    Args:
        engines: their addresses and keys; empty if all are launched, until one is added.
        group: from `new_group`.
        senders: ranks that send weights.
    """

    def __init__(
        self, engines: Sequence[Endpoint], group: str, senders: Sequence[int], run_dir: Path, deadlines: DeadlineConfig
    ) -> None:
        self._engines, self._deadlines = tuple(engines), deadlines
        self._record = run_dir / RECORD
        self._senders, self._groups = senders, groups_of(senders, [group])

    def take_over(self) -> None:
        """Undo the state that a killed run may have left, and record the groups that this one will make.

        Raises:
            EngineError: an engine does not answer, or requires another key.
        """
        left = _recorded(self._record)
        self._take(self._engines, left)
        self._write({*left, *self._groups})

    def also(self, group: str) -> None:
        """Record a further prefix of group names, before such groups are made."""
        self._groups += groups_of(self._senders, [group])
        self._write({*_recorded(self._record), *self._groups})

    def add(self, engine: Endpoint) -> None:
        """Take over an engine that joins during the run. Raises as `take_over`."""
        left = _recorded(self._record)
        self._take([engine], left)
        self._engines = (*self._engines, engine)
        self._write({*left, *self._groups})

    def release(self, engine: Endpoint) -> None:
        """Clean an engine that has left the run, for use by other runs. Never raises: the engine may be dead."""
        if engine in self._engines:
            self._reset([engine], self._groups, LEAVE_SECONDS)
            self._engines = tuple(other for other in self._engines if other != engine)

    def _write(self, groups: Iterable[str]) -> None:
        if not self._engines:  # launched engines end with the run, and their groups with them
            return
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text(json.dumps(sorted(groups)))

    def leave(self, disconnect: Callable[[float], None]) -> None:
        """Free the engines of our groups, open updates and pauses. Never raises: it is called during shutdown.

        Args:
            disconnect: makes the trainer ranks leave first, within so many seconds.
        """
        if not self._engines:
            return
        with suppress(UserError):  # a rank that is gone or stuck holds nothing
            disconnect(LEAVE_SECONDS)
        if not self._reset(self._engines, self._groups, LEAVE_SECONDS):
            self._record.unlink(missing_ok=True)

    def _take(self, engines: Sequence[Endpoint], groups: Iterable[str]) -> None:
        silent = self._reset(engines, groups, self._deadlines.engine_control_s)
        for engine in engines:
            if (error := silent.get(engine.url)) is None:
                continue
            if "HTTP 401" in error.rule or "HTTP 403" in error.rule:
                raise EngineError(
                    "sglang.urls", engine.url, "the server requires an API key, or rejected the one it got",
                    "set sglang.api_key (and sglang.admin_api_key, if it has one) to env:NAME or file:PATH",
                ) from error  # fmt: skip
            raise EngineError("sglang.urls", engine.url, error.rule, "start the server, or correct the URL") from error

    def _reset(self, engines: Sequence[Endpoint], groups: Iterable[str], within_s: float) -> dict[str, EngineError]:
        """See `made_clean`; by URL."""
        limits = self._deadlines.controls_within(within_s)
        clients = [EngineClient(engine.url, engine.url, limits, keys=engine.keys) for engine in engines]
        return blocking(made_clean(clients, groups))


def groups_of(senders: Sequence[int], beginnings: Iterable[str]) -> list[str]:
    """Names of the process groups that these ranks make with the engines, from their prefixes (`new_group`)."""
    return [group_name(beginning, rank) for beginning in beginnings for rank in senders]


async def made_clean(
    clients: Sequence[EngineClient], groups: Iterable[str], *, flush: bool = False
) -> dict[str, EngineError]:
    """Make engines generate, without requests, updates or groups of ours, all concurrently; closes the clients.

    Args:
        flush: also drop their caches.

    Returns:
        Errors by name, of the engines that have one.
    """
    found, names = dict[str, EngineError](), tuple(groups)

    async def clean(client: EngineClient) -> None:
        async with client:
            try:
                await make_clean(client, names)
                if flush:
                    await client.flush_cache()
            except EngineError as error:
                found[client.name] = error

    async with asyncio.TaskGroup() as tasks:
        for client in clients:
            tasks.create_task(clean(client))
    return found


async def make_clean(client: EngineClient, groups: Iterable[str] = ()) -> None:
    """Drop an engine's requests, an open weight update and these process groups, and make it generate. HTTP 400 means
    that there was nothing to drop, and is accepted. Raises EngineError for all other failures."""
    leave = [partial(client.leave_group, name) for name in groups]
    for undo in (client.abort, client.end_weight_update, *leave, client.resume):
        try:
            await undo()
        except EngineError as error:
            if "HTTP 400" not in error.rule:
                raise


def _recorded(path: Path) -> list[str]:
    """Groups of killed attempts; empty if the file is missing or damaged, since it is only an aid."""
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []

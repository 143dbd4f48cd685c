"""Engines that somebody else runs (`sglang.urls`): taken over as a run finds them, and left ready for the next one.

A run that was killed leaves an attached engine with its process group, perhaps paused, perhaps with an open weight
update, and with requests that nobody waits for. An engine does not tell which groups it is in, so every attempt writes
the names of its own into the run directory before it makes them, and the next attempt of the run destroys those.
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
    """What the names of an attempt's process groups with the engines begin with; `name` is the run's."""
    return f"{name}-{uuid.uuid4().hex[:12]}"


class AttachedEngines:
    """The attached engines of one attempt of a run.

    Args:
        engines: where they are, and their keys; none where all are launched, until one is added.
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
        """Undo what a killed run may have left, and write down what this one will leave if it is killed.

        Raises:
            EngineError: an engine does not answer, or asks for another key.
        """
        left = _recorded(self._record)
        self._take(self._engines, left)
        self._write({*left, *self._groups})

    def also(self, group: str) -> None:
        """Groups of other names follow: write them down before they are made."""
        self._groups += groups_of(self._senders, [group])
        self._write({*_recorded(self._record), *self._groups})

    def add(self, engine: Endpoint) -> None:
        """An engine that joins the run on its way. Raises as `take_over`."""
        left = _recorded(self._record)
        self._take([engine], left)
        self._engines = (*self._engines, engine)
        self._write({*left, *self._groups})

    def release(self, engine: Endpoint) -> None:
        """An engine has left the run: leave it as somebody else's run may find it. Never raises: it may be dead."""
        if engine in self._engines:
            self._reset([engine], self._groups, LEAVE_SECONDS)
            self._engines = tuple(other for other in self._engines if other != engine)

    def _write(self, groups: Iterable[str]) -> None:
        if not self._engines:  # those that mslime launched end with the run, and their groups with them
            return
        self._record.parent.mkdir(parents=True, exist_ok=True)
        self._record.write_text(json.dumps(sorted(groups)))

    def leave(self, disconnect: Callable[[float], None]) -> None:
        """Leave the engines without our groups, open updates and pauses. Never raises: it is called on the way out.

        Args:
            disconnect: lets the trainer ranks leave first, within so many seconds.
        """
        if not self._engines:
            return
        with suppress(UserError):  # a rank that is gone, or stuck, leaves nothing
            disconnect(LEAVE_SECONDS)
        if not self._reset(self._engines, self._groups, LEAVE_SECONDS):
            self._record.unlink(missing_ok=True)

    def _take(self, engines: Sequence[Endpoint], groups: Iterable[str]) -> None:
        silent = self._reset(engines, groups, self._deadlines.engine_control_s)
        for engine in engines:
            if engine.url in silent:
                _refuse_silence(engine, silent[engine.url])

    def _reset(self, engines: Sequence[Endpoint], groups: Iterable[str], within_s: float) -> dict[str, EngineError]:
        """See `made_clean`; by URL."""
        limits = self._deadlines.controls_within(within_s)
        clients = [EngineClient(engine.url, engine.url, limits, keys=engine.keys) for engine in engines]
        return blocking(made_clean(clients, groups))


def groups_of(senders: Sequence[int], beginnings: Iterable[str]) -> list[str]:
    """Names of the process groups that these ranks make with the engines, from what they begin with (`new_group`)."""
    return [group_name(beginning, rank) for beginning in beginnings for rank in senders]


async def made_clean(
    clients: Sequence[EngineClient], groups: Iterable[str], *, flush: bool = False
) -> dict[str, EngineError]:
    """Let engines generate, and know no requests, updates or groups of ours, all at once; closes the clients.

    Args:
        flush: let them forget what they have cached, too.

    Returns:
        What is wrong with those of which something is, by name.
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
    """Let an engine have no requests, no open weight update, none of these process groups, and generate. What there is
    nothing of is refused with HTTP 400, which is as good. Raises EngineError for all else."""
    leave = [partial(client.leave_group, name) for name in groups]
    for undo in (client.abort, client.end_weight_update, *leave, client.resume):
        try:
            await undo()
        except EngineError as error:
            if "HTTP 400" not in error.rule:
                raise


def _refuse_silence(engine: Endpoint, error: EngineError) -> None:
    if "HTTP 401" in error.rule or "HTTP 403" in error.rule:
        raise EngineError(
            "sglang.urls", engine.url, "the server asks for a key, or for another one",
            "set sglang.api_key (and sglang.admin_api_key, if it has one) to env:NAME or file:PATH",
        ) from error  # fmt: skip
    raise EngineError("sglang.urls", engine.url, error.rule, "start the server, or correct the URL") from error


def _recorded(path: Path) -> list[str]:
    """Groups of attempts that were killed; nothing when the file is missing or damaged, since it only helps."""
    try:
        names = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []

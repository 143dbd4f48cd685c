"""SGLang servers as receivers of a trainer rank's weights: blocking calls, and futures of calls.

A rank's own work is synchronous, and SGLang answers a weight request only after the weights have arrived, through a
broadcast of the waiting rank. So requests run on an event loop in a thread, with the usual client and persistent
connections.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from mslime.backends.sglang.client import EngineClient, NoPlugIn
from mslime.config.errors import MALFORMED, ChangesRefused, EngineError, WeightSyncError, sync_error
from mslime.config.keys import Endpoint, EngineInfo
from mslime.config.schema import DeadlineConfig
from mslime.engine_plugin import wire
from mslime.engine_plugin.wire import CANNOT, OWN_LOADER, RECORDED, parse_sum

_T = TypeVar("_T")
CLOSE_SECONDS = 10.0
NO_PLUG_IN = f"{OWN_LOADER}the server lacks mslime's plug-in"
WITHOUT_PLUG_IN = "the server was started without mslime's plug-in"
USE_PLUG_IN = (
    "set weights.transport: broadcast, or start the server with mslime/engine_plugin/path_entry on its PYTHONPATH"
)
_PHASES: dict[type[wire.Request | wire.OwnRequest], str] = {
    wire.TakeIpc: "send", wire.ForgetDirectory: "disconnect", wire.LeaveGroup: "disconnect",
}  # fmt: skip
"""Phase names of requests sent after the first bucket."""
_log = logging.getLogger(__name__)


class SGLangPort:
    """Engines that receive weights: `weights.transport.EnginePort`. For one rank; all of its threads may call it.

    Args:
        deadlines: `weight_sync_s` for each call about weights, `engine_control_s` for `describe`.

    Attributes:
        reports: (URL, the engine's report on loading a bucket), each once.
    """

    def __init__(self, deadlines: DeadlineConfig) -> None:
        self._deadlines = deadlines
        self._clients: dict[str, EngineClient] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.reports: set[tuple[str, str]] = set()

    def describe(self, engine: Endpoint) -> EngineInfo:
        """Ask a running server for the number of processes that receive weights.

        Raises:
            WeightSyncError: it cannot be reached, or it has pipeline- or data-parallel replicas, whose ranks SGLang
                0.5.23 does not count in a weight-update group.
        """
        client = self._client(engine)
        info = self._submit(client.server_info(), "connect", engine.url).result()
        try:
            sizes = {name: int(info[name]) for name in ("tp_size", "pp_size", "dp_size")}
            machines = int(info.get("nnodes", 1))
        except MALFORMED as error:
            raise sync_error("connect", engine.url, f"the engine's description is invalid: {error!r}") from error
        for name in ("pp_size", "dp_size"):
            if sizes[name] != 1:
                raise sync_error(
                    "connect", engine.url,
                    f"{name} = {sizes[name]}; weights can only be sent to engines with {name} 1",
                    "start more engines instead",
                )  # fmt: skip
        drafts = info.get("speculative_algorithm") is not None
        return EngineInfo(engine.url, sizes["tp_size"], engine.keys, machines, drafts)

    def ask(
        self, engine: EngineInfo, request: wire.Request | wire.OwnRequest, hint: str = ""
    ) -> Future[wire.Answer | wire.Loaded]:
        """See `EnginePort`. Raises WeightSyncError with the plug-in's message if the request fails."""

        async def exchange() -> wire.Answer | wire.Loaded:
            client = self._client(engine.endpoint)
            match request:
                case wire.JoinGroup() as r:
                    await client.join_group(r.host, r.port, r.rank, r.world_size, r.name, r.backend)
                    return wire.Answer()
                case wire.LeaveGroup():
                    await client.leave_group(request.name)
                    return wire.Answer()
                case _:
                    kind = wire.Loaded if isinstance(request, wire.TakeIpc) else wire.Answer
            try:
                reply = await client.ask(request, kind)
            except NoPlugIn as error:
                raise sync_error("transport", engine.url, WITHOUT_PLUG_IN, USE_PLUG_IN) from error
            if isinstance(reply, wire.Loaded):
                self._note(engine, reply.how)
            elif reply.why_not:
                raise sync_error("transport", engine.url, reply.why_not, hint)
            return reply

        return self._submit(exchange(), _PHASES.get(type(request), "connect"), engine.url)

    def load(self, engine: EngineInfo, update: bytes) -> Future[wire.Loaded]:
        """See `EnginePort`. Each new report of an engine's loading is logged once."""

        async def loaded() -> wire.Loaded:
            client = self._client(engine.endpoint)
            try:
                message = await client.receive_bucket(update)
            except EngineError as error:
                if wire.REFUSED not in error.rule:
                    raise
                raise ChangesRefused("weights.send", engine.url, error.rule, "send the whole bucket") from error
            with client.reading("loading report"):
                found = wire.decode(message)
            reply = found if isinstance(found, wire.Loaded) else wire.Loaded(message)
            self._note(engine, reply.how)
            return reply

        return self._submit(loaded(), "send", engine.url)

    def _note(self, engine: EngineInfo, report: str) -> None:
        """Log an engine's loading report, once for each engine and report."""
        if (engine.url, report) not in self.reports:
            self.reports.add((engine.url, report))
            _log.info(
                "%s: a bucket was %s", engine.url, report if report.startswith((RECORDED, OWN_LOADER)) else NO_PLUG_IN
            )

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        loop, self._loop = self._loop, None
        clients, self._clients = self._clients, {}
        if loop is None:
            return

        async def close_all() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()  # an engine that no longer answers
            for client in clients.values():
                await client.close()

        asyncio.run_coroutine_threadsafe(close_all(), loop).result(CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)

    def _client(self, engine: Endpoint) -> EngineClient:
        if engine.url not in self._clients:
            self._clients[engine.url] = EngineClient(engine.url, engine.url, self._deadlines, keys=engine.keys)
        return self._clients[engine.url]

    def _submit(self, call: Coroutine[Any, Any, _T], phase: str, where: str) -> Future[_T]:
        async def named() -> _T:
            try:
                return await call
            except WeightSyncError:
                raise
            except EngineError as error:
                raise sync_error(phase, where, f"{error.value}: {error.rule}") from error

        if self._loop is None:
            self._loop = loop = asyncio.new_event_loop()

            def run() -> None:
                loop.run_forever()
                loop.close()

            # Daemon thread: an abandoned wait must not keep the process from ending.
            threading.Thread(target=run, daemon=True, name="weight requests").start()
        return asyncio.run_coroutine_threadsafe(named(), self._loop)


# Comparison of the engine ranks' tensors with the trainer's, by checksums. Pure functions, no requests.
#
# An engine distributes a tensor over its ranks: whole, in parts or several times, and only it knows how. Each rank
# reports two sums: of its elements, and of their places in the tensor. Ranks with the same places must have the same
# sum; different places must add up to the sums of the whole tensor, so none is missing.

Sums = Mapping[str, str]
"""Checksum and places (`wire.format_sum`) of tensors, by Hugging Face name."""

_HALF, _WHOLE = 1 << 63, 1 << 64


def why_not(reported: Sequence[Sums]) -> str:
    """Why ranks cannot report checksums of some or all tensors; empty if all are reported."""
    return next((why for rank in reported if (why := rank.get(CANNOT))), "")


def compare(where: str, reported: Sequence[Sums], expected: Sums) -> int:
    """Compare one engine's checksums with those of the whole tensors; returns the number of tensors.

    Args:
        where: the engine, for the message.
        reported: by rank of the engine. If a rank cannot report everything (`why_not`), tensors without a report are
            skipped.

    Raises:
        WeightSyncError: a tensor differs, or is incomplete.
    """
    parts = [rank for rank in reported if CANNOT in rank]
    comparable = {name: want for name, want in expected.items() if all(name in part for part in parts)}
    wrong = {name: fault for name, want in comparable.items() if (fault := _fault(name, reported, want))}
    if wrong:
        name, fault = next(iter(wrong.items()))
        raise sync_error(
            "check", f"{where}: {name}",
            f"{fault}; {len(wrong)} of {len(comparable)} tensors differ",
            "if the run's first sync was equal and this is its second, set weights.loader: model; else use another "
            "weights.transport",
        )  # fmt: skip
    return len(comparable)


def _fault(name: str, ranks: Sequence[Sums], want: str) -> str:
    """The fault of a tensor; empty if there is none."""
    by_places = dict[int, tuple[int, int]]()
    for number, rank in enumerate(ranks):
        report = rank.get(name, "")
        numbers = parse_sum(report)
        if numbers is None:
            return f"rank {number}: {report}" if report else f"rank {number} did not load it"
        total, places = numbers
        first, before = by_places.setdefault(places, (number, total))
        if total != before:
            return f"rank {number} has other values than rank {first} in the same places"
    whole_total, whole_places = map(int, want.split())
    if _added(by_places) != whole_places:
        return "the engine does not have all of it"
    return "" if _added(total for _, total in by_places.values()) == whole_total else "the engine has other values"


def _added(numbers: Iterable[int]) -> int:
    """Sum modulo 2^64, as int64."""
    return (sum(numbers) + _HALF) % _WHOLE - _HALF

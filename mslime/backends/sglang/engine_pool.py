"""Several engines as one: request routing, concurrency limits, dead engines, and the weight update of all.

SGLang's own router drops `return_routed_experts`, so mslime balances over the servers itself. The least busy engine
takes a new session, and later requests of a session follow it, because its prefix is cached there. A dead engine fails
its requests at once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mslime.backends.sglang.client import EngineClient, EngineDied
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult, ProbeRequest, ScoreRequest
from mslime.backends.sglang.port import Sums, compare, why_not
from mslime.backends.sglang.serving_adapters import AdapterVersion, interrupt_older, load_version
from mslime.config.base import EngineTag, PauseMode
from mslime.config.errors import EngineError, WeightSyncError, sync_error
from mslime.data.probe import ProbeScores

T = TypeVar("T")
MAX_SESSIONS = 65536
INTERRUPT_S = 5.0
"""Seconds for interrupted requests to return; later ones continue under their own adapter."""
MISSED = 3
"""Missed heartbeats in a row until an engine is dead. One alone may be lost if this machine was suspended."""
_NO_CHECKSUMS = "weights are not compared: the engine cannot return checksums"
_NO_PLUG_IN = "it was started without mslime/engine_plugin/path_entry on its PYTHONPATH"
_log = logging.getLogger(__name__)


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


class Heartbeats:
    """Sends heartbeats to engines while they generate. Belongs to one event loop.

    A hanging engine is thus dead before its requests time out. Answers to requests are signs of life. After a while
    without any, this sends `GET /health`; SGLang 0.5.23 then waits for output of its scheduler and detokenizer, and
    generates a token if they are idle. Paused engines would not answer and are skipped. An unanswered heartbeat stays
    open: SGLang aborts closed ones and counts the scheduler's abort message as a sign of life, so an engine with a
    hanging detokenizer would seem alive.

    Args:
        silence_s: seconds after which a silent engine is dead; infinite: no heartbeats.
        engines: returns the watched engines; called at each beat.
    """

    def __init__(self, silence_s: float, engines: Callable[[], Iterable[EngineSlot]]) -> None:
        self._silence_s, self._engines = silence_s, engines
        self._beat_s = silence_s / (MISSED + 1)
        self._watching: asyncio.Task[None] | None = None
        self._unanswered: dict[EngineSlot, set[asyncio.Task[bool]]] = {}

    def start(self) -> None:
        """Start heartbeats: engines generate from now on."""
        now = time.monotonic()
        for engine in self._engines():
            engine.answered, engine.missed = now, 0
        if self._watching is None and math.isfinite(self._silence_s):
            self._watching = asyncio.create_task(self._watch(), name="heartbeats of engines")

    def stop(self) -> None:
        """Stop heartbeats: engines are paused, or left."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        for engine in list(self._unanswered):
            self._forget(engine)

    async def _watch(self) -> None:
        while True:
            began = time.monotonic()
            silent = [e for e in self._engines() if e.error is None and began - e.answered >= self._beat_s]
            await asyncio.gather(*(self._ask(engine) for engine in silent))
            await asyncio.sleep(max(0.0, began + self._beat_s - time.monotonic()))

    async def _ask(self, engine: EngineSlot) -> None:
        unanswered = self._unanswered.setdefault(engine, set())
        unanswered.add(asyncio.create_task(engine.client.healthy(self._silence_s)))
        ends = time.monotonic() + self._beat_s
        while unanswered and (left := ends - time.monotonic()) > 0:
            done, _ = await asyncio.wait(unanswered, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            unanswered -= done  # without those that failed
            if any(task.result() for task in done):
                self._forget(engine)
                engine.answered, engine.missed = time.monotonic(), 0
                return
        engine.missed += 1
        if engine.missed >= MISSED:
            self._forget(engine)
            engine.kill(engine.client.error("/health", f"no sign of life for {self._silence_s:g} s", EngineDied))

    def _forget(self, engine: EngineSlot) -> None:
        """Cancel the unanswered heartbeats of an engine."""
        for task in self._unanswered.pop(engine, ()):
            task.cancel()


@dataclass(frozen=True)
class UpdateMembers:
    """Engines that take part in a weight update.

    Attributes:
        urls: of these engines.
        gone: dead engines by name, with the cause.
        adapters: versions of the owner's adapters that are in use by requests or were just loaded.
    """

    urls: tuple[str, ...]
    gone: Mapping[str, str]
    adapters: frozenset[int] = frozenset()


class EnginePool:
    """Engines that share the work of a run. Belongs to one event loop.

    Args:
        clients: one per engine, with distinct names.
        concurrency: requests in flight per engine; further requests wait here, in order.
        silence_s: between `resume` and `pause`, an engine without a sign of life for this long is dead.
    """

    def __init__(self, clients: Sequence[EngineClient], concurrency: int, silence_s: float = math.inf) -> None:
        assert clients and concurrency > 0
        assert len({c.name for c in clients}) == len(clients), "engines need distinct names"
        self._concurrency = concurrency
        self._slots = [EngineSlot(client, concurrency) for client in clients]
        self._admitted: dict[str, EngineClient] = {}
        self._heartbeats = Heartbeats(silence_s, lambda: self._slots)
        self._sessions: OrderedDict[str, EngineSlot] = OrderedDict()
        self._paused: PauseMode = "retract"
        self._newest: dict[str, AdapterVersion] = {}  # of each owner, for joining engines

    def __len__(self) -> int:
        """Number of live engines."""
        return sum(slot.error is None for slot in self._slots)

    @property
    def clients(self) -> list[EngineClient]:
        """All engines, dead ones included."""
        return [slot.client for slot in self._slots]

    @property
    def dead(self) -> dict[str, EngineError]:
        """Dead engines by name, with the cause."""
        return {slot.client.name: slot.error for slot in self._slots if slot.error is not None}

    @property
    def missing(self) -> dict[str, EngineError]:
        """Dead engines by name without a replacement (a live engine admitted under the same name)."""
        return {name: error for name, error in self.dead.items() if name not in self._admitted}

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Run a request on the engine of its session, or on the least busy one.

        Raises:
            EngineError: the engine refused the request.
            EngineDied: the engine died meanwhile; the others continue.
        """
        return await self._one(request.session_id, lambda client: client.generate(request))

    async def generate_from(self, directory: Path | None, request: GenerateRequest, room: int) -> GenerateResult:
        """`generate` with an adapter that an engine loads at its first use (`ServingAdapters.lent`). Of equally busy
        engines, one that has it is preferred. A cancelled request is aborted.

        Args:
            directory: of the adapter; None: the base alone.
            room: most adapters of an engine.
        """

        async def one(client: EngineClient) -> GenerateResult:
            if directory is None:
                return await _or_abort(client, request)
            async with client.adapters.lent(directory, request.rid, room, client.load_adapter) as owner:
                return await _or_abort(client, replace(request, adapter=owner))

        return await self._one(
            request.session_id, one, lambda client: directory is not None and client.adapters.lends(directory)
        )

    async def take_back(self, directory: Path) -> None:
        """Make engines unload an adapter of `generate_from` after its last request."""
        live = [slot.client for slot in self._slots if slot.error is None]
        await asyncio.gather(*(client.adapters.take_back(directory) for client in live))

    async def score(self, request: ScoreRequest) -> NDArray[np.float32]:
        """Score given tokens on one engine; see `generate` for its choice and the errors."""
        return await self._one(request.session_id, lambda client: client.score(request))

    async def abort(self, owner: str = "") -> None:
        """Make all requests, or those of one of several adapters, return their tokens so far."""

        async def one(client: EngineClient) -> None:
            rids = client.adapters.requests_by(owner) if owner else [None]
            await asyncio.gather(*(client.abort(rid) for rid in rids))

        await self.broadcast(one)

    def give_up(self, since: float) -> None:
        """Declare engines dead that have requests and answered none since then (`time.monotonic`); their requests
        fail."""
        for slot in self._slots:
            if slot.assigned and slot.served < since:
                silent = time.monotonic() - since
                slot.kill(slot.client.error("/abort_request", f"no request stopped in {silent:.0f} s", EngineDied))

    def mark_dead(self, urls: Collection[str], why: str) -> None:
        """Declare these engines dead: they answer, but cannot be used."""
        for slot in self._slots:
            if slot.client.url in urls:
                slot.kill(slot.client.error("weight update", why, EngineDied))

    async def pause(self, mode: PauseMode) -> None:
        self._paused = mode
        self._heartbeats.stop()
        await self.broadcast(lambda client: client.pause(mode))

    async def resume(self) -> None:
        """Resume every engine. Answers given during a probe are then valid."""
        await self.broadcast(lambda client: client.resume())
        for slot in self._slots:
            slot.proven.set()
        self._heartbeats.start()

    async def flush_cache(self) -> None:
        """Drop cached prefixes on all engines; those that generated during a probe have already done so."""
        await self.broadcast(lambda client: client.flush_cache(), paused=True)

    # -------------------------------------------------------------------------------------------------- membership
    #
    # Engines join and leave only at weight updates: a new one needs weights before its first request, and a leaving one
    # must have no requests left.

    @property
    def no_engine_alive(self) -> bool:
        """Whether no engine is alive or admitted."""
        return not len(self) and not self._admitted

    async def admit(self, client: EngineClient) -> None:
        """Admit an engine from the next weight update on: a new one, or one under the name of a dead one. It must be
        paused and without requests of others."""
        await self._withdraw(client.name)
        self._admitted[client.name] = client

    async def _withdraw(self, name: str) -> None:
        if name in self._admitted:
            await self._admitted.pop(name).close()

    async def retire(self, name: str) -> None:
        """Stop sending requests to an engine, interrupt its running ones (they continue elsewhere, with their tokens),
        and remove it at the next weight update."""
        await self._withdraw(name)
        for slot in self._slots:
            if slot.client.name == name and not slot.leaving:
                slot.leaving = True
                if slot.error is None:
                    with suppress(EngineDied):
                        await self._unless_dead(slot, slot.client.abort())

    async def join(self) -> None:
        """Make all engines generate, admitted ones included, if they need no weights first. An engine that refuses is
        declared dead, unless all do. Raises like `broadcast`."""
        await self._change()
        await self.broadcast(lambda client: client.resume(), spare=True)
        self._heartbeats.start()

    async def _change(self, ready: bool = True) -> None:
        """Add admitted engines and remove leaving ones.

        Args:
            ready: admitted engines may get requests at once.
        """
        admitted, self._admitted = self._admitted, {}
        slots: list[EngineSlot] = []
        for slot in self._slots:
            client = admitted.pop(slot.client.name, None)
            if client is not None:
                slots.append(EngineSlot(client, self._concurrency, ready))
            elif not slot.leaving:
                slots.append(slot)
                continue
            slot.kill(EngineDied(slot.client.name, slot.client.url, "the engine left the run", "use another engine"))
            await slot.client.close()
        self._slots = slots + [EngineSlot(client, self._concurrency, ready) for client in admitted.values()]

    # --------------------------------------------------------------------------------------------- weight update
    #
    # pause -> begin_update -> the trainer sends -> [compare] -> end_update -> stamp -> [probe] -> flush_cache, resume
    #
    # A version is stamped last, so an engine with a partial update never reports the new one. The comparison comes
    # before `end_update`, while the parameters are as loaded. A probe uses the stamped version.

    async def begin_update(self) -> UpdateMembers:
        """Open a weight-update session on every live engine, admitted ones included.

        An engine that refuses this or another step of the update is declared dead, unless all do.

        Raises:
            EngineError: all refuse.
            EngineDied: all are dead: the cause of the first.
        """
        await self._change()

        async def begin(client: EngineClient) -> str:
            await client.begin_weight_update()
            return client.url

        urls = await self.broadcast(begin, spare=True)
        return UpdateMembers(tuple(urls), {name: error.brief for name, error in self.dead.items()})

    # -> load_adapter -> [compare] -> [probe] -> switch: for adapters alone, while engines generate.

    async def load_adapter(self, adapter: AdapterVersion, alive: int) -> UpdateMembers:
        """Load an adapter into every live engine, admitted ones included, beside those in use. `switch` gives it to new
        requests. An engine that fails is declared dead, unless all do.

        Args:
            alive: versions of this owner's adapters that an engine serves at once.

        Raises:
            EngineError: all refuse.
            EngineDied: all are dead: the cause of the first.
        """
        await self._change(ready=False)
        others = [newest for owner, newest in self._newest.items() if owner != adapter.owner]
        urls = await self.broadcast(lambda client: load_version(client, adapter, alive, others), spare=True)
        held = frozenset(a.version for client in self.clients for a in client.adapters.loaded_of(adapter.owner))
        return UpdateMembers(tuple(urls), {name: error.brief for name, error in self.dead.items()}, held)

    async def switch(self, version: int, interrupt: bool, owner: str = "") -> None:
        """Switch an owner's new requests to a loaded adapter version.

        Args:
            interrupt: requests with an older one return their tokens so far; else they end under it.
        """
        for slot in [slot for slot in self._slots if slot.error is None]:
            if (adapter := slot.client.adapters.of_version(version, owner)) is not None:
                slot.client.adapters.switch(adapter)
                slot.ready.set()
                self._newest[owner] = adapter
        self._heartbeats.start()
        if interrupt:
            await self.broadcast(lambda client: interrupt_older(client, INTERRUPT_S, owner))

    async def restart_update(self) -> UpdateMembers:
        """`begin_update` after an aborted update: engines hold a mixture and receive all weights anew. The trainer must
        first leave its groups with them, because until then they may wait for a bucket. Raises like `begin_update`."""

        async def end(slot: EngineSlot) -> None:
            try:
                await self._unless_dead(slot, slot.client.end_weight_update())
            except EngineDied as error:  # a further begin request would take a second deadline
                slot.kill(error)
            except EngineError:
                pass  # the next step detects an engine that refuses to begin

        # Engines that generated during a probe pause again. Their requests fail: the answers may be of wrong weights.
        unproven = [slot for slot in self._slots if slot.error is None and not slot.proven.is_set()]
        for slot in unproven:
            self._slots[self._slots.index(slot)] = EngineSlot(slot.client, self._concurrency, leaving=slot.leaving)
            slot.kill(slot.client.error("probe", "its answers may come from weights that failed the probe", EngineDied))
        if unproven:
            await self.broadcast(lambda client: client.pause(self._paused), spare=True)
            await self.broadcast(lambda client: client.abort(), spare=True)
        await asyncio.gather(*(end(slot) for slot in self._slots if slot.error is None))
        return await self.begin_update()

    async def compare(self, expected: Sums, strict: bool = False, adapter: int | None = None, owner: str = "") -> int:
        """Compare every bit of the engines' tensors with those that the trainer sent.

        Args:
            expected: of all tensors.
            strict: an engine that cannot report checksums counts as different; else it is skipped.
            adapter: version of the owner's adapter with these tensors; None: they are weights.

        Returns:
            Number of tensors compared, over all engines.

        Raises:
            WeightSyncError: names the engine and the first tensor that differs, and other such engines.
        """
        wrong: list[WeightSyncError] = []

        async def one(client: EngineClient) -> int:
            reported = await client.weight_checksums(adapter, owner)
            with client.reading("weight checksums"):
                cannot = _NO_PLUG_IN if reported is None else why_not(reported)
                if cannot:
                    _log.warning("%s: %s: %s", client.url, _NO_CHECKSUMS, cannot)
                try:
                    if cannot and strict:
                        raise sync_error("check", client.url, f"{_NO_CHECKSUMS}: {cannot}", "set weights.verify: probe")
                    return compare(client.url, reported, expected) if reported is not None else 0
                except WeightSyncError as error:  # not an engine's failure: the trainer may have sent wrong weights
                    wrong.append(error)
                return 0

        compared = sum(await self.broadcast(one, spare=True))
        if wrong:
            where, first = "; and ".join(str(error.value) for error in wrong), wrong[0]
            raise WeightSyncError(first.field, where, first.rule, first.hint)
        return compared

    async def hold_memory(self, tags: Collection[EngineTag]) -> None:
        """Make all engines, admitted ones included, hold exactly these parts of their memory. They must be paused. An
        engine that refuses is declared dead, unless all do.

        Raises:
            EngineError: all refuse; or all are dead: the cause of the first.
        """
        self._heartbeats.stop()
        for client in list(self._admitted.values()):
            try:
                await client.hold_memory(tags)
            except EngineError as error:
                _log.warning("%s is not admitted: %s", client.url, error.brief)
                await self._withdraw(client.name)
        await self.broadcast(lambda client: client.hold_memory(tags), spare=True)

    async def end_update(self) -> None:
        """Close the session: engines finish their own layout (quantised or packed weights)."""
        await self.broadcast(lambda client: client.end_weight_update(), spare=True)

    async def stamp(self, version: int) -> None:
        """Make every engine with requests report `version` for tokens sampled from now on."""
        await self.broadcast(lambda client: client.stamp(version), spare=True)

    async def probe(self, request: ProbeRequest) -> dict[str, ProbeScores]:
        """Probe results of every engine for a fixed text, by its URL. Engines are paused again afterwards. An engine
        that kept requests continues them, but their answers wait for `resume`, or are lost in `restart_update`. An
        engine that refuses, or sends an invalid answer, is declared dead, unless all do."""

        async def one(client: EngineClient) -> tuple[str, ProbeScores]:
            if client.adapters.of_version(request.version, request.adapter) is not None:  # it generates meanwhile
                return client.url, await client.probe(request)
            slot = next(slot for slot in self._slots if slot.client is client)
            if kept := slot.assigned > 0:
                slot.proven.clear()
                if self._paused == "retract":  # its requests are prefilled anew
                    await client.flush_cache()
            await client.resume()
            found = await client.probe(request)
            if not kept:
                await client.pause(self._paused)
            return client.url, found

        return dict(await self.broadcast(one, spare=True))

    async def broadcast(
        self, call: Callable[[EngineClient], Coroutine[Any, Any, T]], spare: bool = False, paused: bool = False
    ) -> list[T]:
        """Call every live engine at the same time; returns the answers of engines still alive. No calls are made if
        only admitted engines are left.

        Args:
            spare: declare engines that refuse dead, unless all do.
            paused: skip engines that generate during a probe.

        Raises:
            EngineError: one refused, after all have answered; or all died: the cause of the first.
        """
        if not len(self) and self._admitted:
            return []
        slots = [slot for slot in self._live() if slot.proven.is_set() or not paused]
        answers = await asyncio.gather(
            *(self._unless_dead(slot, call(slot.client)) for slot in slots), return_exceptions=True
        )
        if spare and not all(isinstance(answer, BaseException) for answer in answers):
            for slot, answer in zip(slots, answers, strict=True):
                if isinstance(answer, EngineError):
                    slot.kill(EngineDied(answer.field, answer.value, answer.rule, answer.hint))
        lived = [answer for slot, answer in zip(slots, answers, strict=True) if slot.error is None]
        return all_or_first_failure(lived or answers)

    async def close(self) -> None:
        self._heartbeats.stop()
        for client in (*self.clients, *self._admitted.values()):
            await client.close()

    def _live(self) -> list[EngineSlot]:
        """The live engines. If there are none, raises the cause of the first death."""
        live = [slot for slot in self._slots if slot.error is None]
        if not live:
            raise next(iter(self.dead.values()))
        return live

    async def _one(
        self, session_id: str, call: Callable[[EngineClient], Coroutine[Any, Any, T]],
        prefers: Callable[[EngineClient], bool] = lambda client: False,
    ) -> T:  # fmt: skip
        """One call to the session's engine, or to the least busy one."""
        known = self._sessions.get(session_id) if session_id else None
        if known is not None and known.error is None and not known.leaving:
            slot = known
        else:
            live = self._live()
            # A leaving engine gets no more requests, unless no other is alive.
            slot = min([s for s in live if not s.leaving] or live, key=lambda s: (s.assigned, not prefers(s.client)))
        if session_id:
            self._sessions[session_id] = slot
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

        async def limited() -> T:
            async with slot.limit:
                await slot.ready.wait()
                answer = await call(slot.client)
            slot.answered = slot.served = time.monotonic()
            slot.missed = 0
            await slot.proven.wait()
            return answer

        slot.assigned += 1
        try:
            return await self._unless_dead(slot, limited())
        finally:
            slot.assigned -= 1

    @staticmethod
    async def _unless_dead(slot: EngineSlot, work: Awaitable[T]) -> T:
        """The result of `work`, or the error of the engine's death if that comes first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, slot.death}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            assert slot.error is not None
            raise slot.error
        except EngineDied as error:
            slot.kill(error)
            raise
        finally:
            task.cancel()


async def _or_abort(client: EngineClient, request: GenerateRequest) -> GenerateResult:
    try:
        return await client.generate(request)
    except asyncio.CancelledError:
        with suppress(EngineError):
            await asyncio.shield(client.abort(request.rid))
        raise


def all_or_first_failure(answers: Sequence[T | BaseException]) -> list[T]:
    """The answers of finished calls. Raises the first failure among them."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]

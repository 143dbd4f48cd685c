"""The engines behind a server: which has which adapter loaded, and what a client's request is to them.

Every saved adapter is one at the engine, under a name of its own, loaded when it is first sampled from. An engine that
has no room unloads the one that nobody uses and that was used longest ago; where all are used, the request waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mslime.backends.sglang.client import EngineClient, EngineDied
from mslime.backends.sglang.generating import GenerateRequest, answer_limit, parse_generation
from mslime.backends.sglang.handshake import Needs, handshake_all
from mslime.backends.sglang.server import EngineAddress
from mslime.config.errors import EngineError
from mslime_plugins.serve.backend import Continuation, SampleAsk, Sampled

_log = logging.getLogger(__name__)
LOOK_S = 0.2


class ServedEngine(EngineClient):
    """A client of one engine, which names the adapter of each request.

    Attributes:
        busy: requests that it has.
    """

    busy: int = 0

    async def load(self, name: str, directory: Path) -> None:
        """Let the engine have an adapter."""
        body = {"lora_name": name, "lora_path": str(directory)}
        await self._control("/load_lora_adapter", body, self.deadlines.weight_sync_s)

    async def unload(self, name: str) -> None:
        """Let it forget one that no request has."""
        await self._unload_adapter(name)

    async def continued(self, ask: SampleAsk, index: int, adapter: str | None) -> tuple[Continuation, Any, int]:
        """(one continuation, scores of the prompt or None, tokens that were in the cache)."""
        seed = None if ask.seed is None else ask.seed + index
        request = GenerateRequest(
            f"{ask.rid}-{index}", ask.prompt, ask.max_tokens, temperature=ask.temperature, stop=ask.stop,
            stop_token_ids=ask.stop_tokens, seed=seed, ignore_eos=ask.ignore_eos,
        )  # fmt: skip
        body = request.payload()
        # Log-probs stay those of the whole vocabulary, which the trainer computes; no sampling mask is asked for.
        body["sampling_params"] |= {"top_p": ask.top_p, "top_k": ask.top_k}
        scored = ask.scored_from if index == 0 else None
        if scored is not None:
            body["logprob_start_len"] = scored - 1  # the engine's first entry has no log-prob
        if adapter is not None:
            body["lora_path"] = adapter
        limit = answer_limit(request, self.model) + (0 if scored is None else 256 * len(ask.prompt))
        try:
            answer = await self._call("POST", "/generate", body, self.deadlines.engine_request_s, limit)
        except asyncio.CancelledError:
            await asyncio.shield(self.abort(request.rid))
            raise
        with self.reading(f"request {request.rid}"):
            found = parse_generation(request, answer, self.name, self.model)
            assert found.finish != "abort", "aborted"
            scores = None if scored is None else _scores(answer["meta_info"], ask, scored)
            each = Continuation(found.output_ids, found.log_probs, found.finish == "stop")
            return each, scores, found.cached_tokens


def _scores(meta: Mapping[str, Any], ask: SampleAsk, first: int) -> NDArray[np.float32]:
    """[P] float32, NaN before `first`. Raises AssertionError unless there is one for each other token."""
    pairs = meta["input_token_logprobs"][1:]
    assert len(pairs) == len(ask.prompt) - first, f"{len(pairs)} log-probs for {len(ask.prompt) - first} tokens"
    values = np.asarray([pair[0] for pair in pairs], np.float32)
    assert bool(np.isfinite(values).all()), "log-probs that are not finite"
    scores = np.full(len(ask.prompt), np.nan, np.float32)
    scores[first:] = np.minimum(values, 0.0)
    return scores


@dataclass
class LoadedAdapter:
    """An adapter at an engine. uses: requests that have it."""

    name: str
    uses: int = 0


@dataclass
class Shelf:
    """The adapters of one engine, the one used longest ago first.

    Attributes:
        room: how many it takes.
    """

    engine: ServedEngine
    room: int
    held: dict[Path, LoadedAdapter] = field(default_factory=dict[Path, LoadedAdapter])
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def having(self, adapter: Path) -> AsyncIterator[str]:
        """Its name at the engine, which has it inside. Raises EngineError where it cannot be loaded."""
        async with self.changed:
            while adapter not in self.held and not await self._made_room():
                await self.changed.wait()
            if adapter not in self.held:
                name = name_of(adapter)
                await self.engine.load(name, adapter)
                self.held[adapter] = LoadedAdapter(name)
            loaded = self.held[adapter] = self.held.pop(adapter)
            loaded.uses += 1
        try:
            yield loaded.name
        finally:
            loaded.uses -= 1
            async with self.changed:
                self.changed.notify_all()

    async def _made_room(self) -> bool:
        if len(self.held) < self.room:
            return True
        idle = next((path for path, loaded in self.held.items() if not loaded.uses), None)
        if idle is None:
            return False
        await self._unload(idle)
        return True

    async def drop(self, adapter: Path) -> None:
        """Unload an adapter once its last request has ended, if it is there."""
        async with self.changed:
            while (loaded := self.held.get(adapter)) is not None and loaded.uses:
                await self.changed.wait()
            if adapter in self.held:
                await self._unload(adapter)

    async def _unload(self, adapter: Path) -> None:
        loaded = self.held.pop(adapter)
        try:
            await self.engine.unload(loaded.name)
        except EngineError as error:  # it takes memory, and nothing else: SGLang unloads the oldest by itself
            _log.warning("%s is not unloaded: %s", loaded.name, error.brief)


def name_of(adapter: Path) -> str:
    """What engines call an adapter: never the same for two directories."""
    return f"serve-{hashlib.sha256(str(adapter).encode()).hexdigest()[:24]}"


class SGLangEngines:
    """`backend.SamplingEngines` on the engines of a server.

    Args:
        room: adapters that each has loaded at once.
        died: told of an engine that is gone.

    Attributes:
        expected: another one may come, for which requests wait where none is left.
    """

    def __init__(self, room: int, died: Callable[[str, EngineError], None]) -> None:
        self._room, self._died, self.expected = room, died, False
        self._shelves: dict[str, Shelf] = {}
        self._gone: list[ServedEngine] = []

    async def meet(self, make: Callable[[EngineAddress], ServedEngine], addresses: Sequence[EngineAddress],
                   needs: Needs) -> int:  # fmt: skip
        """Connect and check; the input length that they refuse. Raises EngineError naming what is missing."""
        engines = [make(address) for address in addresses]
        refused = await handshake_all(engines, needs)
        self._shelves |= {engine.name: Shelf(engine, self._room) for engine in engines}
        return refused

    async def close(self) -> None:
        """Close the connections."""
        for engine in (*self._gone, *(shelf.engine for shelf in self._shelves.values())):
            await engine.close()

    async def sample(self, adapter: Path | None, ask: SampleAsk) -> Sampled:
        """See `backend.SamplingEngines`. A request whose engine dies goes to another one."""
        where = None if adapter is None else adapter.absolute()
        while True:
            shelf = await self._choose(where)
            shelf.engine.busy += ask.count
            try:
                return await self._from(shelf, where, ask)
            except EngineDied as error:
                self._lose(shelf.engine.name, error)
            finally:
                shelf.engine.busy -= ask.count

    async def forget(self, adapter: Path) -> None:
        """See `backend.SamplingEngines`."""
        for shelf in list(self._shelves.values()):
            await shelf.drop(adapter.absolute())

    async def _from(self, shelf: Shelf, adapter: Path | None, ask: SampleAsk) -> Sampled:
        if adapter is None:
            return await self._all(shelf.engine, ask, None)
        async with shelf.having(adapter) as name:
            return await self._all(shelf.engine, ask, name)

    async def _all(self, engine: ServedEngine, ask: SampleAsk, adapter: str | None) -> Sampled:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_or_error(engine.continued(ask, i, adapter))) for i in range(ask.count)]
        found = [task.result() for task in tasks]
        for each in found:
            if isinstance(each, EngineError):
                raise each
        whole = [each for each in found if not isinstance(each, EngineError)]
        return Sampled([each for each, _, _ in whole], whole[0][1], whole[0][2])

    async def _choose(self, adapter: Path | None) -> Shelf:
        """The one with the least to do; of equal ones, one that has the adapter."""
        while not self._shelves:
            if not self.expected:
                raise EngineError("engines", 0, "none is left: they died, see the console", "start the server again")
            await asyncio.sleep(LOOK_S)
        return min(self._shelves.values(), key=lambda s: (s.engine.busy, adapter is not None and adapter not in s.held))

    def _lose(self, name: str, error: EngineError) -> None:
        if (shelf := self._shelves.pop(name, None)) is not None:
            self._gone.append(shelf.engine)  # others may be in the middle of a request to it
            self.expected = True  # until it is known whether it is started again
            self._died(name, error)


async def _or_error(call: Any) -> Any:
    """What a request gave, or the error that it failed with: the others of its prompt go on."""
    try:
        return await call
    except EngineError as error:
        return error

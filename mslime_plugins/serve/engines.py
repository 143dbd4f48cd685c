"""Clients' requests to sample, on the engines of a server: what an engine is asked, and what happens when one dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.backends.sglang.pool import EnginePool
from mslime.config.errors import EngineError
from mslime_plugins.serve.backend import Continuation, SampleAsk, Sampled

LOOK_S = 0.2


class PooledEngines:
    """`backend.SamplingEngines` on a pool.

    Args:
        room: adapters that each engine has loaded at once.
    """

    def __init__(self, pool: EnginePool, room: int) -> None:
        self._pool, self._room = pool, room
        self._looks, self._starting = 0, False

    def looked_after(self, starting: bool) -> None:
        """The fleet has looked after the engines: whether one is being started."""
        self._looks, self._starting = self._looks + 1, starting

    async def sample(self, adapter: Path | None, ask: SampleAsk) -> Sampled:
        """See `backend.SamplingEngines`. A request whose engine dies goes to another one."""
        where = None if adapter is None else adapter.absolute()
        requests = [_request(ask, i) for i in range(ask.count)]
        found = await asyncio.gather(*(self._one(where, each) for each in requests), return_exceptions=True)
        whole: list[GenerateResult] = []
        for each in found:  # the others of the prompt have ended
            if isinstance(each, BaseException):
                raise each
            whole.append(each)
        continuations = [Continuation(each.output_ids, each.log_probs, each.finish == "stop") for each in whole]
        return Sampled(continuations, whole[0].scores, whole[0].cached_tokens)

    async def forget(self, adapter: Path) -> None:
        """See `backend.SamplingEngines`."""
        await self._pool.take_back(adapter.absolute())

    async def _one(self, adapter: Path | None, request: GenerateRequest) -> GenerateResult:
        while True:
            try:
                found = await self._pool.generate_from(adapter, request, self._room)
            except EngineDied as error:
                await self._another(error)
                continue
            if found.finish == "abort":
                raise EngineError(found.engine, request.rid, "the engine aborted the request", "sample again")
            return found

    async def _another(self, error: EngineDied) -> None:
        """Return when an engine is there. Raises EngineError where none will come."""
        seen = self._looks + 1  # a look that is under way may have begun before the last engine died
        while not len(self._pool):
            if self._looks > seen and not self._starting:
                raise EngineError(
                    "engines", 0, "none is left: they died, see the console", "start the server again"
                ) from error
            await asyncio.sleep(LOOK_S)


def _request(ask: SampleAsk, index: int) -> GenerateRequest:
    """Continuation `index` of a prompt; all of them go to one engine."""
    return GenerateRequest(
        f"{ask.rid}-{index}", ask.prompt, ask.max_tokens, temperature=ask.temperature, top_p=ask.top_p,
        top_k=ask.top_k, stop=ask.stop, stop_token_ids=ask.stop_tokens,
        seed=None if ask.seed is None else ask.seed + index, ignore_eos=ask.ignore_eos, session_id=ask.rid,
        masked=False, scored_from=ask.scored_from if index == 0 else None,
    )  # fmt: skip

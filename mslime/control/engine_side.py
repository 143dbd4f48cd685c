"""What a rollout service has around it: clients of engines and teachers, which it checks, and what scores responses."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mslime.config.dtypes import engine_dtype
from mslime.config.hf_config import checkpoint_dtype
from mslime.config.serving import served_lora
from mslime.logs import hide

if TYPE_CHECKING:
    from mslime.backends.sglang.client import EngineClient
    from mslime.backends.sglang.handshake import Needs
    from mslime.backends.sglang.pool import EnginePool
    from mslime.backends.sglang.server import EngineAddress
    from mslime.config.errors import EngineError
    from mslime.config.model_facts import ModelFacts
    from mslime.config.schema import RunConfig
    from mslime.data.tokenizer import Tokenizer
    from mslime.preflight.resolve import ResolvedRun
    from mslime.rollout.rewards.scorer import RewardScorer
    from mslime.rollout.teacher import ServedTeacher

_log = logging.getLogger(__name__)
GREET_S = 15.0
"""For an engine's first answers to control calls, of which the others know that they take milliseconds."""


class EngineSide:
    """Everything that is opened before a service, and closed after it.

    Args:
        config: of the run, or what one of several managers has of it.

    Attributes:
        pool: the engines, once they were met.
        scorer, eval_scorers, teacher: see `RolloutService`; once scoring was opened.
    """

    pool: EnginePool
    scorer: RewardScorer
    eval_scorers: dict[str, RewardScorer]
    teacher: ServedTeacher | None
    _needs: Needs

    def __init__(self, run: ResolvedRun, config: RunConfig) -> None:
        self._run, self._config = run, config
        self._teachers: EnginePool | None = None

    async def meet_engines(self, addresses: Sequence[EngineAddress]) -> int:
        """Connect to the engines and check what they can do; how many tokens they refuse to continue."""
        from mslime.backends.sglang.handshake import Needs, handshake_all
        from mslime.backends.sglang.pool import EnginePool

        run, r = self._run, self._config.rollout
        _log.info("process %d: meeting %s", os.getpid(), ", ".join(a.url for a in addresses))
        clients = self._clients(addresses, run.model)
        self._needs = Needs(
            bool(run.replayed_layers), architectures=(run.family.architecture,),
            dtype=engine_dtype(self._config, run.hf_config), checkpoint_dtype=checkpoint_dtype(run.hf_config),
            memory=self._config.colocated, lora=served_lora(self._config, run.adapted_modules),
            truncation={"top_p": r.top_p, "top_k": r.top_k, "min_p": r.min_p} if r.truncated else {},
        )  # fmt: skip
        refused_input = await handshake_all(clients, self._needs)
        self.pool = EnginePool(clients, r.concurrency, self._config.deadlines.engine_silence_s)
        return refused_input

    async def greet(self, address: EngineAddress, at_once: bool = False) -> str:
        """Check an engine that is new, was started again or answers again, and let it take part from the next weight
        update on; or `at_once`, see `EnginePool.catch_up`, whose answer this is. Raises EngineError naming what it
        lacks, EngineDied when it does not answer."""
        from mslime.backends.sglang.client import EngineDied
        from mslime.backends.sglang.handshake import handshake
        from mslime.backends.sglang.released import TAGS
        from mslime.control.attached import make_clean

        hide(address.keys.api, address.keys.admin)
        limits = self._config.deadlines
        (client,) = self._clients([address], self._run.model)
        try:
            async with asyncio.timeout(limit_s := limits.engine_start_s):
                if not await client.answers():
                    raise client.error("/ready", "nobody answers", EngineDied)
                # One that hangs is not to hold up the sync for long.
                client.deadlines = limits.model_copy(
                    update=dict.fromkeys(("engine_control_s", "weight_sync_s"), GREET_S)
                )
                await make_clean(client)
                client.deadlines = limits
                if self._needs.memory:  # it may have been given up while it slept
                    await client.hold_memory(TAGS)
                await handshake(client, self._needs)
                await client.pause(self._config.rollout.pause_mode)
        except BaseException as error:
            await client.close()
            if isinstance(error, TimeoutError):
                raise client.error("handshake", f"not over within {limit_s:g} s", EngineDied) from None
            raise
        await self.pool.admit(client)
        return await self.pool.catch_up(client.name) if at_once else ""

    async def retire(self, name: str) -> None:
        """See `EnginePool.retire`."""
        await self.pool.retire(name)

    async def leave_out(self, urls: Collection[str], why: str) -> None:
        """See `EnginePool.leave_out`."""
        self.pool.leave_out(urls, why)

    async def dead(self) -> dict[str, EngineError]:
        """Dead engines by name, with what killed them; see `EnginePool.missing`."""
        return self.pool.missing

    async def stranded(self) -> bool:
        """See `EnginePool.stranded`."""
        return self.pool.stranded

    async def open_scoring(self, teachers: Sequence[EngineAddress], tokenizer: Tokenizer) -> None:
        """Start what scores responses of training and of held-out sets."""
        from mslime.rollout.rewards.scorer import RewardScorer

        config = self._config
        self.scorer = RewardScorer(config.reward, tokenizer=tokenizer)
        self.eval_scorers = {
            s.name: RewardScorer(s.reward, f"data.eval_sets[{i}].reward", tokenizer)
            for i, s in enumerate(config.data.eval_sets)
            if s.reward is not None
        }
        for scorer in (self.scorer, *self.eval_scorers.values()):
            await scorer.start()
        self.teacher = await self._meet_teachers(teachers, tokenizer)

    async def _meet_teachers(self, addresses: Sequence[EngineAddress], tokenizer: Tokenizer) -> ServedTeacher | None:
        """The teacher behind these servers, which are checked; None when there are none."""
        from mslime.backends.sglang.pool import EnginePool
        from mslime.backends.sglang.teacher import meet_teachers
        from mslime.rollout.teacher import ServedTeacher

        if not addresses:
            return None
        config, model = self._config, self._run.model
        rollout, prompt = config.rollout, config.data.max_prompt_tokens or 1
        longest = min(rollout.longest(model.max_positions), prompt + rollout.max_response_tokens)
        clients = self._clients(addresses, None)
        await meet_teachers(clients, tokenizer, model.vocab_size, longest)
        self._teachers = EnginePool(clients, config.teacher.concurrency)
        return ServedTeacher(self._teachers)

    def _clients(self, addresses: Sequence[EngineAddress], model: ModelFacts | None) -> list[EngineClient]:
        from mslime.backends.sglang.client import EngineClient

        limits = self._config.deadlines
        return [EngineClient(a.url, a.name, limits, model, a.log_path, a.keys, a.identity) for a in addresses]

    async def close(self) -> None:
        """Close connections, end the reward workers."""
        await self.pool.close()
        if self._teachers is not None:
            await self._teachers.close()
        for scorer in (self.scorer, *self.eval_scorers.values()):
            await scorer.close()

"""What scores the responses of one configuration: its rewards, those of held-out sets, and a served teacher."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mslime.backends.sglang.pool import EnginePool
    from mslime.backends.sglang.server import EngineAddress
    from mslime.config.base import EngineTag
    from mslime.config.schema import RunConfig
    from mslime.data.tokenizer import Tokenizer
    from mslime.preflight.resolve import ResolvedRun
    from mslime.rollout.rewards.scorer import RewardScorer
    from mslime.rollout.teacher import ServedTeacher


class ScoringSide:
    """Opened before a rollout service, and closed after it.

    Args:
        config: of the run, of one of its adapters, or what one of several managers has of it.

    Attributes:
        scorer, eval_scorers, teacher: see `RolloutService`; once it was opened.
    """

    scorer: RewardScorer
    eval_scorers: dict[str, RewardScorer]
    teacher: ServedTeacher | None

    def __init__(self, run: ResolvedRun, config: RunConfig) -> None:
        self._run, self._config = run, config
        self._teachers: EnginePool | None = None

    async def open(self, teachers: Sequence[EngineAddress], tokenizer: Tokenizer) -> None:
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
        from mslime.backends.sglang.client import EngineClient
        from mslime.backends.sglang.handshake import meet_teachers
        from mslime.backends.sglang.pool import EnginePool
        from mslime.rollout.teacher import ServedTeacher

        if not addresses:
            return None
        config, model = self._config, self._run.model
        rollout, prompt = config.rollout, config.data.max_prompt_tokens or 1
        longest = min(rollout.longest(model.max_positions), prompt + rollout.max_response_tokens)
        limits = config.deadlines
        clients = [EngineClient(a.url, a.name, limits, None, a.log_path, a.keys, a.identity) for a in addresses]
        await meet_teachers(clients, tokenizer, model.vocab_size, longest)
        self._teachers = EnginePool(clients, config.teacher.concurrency)
        return ServedTeacher(self._teachers)

    async def hold_teachers(self, tags: Collection[EngineTag]) -> list[str]:
        """Let the teacher's servers, on shared GPUs, hold these parts of their memory; names of those that are dead.
        Raises EngineError where none is left."""
        assert self.teacher is not None and self._teachers is not None, "a teacher shares the GPUs"
        await self.teacher.hold_memory(tags)
        return [*self._teachers.dead]

    async def close(self) -> None:
        """Close connections, end the reward workers."""
        if self._teachers is not None:
            await self._teachers.close()
        for scorer in (self.scorer, *self.eval_scorers.values()):
            await scorer.close()

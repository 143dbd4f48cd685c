"""`rollout.function: environment`: the model and an environment take turns until one of them ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mslime.config.environments import TIMED_ADVANTAGES, EnvironmentLimitsConfig
from mslime.config.schema import RunConfig
from mslime.data.sample import Sample
from mslime.data.tokenizer import Tokenizer
from mslime.rollout.environments.pool import (
    EnvironmentFailedError,
    EnvironmentLostError,
    EnvironmentPool,
    OpenEnvironment,
)
from mslime.rollout.environments.protocol import EnvironmentTask, Observation, Step
from mslime.rollout.environments.result import EnvironmentJob
from mslime.rollout.environments.turns import ChatTurns, PlainTurns, Turns
from mslime.rollout.workflow import Engine, Episode, NoRoomError, Task, Workflow, load_workflow


@dataclass
class Played:
    """What has happened in an episode.

    Attributes:
        steps: (position of the last token of the action, what it led to).
    """

    sample: Sample
    steps: list[tuple[int, Step]] = field(default_factory=list[tuple[int, Step]])

    @property
    def rewards(self) -> list[tuple[int, float]]:
        """(position, reward) of the steps that have one."""
        return [(at, step.reward) for at, step in self.steps if step.reward is not None]

    @property
    def reward(self) -> float | None:
        """Of the episode: what its last step says, else the sum over its steps; None where none has one."""
        last = self.steps[-1][1] if self.steps else Step()
        if last.final_reward is not None:
            return last.final_reward
        return sum(reward for _, reward in self.rewards) if self.rewards else None


class EnvironmentRollout:
    """The rollout function of a run whose rollouts are episodes in an environment.

    Args:
        credit: what becomes of the rewards of steps: `none`, `steps` (beside the episode's), or `moved` (in its place).
    """

    def __init__(self, pool: EnvironmentPool, limits: EnvironmentLimitsConfig, turns: Turns, credit: str) -> None:
        self._pool, self._limits, self._turns, self._credit = pool, limits, turns, credit

    async def __call__(self, task: Task, engine: Engine) -> Episode:
        """An episode; once more in a process of its own where another environment may have broken the first one."""
        try:
            try:
                return self._told(await self._play(task, engine, alone=False))
            except EnvironmentLostError:
                return self._told(await self._play(task, engine, alone=True))
        except EnvironmentFailedError as error:
            return Episode(failed=str(error))

    async def close(self) -> None:
        """End the environments' processes."""
        await self._pool.close()

    async def _play(self, task: Task, engine: Engine, alone: bool) -> Played:
        async with self._opened(alone) as environment:
            played = Played(self._begin(task, engine, await environment.reset(_task(task))))
            for _ in range(self._limits.turns):
                turn = await engine.generate(played.sample)
                if not len(turn.tokens):
                    break
                step = await environment.step(turn.text)
                played.steps.append((len(played.sample) - 1, step))
                if step.done or self._out_of_time(environment):
                    break
                try:
                    self._turns.add(engine, played.sample, step.observation)
                except NoRoomError:
                    break
            return played

    def _begin(self, task: Task, engine: Engine, first: Observation) -> Sample:
        try:
            return self._turns.begin(task, engine, first)
        except NoRoomError as error:
            raise self._pool.failed(f"reset returned what does not fit: {error}") from error

    @asynccontextmanager
    async def _opened(self, alone: bool) -> AsyncIterator[OpenEnvironment]:
        """An environment that is closed in every case."""
        environment = await self._pool.open(alone)
        try:
            yield environment
        finally:
            await environment.close()

    def _out_of_time(self, environment: OpenEnvironment) -> bool:
        return self._limits.episode_s is not None and environment.seconds >= self._limits.episode_s

    def _told(self, played: Played) -> Episode:
        done = bool(played.steps) and played.steps[-1][1].done
        metrics = {"environment_turns": float(len(played.steps)), "environment_done": float(done)}
        for _, step in played.steps:
            metrics |= step.metrics
        credit = [(played.sample, at, reward) for at, reward in self._credited(played)]
        return Episode([played.sample], played.reward, credit, metrics)

    def _credited(self, played: Played) -> list[tuple[int, float]]:
        """(position, process reward), so that what a step brought counts there."""
        steps = played.rewards
        if self._credit == "none" or not steps:
            return []
        if self._credit == "steps":
            return steps
        moved = dict[int, float](steps)
        last = played.steps[-1][0]  # there the reward of the whole episode is added
        moved[last] = moved.get(last, 0.0) - sum(reward for _, reward in steps)
        return [(at, reward) for at, reward in moved.items() if reward]


def open_workflow(config: RunConfig, tokenizer: Tokenizer) -> Workflow:
    """The function of `rollout.function`; that of environments has to be closed. Their processes start with the first
    episode.

    Raises:
        ConfigError: it cannot be found, takes other arguments, or is not async.
    """
    rollout, limits = config.rollout, config.rollout.environment_limits
    if rollout.environment is None:
        return load_workflow(rollout.function)
    job = EnvironmentJob(rollout.environment, rollout.environment_options, limits.call_s, limits.memory_mib)
    chat = config.data.apply_chat_template
    turns = ChatTurns(tokenizer, config.data.chat_template_kwargs) if chat else PlainTurns()
    return EnvironmentRollout(EnvironmentPool(job, limits.workers), limits, turns, _credit(config))


def _credit(config: RunConfig) -> str:
    wanted, timed = config.rollout.environment_credit, config.algorithm.advantage in TIMED_ADVANTAGES
    if wanted == "episode" or (wanted == "auto" and not timed):
        return "none"
    return "moved" if timed else "steps"


def _task(task: Task) -> EnvironmentTask:
    return EnvironmentTask(
        task.text, task.label, dict(task.metadata), task.group_id, task.index, task.evaluation, task.seed, task.messages
    )

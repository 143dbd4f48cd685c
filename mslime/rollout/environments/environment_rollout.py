"""`rollout.function: environment`: the model and an environment take turns until one of them ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mslime.config.data import DataConfig
from mslime.config.errors import ConfigError
from mslime.config.plugins import found, load
from mslime.config.rollout import TIMED_ADVANTAGES, EnvironmentLimitsConfig, RolloutConfig
from mslime.config.schema import RunConfig
from mslime.data.sample import Sample
from mslime.data.tokenizer import Tokenizer, special_texts
from mslime.rollout.agents.messages import as_ordinary
from mslime.rollout.environments.environment_pool import EnvironmentFailedError, EnvironmentLostError, EnvironmentPool
from mslime.rollout.environments.protocol import EnvironmentJob, EnvironmentTask, Messages, Observation, Step
from mslime.rollout.workflow import Engine, Episode, NoRoomError, Task, Workflow, load_workflow

_REPLY = "\ue000said\ue001"
"""Placeholder of a reply in the template; no template writes it."""


@dataclass(frozen=True)
class SampledTurn:
    """The model's turn: its text, and the position of its last token in a sequence of the rollout."""

    text: str
    sample: Sample
    last: int


class OneSequence:
    """An episode's conversation in one sequence, extended by turns and by texts.

    Attributes:
        samples: its sequences, the one with the newest turn last.
    """

    def __init__(self, engine: Engine, sample: Sample, turns: PlainTurns | ChatTurns) -> None:
        self._engine, self._turns, self.samples = engine, turns, [sample]

    async def turn(self) -> SampledTurn | None:
        """Generate the model's next turn; None if there is no room for one."""
        (sample,) = self.samples
        turn = await self._engine.generate(sample)
        return SampledTurn(turn.text, sample, len(sample) - 1) if len(turn.tokens) else None

    def observe(self, observation: Observation) -> None:
        """Add the model's next input. Raises NoRoomError if it does not fit."""
        self._turns.add(self._engine, self.samples[0], observation)


class PlainTurns:
    """Concatenated texts, for prompts without a chat template.

    Args:
        special: special tokens that are broken up in an environment's text.
    """

    def __init__(self, special: Sequence[str] = ()) -> None:
        self._special = special

    def begin(self, task: Task, engine: Engine, first: Observation) -> Sample:
        """Start a sequence with the prompt and the result of `reset`."""
        sample = engine.new_sample()
        self.add(engine, sample, first)
        return sample

    def add(self, engine: Engine, sample: Sample, observation: Observation) -> None:
        """Add the model's next input. Raises NoRoomError if it does not fit."""
        text = observation if isinstance(observation, str) else "\n".join(m["content"] for m in observation)
        if text:
            engine.append(sample, as_ordinary(text, self._special))


class ChatTurns:
    """Turns in the tokenizer's chat template.

    Args:
        options: `data.chat_template_kwargs`.
        special: see `PlainTurns`.
    """

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any], special: Sequence[str] = ()) -> None:
        self._tokenizer, self._options, self._special = tokenizer, options, special

    def begin(self, task: Task, engine: Engine, first: Observation) -> Sample:
        if not first:
            return engine.new_sample()
        return engine.new_sample(engine.encode(self._render(opening(task, self._ordinary(first)))))

    def add(self, engine: Engine, sample: Sample, observation: Observation) -> None:
        engine.append(sample, self.user_turn(_messages(self._ordinary(observation)), int(sample.tokens[-1])))

    def user_turn(self, messages: Messages, last: int) -> str:
        """The template's text between two replies: from the end of a reply to the start of the assistant's next one.

        Args:
            last: the reply's last token. If it ends the turn, the text does not repeat that end.

        Raises:
            ConfigError: the template does not write replies unchanged.
        """
        whole = self._render([{"role": "user", "content": "."}, {"role": "assistant", "content": _REPLY}, *messages])
        _, found, after = whole.rpartition(_REPLY)
        if not found:
            raise ConfigError("data.apply_chat_template", True, "the chat template changes replies, so no text can "
                              "follow them", "write your own rollout function")  # fmt: skip
        ended = self._tokenizer.decode([last], special_tokens=True) if last in self._tokenizer.special_ids else ""
        return after.removeprefix(ended) if ended else after

    def _ordinary(self, observation: Observation) -> Observation:
        if isinstance(observation, str):
            return as_ordinary(observation, self._special)
        return [{**m, "content": as_ordinary(m["content"], self._special)} for m in observation]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._tokenizer.render(messages, self._options)


class ChatConversation:
    """A conversation in messages: the run's renderer extends the tokens of the model's turns. If the family's template
    rewrites history, another sequence of the rollout begins (docs/agents.md)."""

    def __init__(self, task: Task, engine: Engine, first: Observation) -> None:
        self._engine, self._messages = engine, opening(task, first)
        self.samples: list[Sample] = []

    async def turn(self) -> SampledTurn | None:
        try:
            reply = await self._engine.chat(self._messages)
        except NoRoomError:
            return None
        self._messages.append(reply.message)
        self.samples = [*(s for s in self.samples if s is not reply.sample), reply.sample]
        return SampledTurn(reply.text, reply.sample, reply.end - 1)

    def observe(self, observation: Observation) -> None:
        """See `OneSequence`. The next turn checks whether it fits. A chat continues with a message, even an
        empty one."""
        self._messages += _messages(observation)


def opening(task: Task, first: Observation) -> Messages:
    """The prompt's messages with the result of `reset`; a text is appended to the user's message."""
    prompt = [dict(m) for m in task.messages or [{"role": "user", "content": task.text}]]
    last = prompt[-1]
    if isinstance(first, str) and last["role"] == "user" and isinstance(last["content"], str):
        return [*prompt[:-1], {**last, "content": f"{last['content']}\n\n{first}"}] if first else prompt
    return [*prompt, *_messages(first)] if first else prompt


def _messages(observation: Observation) -> Messages:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else observation


class EnvironmentRollout:
    """Rollout function of runs whose rollouts are episodes in an environment.

    Args:
        turns: of episodes that are one sequence; None: episodes are chats.
        credit: use of step rewards: `none`, `steps` (in addition to the episode's), or `moved` (in its place).
    """

    def __init__(
        self, pool: EnvironmentPool, limits: EnvironmentLimitsConfig, turns: PlainTurns | ChatTurns | None, credit: str
    ) -> None:
        self._pool, self._limits, self._turns, self._credit = pool, limits, turns, credit

    async def __call__(self, task: Task, engine: Engine) -> Episode:
        """Run an episode, and repeat it if another environment may have broken the first one. An environment that may
        itself be at fault, or was lost twice, then gets its own process."""
        alone = lost = False
        while True:  # ends: an environment with its own process is not lost
            try:
                return await self._play(task, engine, alone)
            except EnvironmentLostError as error:
                alone, lost = lost or error.suspect, True
            except EnvironmentFailedError as error:
                return Episode(failed=str(error))

    async def close(self) -> None:
        """End the environment processes."""
        await self._pool.close()

    async def _play(self, task: Task, engine: Engine, alone: bool) -> Episode:
        environment = await self._pool.open(alone)
        try:
            episode_task = EnvironmentTask(
                task.text, task.label, dict(task.metadata), task.group_id, task.index, task.evaluation, task.seed,
                task.messages,
            )  # fmt: skip
            conversation = self._begin(task, engine, await environment.reset(episode_task))
            samples, steps = conversation.samples, list[tuple[SampledTurn, Step]]()
            for _ in range(self._limits.turns):
                turn = await conversation.turn()
                if turn is None:
                    break
                samples = conversation.samples
                step = await environment.step(turn.text)
                steps.append((turn, step))
                late = self._limits.episode_s is not None and environment.seconds >= self._limits.episode_s
                if step.done or late:
                    break
                try:
                    conversation.observe(step.observation)
                except NoRoomError:
                    break
        finally:
            await environment.close()
        if self._turns is None and not steps:
            raise self._pool.failed("reset returned a prompt that leaves no room for a turn")
        return self._episode(samples, steps)

    def _begin(self, task: Task, engine: Engine, first: Observation) -> OneSequence | ChatConversation:
        if self._turns is None:
            return ChatConversation(task, engine, first)
        try:
            return OneSequence(engine, self._turns.begin(task, engine, first), self._turns)
        except NoRoomError as error:
            raise self._pool.failed(f"reset returned a text that does not fit: {error}") from error

    def _episode(self, samples: list[Sample], steps: Sequence[tuple[SampledTurn, Step]]) -> Episode:
        """Result of an episode: the final reward of its last step, else the sum over its steps, if any has one.

        Args:
            steps: (the model's turn, result of the step).
        """
        last = steps[-1][1] if steps else Step()
        rewards = [(turn, step.reward) for turn, step in steps if step.reward is not None]
        reward = last.final_reward
        if reward is None and rewards:
            reward = sum(each for _, each in rewards)
        metrics = {"environment_turns": float(len(steps)), "environment_done": float(last.done)}
        for _, step in steps:
            metrics |= step.metrics
        if self._credit == "none":
            rewards = []
        elif self._credit == "moved" and rewards:
            rewards.append((steps[-1][0], -sum(each for _, each in rewards)))  # where the episode's reward is added
            turns = [(turn, sum(each for other, each in rewards if other is turn)) for turn, _ in steps]
            rewards = [(turn, each) for turn, each in turns if each]
        return Episode(samples, reward, [(turn.sample, turn.last, each) for turn, each in rewards], metrics)


def open_workflow(config: RunConfig, tokenizer: Tokenizer) -> Workflow:
    """Load the function of `rollout.function`. Environments and hosted rollouts must be closed: their processes and
    servers start with the first episode.

    Raises:
        ConfigError: it was not found, takes other arguments, or is not async.
    """
    rollout, limits = config.rollout, config.rollout.environment_limits
    if rollout.function in found("mslime.environments"):
        return load("mslime.environments", rollout.function, "rollout.function")(config)
    if rollout.environment is None:
        return load_workflow(rollout.function)
    job = EnvironmentJob(rollout.environment, rollout.environment_options, limits.call_s, limits.memory_mib)
    turns = _turns(rollout, config.data, tokenizer)
    wanted, timed = rollout.environment_credit, config.algorithm.advantage in TIMED_ADVANTAGES
    credit = "moved" if timed else "steps"
    if wanted == "episode" or (wanted == "auto" and not timed):
        credit = "none"
    return EnvironmentRollout(EnvironmentPool(job, limits.workers), limits, turns, credit)


def _turns(rollout: RolloutConfig, data: DataConfig, tokenizer: Tokenizer) -> PlainTurns | ChatTurns | None:
    if rollout.environment_turns == "chat":
        return None
    special = [] if rollout.read_special_tokens else special_texts(tokenizer)
    template = data.apply_chat_template
    return ChatTurns(tokenizer, data.chat_template_kwargs, special) if template else PlainTurns(special)

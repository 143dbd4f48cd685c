"""Conversion of an environment's observations to tokens: as plain text, or as a turn in the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mslime.config.errors import ConfigError
from mslime.data.sample import Sample
from mslime.data.tokenizer import Tokenizer
from mslime.rollout.agents.chat.messages import as_ordinary
from mslime.rollout.environments.protocol import Messages, Observation
from mslime.rollout.workflow import Engine, NoRoomError, Task

_SAID = "\ue000said\ue001"
"""Placeholder of a reply in the template; no template writes it."""


@dataclass(frozen=True)
class Said:
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

    async def said(self) -> Said | None:
        """Generate the model's next turn; None if there is no room for one."""
        (sample,) = self.samples
        turn = await self._engine.generate(sample)
        return Said(turn.text, sample, len(sample) - 1) if len(turn.tokens) else None

    def hear(self, observation: Observation) -> None:
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
        return (
            engine.new_sample(engine.encode(self._render(opening(task, self._ordinary(first)))))
            if first
            else engine.new_sample()
        )

    def add(self, engine: Engine, sample: Sample, observation: Observation) -> None:
        engine.append(sample, self.user_turn(_messages(self._ordinary(observation)), int(sample.tokens[-1])))

    def user_turn(self, messages: Messages, last: int) -> str:
        """The template's text between two replies: from the end of a reply to the start of the assistant's next one.

        Args:
            last: the reply's last token. If it ends the turn, the text does not repeat that end.

        Raises:
            ConfigError: the template does not write replies unchanged.
        """
        whole = self._render([{"role": "user", "content": "."}, {"role": "assistant", "content": _SAID}, *messages])
        _, found, after = whole.rpartition(_SAID)
        if not found:
            raise ConfigError("data.apply_chat_template", True, "the chat template does not write a reply as it is, so "
                              "nothing can follow one", "use a rollout function of yours")  # fmt: skip
        ended = self._tokenizer.decode([last], special_tokens=True) if last in self._tokenizer.special_ids else ""
        return after.removeprefix(ended) if ended else after

    def _ordinary(self, observation: Observation) -> Observation:
        if isinstance(observation, str):
            return as_ordinary(observation, self._special)
        return [{**m, "content": as_ordinary(m["content"], self._special)} for m in observation]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._tokenizer.render(messages, self._options)


class ChatTalk:
    """A conversation in messages: the run's renderer extends the tokens of the model's turns. If the family's template
    rewrites history, another sequence of the rollout begins (docs/agents.md)."""

    def __init__(self, task: Task, engine: Engine, first: Observation) -> None:
        self._engine, self._messages = engine, opening(task, first)
        self.samples: list[Sample] = []

    async def said(self) -> Said | None:
        try:
            reply = await self._engine.chat(self._messages)
        except NoRoomError:
            return None
        self._messages.append(reply.message)
        self.samples = [*(s for s in self.samples if s is not reply.sample), reply.sample]
        return Said(reply.text, reply.sample, reply.end - 1)

    def hear(self, observation: Observation) -> None:
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

"""Conversations with the model that belong to no rollout: somebody else begins them, and says later what for.

They use the engines as rollouts do, stop and go on with the traffic of training groups, and are recorded token by
token. Nothing of them is in the books before a rollout takes it in (`Rollout.take_in`) or it is dropped.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable

from mslime.config.rollout import AgentLimits
from mslime.data.sample import Sample
from mslime.data.source import Prompt
from mslime.rollout.agents.chat.session import ChatSession
from mslime.rollout.conversations import Agents
from mslime.rollout.generation import Door, Generator, Sampling, Traffic
from mslime.rollout.group_tracker import Books, new_group
from mslime.rollout.turns import Rollout

UNBOUNDED = 10**9
"""Turns, sequences and tokens of a conversation, and seconds: what bounds it is said where it belongs."""


class Guests:
    """Who talks to the model beside the rollouts of training groups.

    Args:
        spec: who they are, for messages.
        traffic: of training groups.
    """

    def __init__(
        self, spec: str, generator: Generator, sampling: Sampling, traffic: Traffic, agents: Agents, books: Books,
        fail: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self._spec, self._generator, self._sampling, self._agents = spec, generator, sampling, agents
        self.books, self.fail = books, fail
        self._door = Door(traffic, admitted=True)
        self._numbers, self._nonce = itertools.count(), uuid.uuid4().hex[:6]

    def admit(self) -> None:
        """The traffic flows again: those who wait go on."""
        self._door.admit()

    async def converse(self) -> ChatSession:
        """A new conversation. Raises ConfigError when there is no renderer for it."""
        number = next(self._numbers)
        group = new_group(number, Prompt([0], None, {}, ""), 1)
        rollout = Rollout(
            group, 0, f"guest{self._nonce}{number}", self._spec, self._generator, self._sampling, self._door,
            self._agents, _OutsideBooks(self.books),
        )  # fmt: skip
        limits = AgentLimits(
            turns=UNBOUNDED, sequences=UNBOUNDED, tokens=UNBOUNDED, idle_s=UNBOUNDED, wall_s=UNBOUNDED
        )  # fmt: skip
        return await self._agents.chat(rollout, lambda: False, limits)

    def drop(self, tokens: int) -> None:
        """So many sampled tokens are of no use to anybody."""
        self.books.ledger.generate(tokens)
        self.books.dropped(tokens, "unused")

    def text(self, ids: list[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._generator.decode(ids)


class _OutsideBooks:
    """`TokenBooks` of a conversation: its tokens are booked when it is known what becomes of them."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def generated(self, sample: Sample, tokens: int) -> None:
        """Not yet."""

    def dropped(self, tokens: int, reason: str) -> None:
        """Tokens of a turn that came to nothing."""
        self._books.ledger.generate(tokens)
        self._books.dropped(tokens, reason)

    def masked(self, tokens: int, reason: str) -> None:
        """Whoever takes them in says what is masked."""

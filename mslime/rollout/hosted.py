"""Rollouts that begin outside the run: external programs send requests to its model and submit the results.

Their conversations begin outside any rollout, and are assigned to one later. They use the engines as rollouts do, stop
and continue with the traffic of training groups, and are recorded token by token. The tracker does not count them until
a rollout takes them in (`Rollout.take_in`) or they are dropped.
"""

from __future__ import annotations

import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from mslime.config.rollout import AgentLimits
from mslime.config.schema import RunConfig
from mslime.data.source import Prompt
from mslime.rollout.agents.session import ChatSession
from mslime.rollout.generation import Generator, GroupGate, Sampling, Traffic
from mslime.rollout.group_tracker import GroupTracker, new_group
from mslime.rollout.returned import TokenCounter
from mslime.rollout.turns import Agents, Rollout
from mslime.rollout.workflow import Engine, Episode, Task

UNBOUNDED = 10**9
"""Limit of turns, sequences, tokens and seconds of a conversation: effectively none, since other code bounds it."""


class UngroupedRequests:
    """Access to the model for clients outside the rollouts of training groups.

    Args:
        spec: name of the clients, for messages.
        traffic: of training groups.
    """

    def __init__(
        self, spec: str, generator: Generator, sampling: Sampling, traffic: Traffic, agents: Agents,
        tracker: GroupTracker, fail: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self._spec, self._generator, self._sampling, self._agents = spec, generator, sampling, agents
        self.tracker, self.fail, self._counter = tracker, fail, _UngroupedTokens(tracker)
        self._group_gate = GroupGate(traffic, admitted=True)
        self._numbers, self._nonce = itertools.count(), uuid.uuid4().hex[:6]

    def admit(self) -> None:
        """The traffic is open again: wake the waiting requests."""
        self._group_gate.admit()

    async def converse(self) -> ChatSession:
        """A new conversation. Raises ConfigError if there is no renderer for it."""
        number = next(self._numbers)
        group = new_group(number, Prompt([0], None, {}, ""), 1)
        rollout = Rollout(
            group, 0, f"guest{self._nonce}{number}", self._spec, self._generator, self._sampling, self._group_gate,
            self._agents, self._counter,
        )  # fmt: skip
        limits = AgentLimits(**dict.fromkeys(AgentLimits.model_fields, UNBOUNDED))
        return await self._agents.chat(rollout, lambda: False, limits)

    def drop(self, tokens: int) -> None:
        """Record `tokens` sampled tokens as unused."""
        self._counter.dropped(tokens, "unused")

    def text(self, ids: list[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._generator.decode(ids)


class _UngroupedTokens(TokenCounter):
    """Counter of a conversation: its tokens are recorded once their fate is known."""

    def __init__(self, tracker: GroupTracker) -> None:
        self._tracker = tracker

    def dropped(self, tokens: int, reason: str) -> None:
        """Record the tokens of a failed turn as generated and dropped."""
        self._tracker.ledger.generate(tokens)
        self._tracker.dropped(tokens, reason)


class HostedRollouts(ABC):
    """Rollout function for externally started rollouts. A package adds one through an entry point of the group
    `mslime.environments`; its name then becomes a value of `rollout.function`.

    Args:
        config: of the run.

    Attributes:
        counted: names of its counters in `ungrouped.tracker.counters`; each is the metric `rollout/NAME` of every step.
    """

    counted: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, config: RunConfig) -> None: ...

    @abstractmethod
    def attach(self, ungrouped: UngroupedRequests) -> None:
        """Receive the access to the engines. Called once, before the first rollout."""

    @abstractmethod
    async def __call__(self, task: Task, engine: Engine) -> Episode:
        """Return one submitted rollout; see `rollout.workflow`."""

    @abstractmethod
    async def close(self) -> None:
        """Stop serving. Results that were not submitted are dropped."""

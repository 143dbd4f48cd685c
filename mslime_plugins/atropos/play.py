"""`rollout.function: atropos`: a rollout is a sequence of a group that an environment of Atropos submits.

Environments generate at any time, at a model server of this run that records every token. The run's gate sets how many
groups it waits for, and environments receive that number. A submitted group is matched with the records. Its tokens,
versions, log-probs, routes and supports are the recorded ones; masks and scores are the environment's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from functools import partial
from typing import Any, cast

from mslime.config.rollout import GIVEN
from mslime.config.schema import RunConfig
from mslime.rollout.agents.app import ServedRollout
from mslime.rollout.agents.requests import Request
from mslime.rollout.agents.session import ReplyTurn
from mslime.rollout.hosted import HostedRollouts, UngroupedRequests
from mslime.rollout.turns import Rollout
from mslime.rollout.workflow import AbsentError, Engine, Episode, Task
from mslime_plugins.atropos.atropos_server import AtroposServer
from mslime_plugins.atropos.environments import EnvironmentRegistry, RegisteredEnvironment
from mslime_plugins.atropos.leases import Leases, SubmittedGroup
from mslime_plugins.atropos.matching import MatchedSequence, recognise
from mslime_plugins.atropos.pushed import COUNTED, GroupRefusedError, PushedGroup, read_group
from mslime_plugins.atropos.recorded import Conversation, RecordedConversations

log = logging.getLogger(__name__)
REMEMBERED = 10_000
"""Submitted groups that are remembered, to recognise repeated submissions."""
MOST_REPORTS = 200
"""Most log lines about groups that are not trained."""


class AtroposRollouts(HostedRollouts):
    """Rollout function for Atropos' environments, with the two servers that they use. It listens from the first call
    on.

    Attributes:
        registry: the environments.
        latest: the newest submitted group.
    """

    counted = tuple(f"atropos/{name}" for name in COUNTED)

    def __init__(self, config: RunConfig) -> None:
        self._config, self._settings = config, config.rollout.atropos
        self._own_advantages = config.algorithm.advantage == GIVEN
        self._leases = Leases(self._settings.waiting)
        self._submitted: deque[bytes] = deque(maxlen=REMEMBERED)
        self._ungrouped: UngroupedRequests | None = None
        self._recorded = RecordedConversations(self._settings.keep_s, self._drop)
        record = config.run_dir / "atropos.json"
        self._server = AtroposServer(self._settings, record, config.rollout.server.max_request_mib << 20, self)
        self._starting = asyncio.Lock()
        self._reports = 0
        self.registry = EnvironmentRegistry(config)
        self.latest: dict[str, Any] = {}

    def attach(self, ungrouped: UngroupedRequests) -> None:
        """Set the access of its environments to the engines."""
        self._ungrouped = ungrouped

    @property
    def ungrouped(self) -> UngroupedRequests:
        """The access to the engines, from `attach`."""
        assert self._ungrouped is not None, "attach it to a service first"
        return self._ungrouped

    async def __call__(self, task: Task, engine: Engine) -> Episode:
        assert isinstance(engine, Rollout), "its sequences are sampled outside of rollouts, which only these take in"
        await self._listen()
        size = self._config.rollout.group_size
        group = await self._ask(task, engine, size)
        if isinstance(group, str) or group.failed:
            return Episode(failed=group if isinstance(group, str) else group.failed)
        if task.index >= len(group.sequences):
            raise AbsentError(f"the environment's group has {len(group.sequences)} rollouts")
        return _taken_in(engine, group.sequences[task.index], group.environment)

    async def close(self) -> None:
        """Stop serving. Conversations that were never submitted are dropped."""
        await self._server.close()
        await self._recorded.close()

    # ------------------------------------------------------------------------------------------- called by the server

    @property
    def step(self) -> int:
        """Number of trained steps of the run."""
        return self.ungrouped.tracker.version

    def wandb(self) -> dict[str, str]:
        """Settings for environments that log to Weights & Biases."""
        return {"group": self._config.name, "project": self._config.observe.wandb_project or "mslime"}

    def status(self) -> dict[str, int]:
        """Public status of the run."""
        return {"current_step": self.step, "queue_size": self._leases.waiting}

    def queue(self) -> tuple[int, int]:
        """(waiting groups, groups that the run could have in flight and does not wait for). Environments begin new ones
        while their own limit exceeds the sum."""
        rollout = self._config.rollout
        most = (1 + rollout.max_staleness) * rollout.groups_per_step
        return self._leases.waiting, max(0, most - self._leases.wanted)

    async def conversation(self, request: Request) -> Conversation:
        """The conversation of a model request."""
        found = self._recorded.continued(request)
        if found is None:
            found = self._recorded.begin(ServedRollout(await self.ungrouped.converse()), request)
            found.session.on_end = partial(self.answered, found)
        return found

    def answered(self, conversation: Conversation) -> None:
        """Note the end of an attempt to reply in a conversation, whether or not its client still waits."""
        self._recorded.noted(conversation)
        if (failure := conversation.session.chat.failure) is not None:
            self.ungrouped.fail(failure)

    def submit(self, given: object) -> GroupRefusedError | None:
        """Accept a group from an environment. Returns the error if it is not trained."""
        try:
            self._accept(given)
        except GroupRefusedError as error:
            self._refuse(error, given)
            return error
        self._count("groups")
        self._recorded.settle()
        return None

    # -------------------------------------------------------------------------------------------------- the inside

    def _accept(self, given: object) -> None:
        pushed = read_group(given)
        environment = self.registry.named(pushed.env_id)
        self._check_size(pushed, environment)
        self._check_advantages(pushed)
        if self._leases.full:
            raise GroupRefusedError(
                "no_room",
                f"{self._leases.waiting} groups are waiting already (rollout.atropos.waiting)",
                "set max_batches_offpolicy of the environment to 1 + rollout.max_staleness",
            )
        try:
            sequences = self._recognised(pushed)
        except GroupRefusedError as error:
            if pushed.digest not in self._submitted:  # the model may produce the same again, which is another group
                raise
            hint = "no action is needed: it is trained once"
            raise GroupRefusedError("repeated", "the group was submitted before", hint) from error
        self._submitted.append(pushed.digest)
        self.latest = cast("dict[str, Any]", given)
        self._leases.submit(SubmittedGroup(environment.name, sequences))

    def _check_size(self, pushed: PushedGroup, environment: RegisteredEnvironment) -> None:
        size, count = self._config.rollout.group_size, len(pushed.sequences)
        message = f"{environment.name} submitted a group of {count} rollouts, but rollout.group_size is {size}"
        if count > size:
            raise GroupRefusedError(
                "too_large", message, "raise rollout.group_size, or lower group_size of the environment"
            )
        if count < min(2, size):
            raise GroupRefusedError("too_small", message, "submit at least two rollouts, which are compared")

    def _check_advantages(self, pushed: PushedGroup) -> None:
        with_some = sum(s.advantages is not None for s in pushed.sequences)
        if with_some and not self._own_advantages:
            raise GroupRefusedError("advantages", "the environment sends advantages, which "
                                    f"algorithm.advantage {self._config.algorithm.advantage} does not use",
                                    f"set algorithm.advantage: {GIVEN}, or send only scores")  # fmt: skip
        if self._own_advantages and with_some < len(pushed.sequences):
            raise GroupRefusedError(
                "advantages",
                f"{GIVEN} uses the environment's advantages, but "
                f"{len(pushed.sequences) - with_some} of {len(pushed.sequences)} rollouts have none",
                "send them for each rollout, or use another algorithm.advantage",
            )

    def _recognised(self, pushed: PushedGroup) -> tuple[MatchedSequence, ...]:
        """The recorded sequences of a group, whose turns then count as taken."""
        found, new = list[MatchedSequence](), dict[ReplyTurn, Conversation]()
        for number, sequence in enumerate(pushed.sequences):
            homes = {t: c for c in self._recorded.begun_with(sequence.tokens) for t in c.turns}
            taken = {t for c in homes.values() for t in c.taken} | set(new)
            one = recognise(number, sequence, homes, taken, self.ungrouped.text)
            new |= {turn: homes[turn] for turn in one.new}
            found.append(one)
        if not new:
            raise GroupRefusedError(
                "nothing_new", "every reply in the group is trained already or masked",
                "submit each reply once, unmasked",
            )  # fmt: skip
        for turn, home in new.items():
            home.taken.add(turn)
        self._count("unsampled_tokens", sum(one.unsampled for one in found))
        self._count("repeated_tokens", sum(one.repeated for one in found))
        return tuple(found)

    def _drop(self, tokens: int) -> None:
        self.ungrouped.drop(tokens)

    def _refuse(self, error: GroupRefusedError, given: object) -> None:
        self._count(error.reason)
        name = self.registry.name_of(given)
        message = f"{name} submitted a group that is not trained ({error.reason}): {error}"
        if self._reports < MOST_REPORTS:
            self._reports += 1
            log.warning("%s", message)
        harmless = error.reason in ("repeated", "no_room")
        if self._config.rollout.on_error == "fail" and not harmless:
            self._leases.submit(SubmittedGroup(name, failed=message))

    def _count(self, name: str, n: int = 1) -> None:
        self.ungrouped.tracker.counters.add(f"atropos/{name}", n)

    async def _listen(self) -> None:
        async with self._starting:
            if not self._server.address:
                self.registry.touch()
                await self._server.start()
                for line in self._server.described():
                    log.info("%s", line)
                    print(line, flush=True)

    async def _ask(self, task: Task, engine: Rollout, size: int) -> SubmittedGroup | str:
        """The group of a rollout, or why there is none."""
        request = asyncio.ensure_future(self._leases.ask(task.group_id, task.index, size, engine.whole_group))
        try:
            while not request.done():
                await asyncio.wait([request], timeout=min(1.0, self._settings.silent_s))
                if not request.done() and (silence := time.monotonic() - self.registry.last) > self._settings.silent_s:
                    return self._silent(silence)
            return request.result()
        finally:
            request.cancel()

    def _silent(self, seconds: float) -> str:
        known = ", ".join(e.name for e in self.registry.connected)
        senders = f"none of {known}" if known else "no environment"
        return (f"{senders} has sent a request for {seconds:.0f} s (rollout.atropos.silent_s): start it, with "
                f"rollout_server_url {self._server.address} and base_url {self._server.address}/v1")  # fmt: skip


def _taken_in(engine: Rollout, one: MatchedSequence, environment: str) -> Episode:
    sample = engine.take_in(one.source, one.end, one.turns)
    sample.metadata["data_source"] = environment
    return Episode([sample], one.score, [(sample, at, advantage) for at, advantage in one.steps])

"""Runs groups: calls the rollout function of each sample, scores it, and tells the tracker where a group belongs.

A group runs until all its samples are scored, until it was interrupted, or until something failed. An interrupted group
rests: its functions wait inside `generate`, or go on with what they do beside the engines, until the group is
continued. The first failure is kept for whoever waits for groups. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mslime.backends.sglang.client import EngineDied
from mslime.config.base import OnError
from mslime.config.errors import RolloutError, UserError
from mslime.config.schema import RunConfig
from mslime.data.sample import Group, SampleStatus
from mslime.rollout.conversations import Agents
from mslime.rollout.filters import load_sample_hook
from mslime.rollout.generation import Generator, GroupGate, Sampling, Traffic
from mslime.rollout.group_tracker import GroupTracker
from mslime.rollout.rewards.scorer import Scoring
from mslime.rollout.turns import Rollout
from mslime.rollout.workflow import Workflow, single_turn


@dataclass
class _LiveGroup:
    """A group with rollouts under way, whether it runs or rests.

    Attributes:
        rollouts: by number, with the task of each.
    """

    group: Group
    group_gate: GroupGate
    rollouts: dict[int, tuple[Rollout, asyncio.Task[None]]] = field(
        default_factory=dict[int, tuple[Rollout, asyncio.Task[None]]]
    )

    @property
    def at_rest(self) -> bool:
        """Whether nothing of the group is at an engine, and nothing will be before it is continued. A response that is
        scored is not waited for where another one waits to be generated: its reward comes while the group rests."""
        going = [rollout for rollout, task in self.rollouts.values() if not task.done()]
        if any(r.generating for r in going):
            return False
        if any(r.waiting for r in going):
            return True
        return not any(r.busy for r in going) and (not going or not self.group_gate.traffic.open or bool(self.errors()))

    @property
    def ended(self) -> bool:
        """Whether all rollouts have come to their end."""
        return all(task.done() for _, task in self.rollouts.values())

    def admit(self) -> None:
        """Let those who wait go on."""
        for rollout, _ in self.rollouts.values():
            rollout.admit()
        self.group_gate.admit()

    def rest(self) -> None:
        """Keep the rollouts that can go on."""
        self.group_gate.admitted = False
        self.rollouts = {i: (r, task) for i, (r, task) in self.rollouts.items() if not task.done()}

    def errors(self) -> list[BaseException]:
        """Of the rollouts that ended by one."""
        ended = [task for _, task in self.rollouts.values() if task.done()]
        cancelled: list[BaseException] = [asyncio.CancelledError() for task in ended if task.cancelled()]
        return cancelled + [e for task in ended if not task.cancelled() and (e := task.exception()) is not None]


class GroupRunner:
    """Runs the groups of training.

    Args:
        config: `seed`, `rollout` and `deadlines` are read.
        workflow: the function that `rollout.function` names.
        agents: with which rollouts chat.
        on_response: called after each finished response.
        on_end: called when a group has ended or rests, so that another may be submitted.

    Attributes:
        traffic: requests of training groups; while it is closed, nothing is generated.
        moved: set when a group has ended, or something failed.
        failure: the first one, until it is taken off.
    """

    def __init__(
        self,
        config: RunConfig,
        workflow: Workflow,
        tracker: GroupTracker,
        generator: Generator,
        sampling: Sampling,
        scoring: Scoring,
        agents: Agents,
        on_response: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._seed, self._spec, self._workflow = config.seed, config.rollout.function, workflow
        self._agents = agents
        self._on_error: OnError = config.rollout.on_error
        self._limit_s = config.deadlines.rollout_function_s
        self._tracker, self._generator, self._sampling, self._scoring = tracker, generator, sampling, scoring
        self._on_response, self._on_end = on_response, on_end
        self._hook = load_sample_hook(config.hooks.sample)
        self._live: dict[int, _LiveGroup] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.traffic, self.moved = Traffic(), asyncio.Event()
        self.failure: BaseException | None = None
        self._forgiven: set[int] = set()  # groups in flight when a failure was raised: theirs is the same one
        tracker.on_discard = self._end_rollout

    def start(self, group: Group) -> None:
        """Run a group that the tracker calls running: begin its rollouts, or let them go on."""
        live = self._live.setdefault(group.group_id, _LiveGroup(group, GroupGate(self.traffic)))
        for number in group.numbers:
            if number not in live.rollouts:
                self._begin_rollout(live, number)
        live.admit()
        task = asyncio.create_task(self._run(live), name=f"group {group.group_id}")
        self._tasks[group.group_id] = task
        task.add_done_callback(self._notice_crash)

    def stop_traffic(self) -> None:
        """Send nothing more. Groups that are not at an engine rest at once."""
        self.traffic.open = False
        for group_id in self._tasks:
            self._live[group_id].group_gate.moved.set()

    def fail(self, error: BaseException) -> None:
        """Remember the first failure, and wake who waits for groups."""
        self.failure = self.failure or error
        self.moved.set()

    def take_failure(self) -> BaseException | None:
        """The first failure, which is forgotten then. What befalls the groups that run now counts as the same one."""
        failure, self.failure = self.failure, None
        if failure is not None:
            self._forgiven = set(self._tasks)
        return failure

    def forget_deaths(self) -> None:
        """There is an engine again: what failed for want of one is no failure any more."""
        if isinstance(self.failure, EngineDied):
            self.take_failure()

    async def settle(self, seconds: float) -> None:
        """Wait until interrupted groups rest, but not for those of which only the scoring is left."""
        settling = [task for group_id, task in self._tasks.items() if not self._tracker.running[group_id].finished]
        if settling:
            await asyncio.wait(settling, timeout=seconds)

    def outside(self) -> int:
        """Rollouts whose function works on something else than generation now."""
        rollouts = [r for live in self._live.values() for r, task in live.rollouts.values() if not task.done()]
        return sum(not r.busy and not r.waiting for r in rollouts)

    async def close(self) -> None:
        """Cancel what runs; its groups rest."""
        self.traffic.open = False
        tasks = [*self._tasks.values(), *(task for live in self._live.values() for _, task in live.rollouts.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------- one rollout

    def _begin_rollout(self, live: _LiveGroup, number: int) -> None:
        """Begin a rollout, or continue what an earlier process has of it if the function can."""
        group = live.group
        first, *others = group.parts(number)
        if not first.status.finished and self._workflow is not single_turn:
            if others or first.response_length:
                self._tracker.begin_again(group, number)
            (first,) = group.parts(number)
            first.metadata = copy.deepcopy(group.metadata)  # an earlier try may have noted something
        session = f"g{group.group_id}"
        rollout = Rollout(
            group, number, session, self._spec, self._generator, self._sampling, live.group_gate, self._agents,
            self._tracker, self._limit_s,
        )  # fmt: skip
        task = asyncio.create_task(self._roll(rollout), name=f"rollout {session}-{number}")
        task.add_done_callback(lambda _: live.group_gate.moved.set())
        live.rollouts[number] = rollout, task

    async def _roll(self, rollout: Rollout) -> None:
        """Bring a rollout to its end and score it."""
        if not rollout.samples[0].status.finished:
            counts = await rollout.play(self._workflow, rollout.task(self._seed, evaluation=False), self._on_error)
            self._tracker.counters.add("failed_rollouts", not counts)
            self._tracker.counters.add("done")
            self._on_response()
        if rollout.samples[0].status is not SampleStatus.FAILED:
            await rollout.scoring()
            try:
                await self._scoring.rollout_finished(rollout.samples)
            except asyncio.CancelledError as error:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                where = f"group {rollout.samples[0].group_id}, response {rollout.number}"
                raise RolloutError(
                    "reward", where, "was cancelled from within", "catch CancelledError in it"
                ) from error
            finally:
                rollout.scored()

    def _end_rollout(self, group_id: int, number: int) -> None:
        """A response was thrown away, so the function that made it stops."""
        live = self._live.get(group_id)
        if live is not None and number in live.rollouts:
            rollout, task = live.rollouts.pop(number)
            rollout.end()
            task.cancel()
            if not live.rollouts and group_id not in self._tasks:
                del self._live[group_id]

    # --------------------------------------------------------------------------------------------------- one group

    async def _run(self, live: _LiveGroup) -> None:
        """Wait until a group's rollouts have ended or were interrupted, and put it where it then belongs."""
        group = live.group
        try:
            while not live.at_rest:
                live.group_gate.moved.clear()
                await live.group_gate.moved.wait()
            errors = live.errors()
            if group.finished and live.ended and not errors:
                errors += await self._score_group(group)
        except asyncio.CancelledError:
            self._ended(live, self._tracker.put_back)
            raise
        if errors:
            self._ended(live, lambda group: self._failed(group, errors))
        elif group.finished and live.ended:
            self._ended(live, self._complete)
        else:
            self._ended(live, self._tracker.interrupted)
        self._on_end()

    async def _score_group(self, group: Group) -> list[BaseException]:
        (error,) = await asyncio.gather(self._scoring.group_finished(group), return_exceptions=True)
        return [] if error is None else [error]

    def _ended(self, live: _LiveGroup, then: Callable[[Group], None]) -> None:
        """A group does not run any more."""
        group_id = live.group.group_id
        del self._tasks[group_id]
        live.rest()
        then(live.group)
        if not live.rollouts:
            self._live.pop(group_id, None)
        self._forgiven.discard(group_id)
        self.moved.set()

    def _complete(self, group: Group) -> None:
        """Tell the hook of a scored group, and accept it, or drop it."""
        try:
            self._hook(group)
            self._tracker.complete(group)
        except UserError as error:  # of the hook, or of the dynamic filter
            if not self._tracker.count_failure(group, str(error)):
                self._tracker.put_back(group)
                self.fail(error)

    def _failed(self, group: Group, errors: Sequence[BaseException]) -> None:
        """Drop a group that failed for the second time by its own fault; else it rests, and the failure is told."""
        if self._is_culprit(group, errors) and self._tracker.count_failure(group, str(errors[0])):
            return
        self._tracker.put_back(group)
        if group.group_id not in self._forgiven:
            self.fail(errors[0])

    def _is_culprit(self, group: Group, errors: Sequence[BaseException]) -> bool:
        """Whether these failures are the group's own: not an engine's death, nor what befell every group at once."""
        own = not any(isinstance(e, EngineDied | asyncio.CancelledError) for e in errors)
        return own and group.group_id not in self._forgiven and (bool(group.failures) or self.failure is None)

    def _notice_crash(self, task: asyncio.Task[None]) -> None:
        """A group's task ends without an error of its own making; anything else is ours, and must not be silent."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

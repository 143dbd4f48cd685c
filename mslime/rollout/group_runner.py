"""Runs groups: calls the rollout function of each sample, scores it, and reports the outcome to the tracker.

A group runs until all its samples are scored, until it is interrupted, or until something fails. An interrupted group
rests: its functions block inside `generate`, or continue their work outside the engines, until the group is continued.
The first failure is kept and raised to the caller that waits for groups. All methods belong to one event loop.
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
from mslime.rollout.filters import load_sample_hook
from mslime.rollout.generation import Generator, GroupGate, Sampling, Traffic
from mslime.rollout.group_tracker import GroupTracker
from mslime.rollout.rewards.scorer import Scoring
from mslime.rollout.turns import Agents, Rollout
from mslime.rollout.workflow import Workflow, single_turn


@dataclass
class _LiveGroup:
    """A group with unfinished rollouts, running or at rest.

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
        """Whether no rollout of the group is at an engine, and none will be before the group is continued. If another
        response waits for generation, scoring is not awaited: rewards may arrive while the group rests."""
        going = [rollout for rollout, task in self.rollouts.values() if not task.done()]
        if any(r.generating for r in going):
            return False
        if any(r.waiting for r in going):
            return True
        return not any(r.busy for r in going) and (not going or not self.group_gate.traffic.open or bool(self.errors()))

    @property
    def ended(self) -> bool:
        """Whether all rollouts have ended."""
        return all(task.done() for _, task in self.rollouts.values())

    def admit(self) -> None:
        """Wake the waiting rollouts."""
        for rollout, _ in self.rollouts.values():
            rollout.admit()
        self.group_gate.admit()

    def rest(self) -> None:
        """Keep only the rollouts that can be continued."""
        self.group_gate.admitted = False
        self.rollouts = {i: (r, task) for i, (r, task) in self.rollouts.items() if not task.done()}

    def errors(self) -> list[BaseException]:
        """Errors of the rollouts that failed."""
        ended = [task for _, task in self.rollouts.values() if task.done()]
        cancelled: list[BaseException] = [asyncio.CancelledError() for task in ended if task.cancelled()]
        return cancelled + [e for task in ended if not task.cancelled() and (e := task.exception()) is not None]


class GroupRunner:
    """Runs the groups of training.

    Args:
        config: `seed`, `rollout` and `deadlines` are read.
        workflow: the function of `rollout.function`.
        agents: chat renderer and server for rollouts.
        on_end: called when a group has ended or rests, to submit another.

    Attributes:
        traffic: requests of training groups; while it is closed, nothing is generated.
        moved: set when a response or a group has ended, or something failed.
        failure: the first one, until `take_failure`.
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
        on_end: Callable[[], None],
    ) -> None:
        self._seed, self._spec, self._workflow = config.seed, config.rollout.function, workflow
        self._agents = agents
        self._on_error: OnError = config.rollout.on_error
        self._limit_s = config.deadlines.rollout_function_s
        self._tracker, self._generator, self._sampling, self._scoring = tracker, generator, sampling, scoring
        self._on_end = on_end
        self._hook = load_sample_hook(config.hooks.sample)
        self._live: dict[int, _LiveGroup] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.traffic, self.moved = Traffic(), asyncio.Event()
        self.failure: BaseException | None = None
        self._same_failure: set[int] = set()  # groups in flight at a raised failure: theirs count as the same one
        tracker.on_discard = self._end_rollout

    def start(self, group: Group) -> None:
        """Run a group that the tracker lists as running: begin its rollouts, or let them continue."""
        live = self._live.setdefault(group.group_id, _LiveGroup(group, GroupGate(self.traffic)))
        for number in group.numbers:
            if number not in live.rollouts:
                self._begin_rollout(live, number)
        live.admit()
        task = asyncio.create_task(self._run(live), name=f"group {group.group_id}")
        self._tasks[group.group_id] = task
        task.add_done_callback(self._notice_crash)

    def stop_traffic(self) -> None:
        """Stop sending requests. Groups that are not at an engine rest at once."""
        self.traffic.open = False
        for group_id in self._tasks:
            self._live[group_id].group_gate.moved.set()

    def fail(self, error: BaseException) -> None:
        """Record the first failure, and wake the waiting caller."""
        self.failure = self.failure or error
        self.moved.set()

    def take_failure(self) -> BaseException | None:
        """Return and clear the first failure. Failures of groups that run now count as the same one."""
        failure, self.failure = self.failure, None
        if failure is not None:
            self._same_failure = set(self._tasks)
        return failure

    def forget_deaths(self) -> None:
        """An engine is available again: clear failures that came from the lack of one."""
        if isinstance(self.failure, EngineDied):
            self.take_failure()

    async def settle(self, seconds: float) -> None:
        """Wait until interrupted groups rest; groups that are only being scored are not awaited."""
        settling = [task for group_id, task in self._tasks.items() if not self._tracker.running[group_id].finished]
        if settling:
            await asyncio.wait(settling, timeout=seconds)

    def outside(self) -> int:
        """Number of rollouts whose function currently works outside generation."""
        rollouts = [r for live in self._live.values() for r, task in live.rollouts.values() if not task.done()]
        return sum(not r.busy and not r.waiting for r in rollouts)

    async def close(self) -> None:
        """Cancel running rollouts; their groups rest."""
        self.traffic.open = False
        tasks = [*self._tasks.values(), *(task for live in self._live.values() for _, task in live.rollouts.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------- one rollout

    def _begin_rollout(self, live: _LiveGroup, number: int) -> None:
        """Begin a rollout, or continue the partial response of an earlier process if the function supports it."""
        group = live.group
        first, *others = group.parts(number)
        if not first.status.finished and self._workflow is not single_turn:
            if others or first.response_length:
                self._tracker.restart(group, [number], "restarted")
            (first,) = group.parts(number)
            first.metadata = copy.deepcopy(group.metadata)  # an earlier attempt may have added to it
        session = f"g{group.group_id}"
        rollout = Rollout(
            group, number, session, self._spec, self._generator, self._sampling, live.group_gate, self._agents,
            self._tracker, self._limit_s,
        )  # fmt: skip
        task = asyncio.create_task(self._roll(rollout), name=f"rollout {session}-{number}")
        task.add_done_callback(lambda _: live.group_gate.moved.set())
        live.rollouts[number] = rollout, task

    async def _roll(self, rollout: Rollout) -> None:
        """Run a rollout to its end and score it."""
        if not rollout.samples[0].status.finished:
            counts = await rollout.play(self._workflow, rollout.task(self._seed, evaluation=False), self._on_error)
            self._tracker.counters.add("failed_rollouts", not counts)
            self._tracker.counters.add("done")
            self.moved.set()
        if rollout.samples[0].status is not SampleStatus.FAILED:
            await rollout.scoring()
            try:
                await self._scoring.rollout_finished(rollout.samples)
            except asyncio.CancelledError as error:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                where = f"group {rollout.samples[0].group_id}, response {rollout.number}"
                raise RolloutError("reward", where, "raised CancelledError", "catch CancelledError in it") from error
            finally:
                rollout.scored()

    def _end_rollout(self, group_id: int, number: int) -> None:
        """Stop the function of a discarded response."""
        live = self._live.get(group_id)
        if live is not None and number in live.rollouts:
            rollout, task = live.rollouts.pop(number)
            rollout.end()
            task.cancel()
            if not live.rollouts and group_id not in self._tasks:
                del self._live[group_id]

    # --------------------------------------------------------------------------------------------------- one group

    async def _run(self, live: _LiveGroup) -> None:
        """Wait until a group's rollouts have ended or were interrupted, and report the outcome to the tracker."""
        group = live.group
        try:
            while not live.at_rest:
                live.group_gate.moved.clear()
                await live.group_gate.moved.wait()
            errors = live.errors()
            if group.finished and live.ended and not errors:
                (error,) = await asyncio.gather(self._scoring.group_finished(group), return_exceptions=True)
                errors += [] if error is None else [error]
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

    def _ended(self, live: _LiveGroup, then: Callable[[Group], None]) -> None:
        """Remove a group from the running ones."""
        group_id = live.group.group_id
        del self._tasks[group_id]
        live.rest()
        then(live.group)
        if not live.rollouts:
            self._live.pop(group_id, None)
        self._same_failure.discard(group_id)
        self.moved.set()

    def _complete(self, group: Group) -> None:
        """Call the sample hook for a scored group, and accept the group or drop it."""
        try:
            self._hook(group)
            self._tracker.complete(group)
        except UserError as error:  # of the hook, or of the dynamic filter
            if not self._tracker.count_failure(group, str(error)):
                self._tracker.put_back(group)
                self.fail(error)

    def _failed(self, group: Group, errors: Sequence[BaseException]) -> None:
        """Drop a group at its second own failure; otherwise put it back and record the failure. An engine's
        death, or a failure of all groups at once, is not the group's own."""
        same = group.group_id in self._same_failure
        own = not same and not any(isinstance(e, EngineDied | asyncio.CancelledError) for e in errors)
        if own and (group.failures or self.failure is None) and self._tracker.count_failure(group, str(errors[0])):
            return
        self._tracker.put_back(group)
        if not same:
            self.fail(errors[0])

    def _notice_crash(self, task: asyncio.Task[None]) -> None:
        """Report a crash of a group's task: such a task handles its own errors, so any other is a bug and must not be
        silent."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

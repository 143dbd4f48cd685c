"""Runs groups: generates and scores their samples, and tells the books where each group then belongs.

A group's task ends when all its samples are scored, when it was interrupted, or when something failed. The first
failure is kept for whoever waits for groups. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from mslime.backends.sglang.client import EngineDied
from mslime.config.errors import UserError
from mslime.data.sample import Group, Sample, SampleStatus
from mslime.rollout.books import Books
from mslime.rollout.generation import Generator, Sampling, Traffic
from mslime.rollout.scoring import Scoring


class GroupRunner:
    """Runs the groups of training.

    Args:
        on_response: called after each finished response.
        on_end: called when a group has ended or rests, so that another may be submitted.

    Attributes:
        traffic: requests of training groups; while it is closed, nothing is generated.
        moved: set when a group has ended, or something failed.
        failure: the first one, until it is taken off.
    """

    def __init__(
        self,
        books: Books,
        generator: Generator,
        sampling: Sampling,
        scoring: Scoring,
        on_response: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._books, self._generator, self._sampling, self._scoring = books, generator, sampling, scoring
        self._on_response, self._on_end = on_response, on_end
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.traffic, self.moved = Traffic(), asyncio.Event()
        self.failure: BaseException | None = None
        self._forgiven: set[int] = set()  # groups in flight when a failure was raised: theirs is the same one

    def start(self, group: Group) -> None:
        """Run a group that the books call running."""
        task = asyncio.create_task(self._run(group), name=f"group {group.group_id}")
        self._tasks[group.group_id] = task
        task.add_done_callback(self._notice_crash)

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

    async def settle(self, seconds: float) -> None:
        """Wait until interrupted groups rest, but not for those of which only the scoring is left."""
        settling = [task for group_id, task in self._tasks.items() if not self._books.running[group_id].finished]
        if settling:
            await asyncio.wait(settling, timeout=seconds)

    async def close(self) -> None:
        """Cancel what runs; its groups rest."""
        self.traffic.open = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, group: Group) -> None:
        """Generate and score all samples of a group, and put it where it then belongs."""
        outcomes: list[BaseException | None] = []
        try:
            runs = [self._run_sample(s, f"g{group.group_id}") for s in group.samples]
            generated = await asyncio.gather(*runs, return_exceptions=True)
            if group.finished and not any(generated):
                generated += await asyncio.gather(self._scoring.group_finished(group), return_exceptions=True)
            outcomes = generated
        finally:
            del self._tasks[group.group_id]
            errors = [e for e in outcomes if e is not None]
            if not outcomes:  # the task was cancelled
                self._books.put_back(group)
            elif errors:
                self._failed(group, errors)
            elif group.finished:
                self._complete(group)
            else:
                self._books.interrupted(group)
            self._forgiven.discard(group.group_id)
            self.moved.set()
        self._on_end()

    async def _run_sample(self, sample: Sample, session: str) -> None:
        """Bring a sample to its end and score it; stop early when the traffic closes."""
        while self.traffic.open and not sample.status.finished:
            sample.status = SampleStatus.PENDING
            added = await self._generator.advance(sample, self._sampling, session, self.traffic)
            self._books.generated(sample, added)
            if sample.status.finished:
                self._on_response()
        if sample.status.finished and sample.status is not SampleStatus.FAILED:
            await self._scoring.sample_finished(sample)

    def _complete(self, group: Group) -> None:
        """Accept a scored group, or drop it."""
        try:
            self._books.complete(group)
        except UserError as error:  # of the dynamic filter
            if not self._books.blame(group, str(error)):
                self._books.put_back(group)
                self.fail(error)

    def _failed(self, group: Group, errors: Sequence[BaseException]) -> None:
        """Drop a group that failed for the second time by its own fault; else it rests, and the failure is told."""
        if self._is_culprit(group, errors) and self._books.blame(group, str(errors[0])):
            return
        self._books.put_back(group)
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

"""Reward functions in worker processes: started, called, killed if they hang, and replaced if they end.

A user's function may raise, hang, print, fork or end its process. None of that affects the rollout or the scores of
other samples. The process's side is `reward_worker`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from mslime.data.sample import Sample
from mslime.rollout.rewards.reward_kinds import RewardJob, RewardResult
from mslime.rollout.worker_process import WorkerLostError, WorkerProcess

MODULE = "mslime.rollout.rewards.reward_worker"
ASYNC_SLOTS = 64  # samples that one worker's async function may await at once


Request = Sample | list[Sample]
Answer = RewardResult | list[RewardResult]


class RewardProcess(WorkerProcess):
    """One reward process.

    Attributes:
        concurrent: whether its function is async.
        claims: samples that it was given and has not returned.
        reserved: it works on one sample and accepts no other.
    """

    def __init__(self, process: asyncio.subprocess.Process, details: Any) -> None:
        super().__init__(process, details)
        self.concurrent: bool = details
        self.claims, self.reserved = 0, False


class WorkerPool:
    """Keeps `workers` processes for one function, and replaces processes that end.

    A synchronous function gets one sample at a time. An async one gets many, so if its process hangs or dies, the
    sample at fault is unknown: every sample it held is retried once, alone with a process. A single sample whose
    process ended is retried too, since something else may have killed the process.
    """

    def __init__(self, job: RewardJob, workers: int) -> None:
        self._job, self._size = job, workers
        self._workers: list[RewardProcess] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._moved = asyncio.Event()
        self._turns: asyncio.Semaphore | None = None
        self._want_alone = 0

    async def score(self, sample: Sample) -> RewardResult:
        """Score a sample. Raises ConfigError if the function cannot be imported."""
        result = await self._answer(sample)
        assert isinstance(result, RewardResult), "a list answers a group"
        return result

    async def score_group(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Score the samples of a group in one call. Raises ConfigError likewise."""
        results = await self._answer(list(samples))
        return [results] * len(samples) if isinstance(results, RewardResult) else results

    async def _answer(self, request: Request) -> Answer:
        async with await self._queue():
            result = await self._try(request, alone=False) or await self._try(request, alone=True)
        assert result is not None, "a request alone in its process gets a result"
        return result

    async def start(self) -> None:
        """Start all processes now, to detect early that a function cannot be imported. Raises ConfigError."""
        await self._queue()
        while self._starting:
            await asyncio.wait(self._starting)
        self._raise_failure()

    async def close(self) -> None:
        """End all processes."""
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(worker.kill() for worker in self._workers))
        self._workers.clear()

    async def _queue(self) -> asyncio.Semaphore:
        """Semaphore for waiting samples; its size is the capacity of all processes together."""
        while self._turns is None:
            self._refill()
            self._raise_failure()
            if self._workers:
                slots = ASYNC_SLOTS if self._workers[0].concurrent else 1
                self._turns = asyncio.Semaphore(slots * self._size)
            else:
                await self._wait()
        return self._turns

    async def _try(self, request: Request, alone: bool) -> Answer | None:
        """The answer of one process; None if its absence may have another cause than this request."""
        worker = await self._claim(alone)
        try:
            return await worker.ask(request, self._job.limit_s)
        except TimeoutError:
            await worker.kill()
            stuck = RewardResult(0.0, f"took longer than {self._job.limit_s:g} s; its process was killed")
            return stuck if alone or not worker.concurrent else None
        except WorkerLostError as error:
            return RewardResult(0.0, str(error)) if alone else None
        finally:
            worker.claims -= 1
            worker.reserved = False
            self._moved.set()

    async def _claim(self, alone: bool) -> RewardProcess:
        """A process with a free slot, or an idle one if `alone`; waits until one is available."""
        self._want_alone += alone
        try:
            while True:
                self._refill()
                worker = min(self._workers, key=lambda w: (w.reserved, w.claims), default=None)
                if worker is not None and not worker.reserved and worker.claims < self._capacity(worker, alone):
                    worker.claims += 1  # nothing was awaited since `_refill`, so it is alive
                    worker.reserved = alone
                    return worker
                self._raise_failure()
                await self._wait()
        finally:
            self._want_alone -= alone

    def _capacity(self, worker: RewardProcess, alone: bool) -> int:
        return ASYNC_SLOTS if worker.concurrent and not alone and not self._want_alone else 1

    def _refill(self) -> None:
        """Remove processes that ended, and start to replace them."""
        self._workers = [w for w in self._workers if w.alive]
        while self._failure is None and len(self._workers) + len(self._starting) < self._size:
            task = asyncio.create_task(self._start_one())
            self._starting.add(task)
            task.add_done_callback(self._started)

    async def _start_one(self) -> None:
        worker = await RewardProcess.start(MODULE, self._job)
        self._workers.append(worker)  # looked up after the wait: `_refill` binds another list meanwhile

    def _started(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
        self._moved.set()

    def _raise_failure(self) -> None:
        """Raise the failed start of a process if no process is left; the next call tries again."""
        if self._failure is not None and not self._workers and not self._starting:
            failure, self._failure = self._failure, None
            raise failure

    async def _wait(self) -> None:
        self._moved.clear()
        await self._moved.wait()

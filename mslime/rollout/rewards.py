"""Rewards: exact match here, everything else in worker processes that can be killed.

A user's function may raise, hang, return NaN or take its process down; none of that stops the rollout. What it means
for the run is decided by `reward.on_error`, and the message names the function, the sample and the reason.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import sys
from typing import Any

from mslime.config.errors import ConfigError, RewardError
from mslime.config.schema import RewardConfig
from mslime.data.sample import Sample
from mslime.rollout.reward_worker import HEADER, encode
from mslime.rollout.verdict import Verdict

START_SECONDS = 120.0  # importing a user's module may load a model
GRACE_SECONDS = 2.0  # between a worker's own time limit and its end
ASYNC_SLOTS = 64  # samples that one worker's async function may be awaiting at once


class WorkerLostError(Exception):
    """A worker process ended with samples in hand."""


class Worker:
    """One reward process.

    Attributes:
        concurrent: whether its function is async.
        claims: samples that were given to it and are not back.
        reserved: it works on one sample and takes no other.
    """

    def __init__(self, process: asyncio.subprocess.Process, concurrent: bool) -> None:
        self._process, self.concurrent = process, concurrent
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._count = 0
        self.claims, self.reserved = 0, False
        self._reader = asyncio.create_task(self._read())

    @property
    def alive(self) -> bool:
        """Whether it can take samples."""
        return self._process.returncode is None and not self._reader.done()

    @classmethod
    async def start(cls, function: str, setting: str, limit_s: float) -> Worker:
        """Start a process and wait until it has imported the function. Raises ConfigError when it cannot."""
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "mslime.rollout.reward_worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(encode((function, setting, limit_s)))
        try:
            kind, detail = await asyncio.wait_for(_read_message(process.stdout), START_SECONDS)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            process.kill()
            reason = "ended" if isinstance(error, asyncio.IncompleteReadError) else "did not return"
            raise ConfigError(setting, function, f"the process that imports it {reason} within {START_SECONDS:g} s",
                              "mend what the module does when it is imported") from error  # fmt: skip
        except BaseException:
            process.kill()
            raise
        if kind == "error":
            await process.wait()
            raise detail
        return cls(process, detail)

    async def call(self, sample: Sample, limit_s: float) -> Verdict:
        """The verdict on a sample. Raises WorkerLostError when the process ends, TimeoutError when it is stuck."""
        assert self._process.stdin is not None
        number, self._count = self._count, self._count + 1
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(encode((number, sample)))
            return await asyncio.wait_for(future, limit_s + GRACE_SECONDS)
        finally:
            del self._waiting[number]

    async def kill(self) -> None:
        """End the process at once."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await self._reader

    async def _read(self) -> None:
        """Hand answers to those who wait; when the process ends, tell all of them."""
        assert self._process.stdout is not None
        try:
            while True:
                number, verdict = await _read_message(self._process.stdout)
                if number in self._waiting and not self._waiting[number].done():
                    self._waiting[number].set_result(verdict)
        except asyncio.IncompleteReadError:
            code = await self._process.wait()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(WorkerLostError(f"its process ended with exit code {code}"))


async def _read_message(stream: asyncio.StreamReader) -> Any:
    header = await stream.readexactly(HEADER.size)
    return pickle.loads(await stream.readexactly(HEADER.unpack(header)[0]))


class WorkerPool:
    """Keeps `workers` processes for one function, and replaces those that end.

    A synchronous function gets one sample at a time. An async one gets many, so when its process is stuck or dies,
    nobody knows whose fault it was: every sample it held is then tried once more, alone with a process.
    """

    def __init__(self, function: str, setting: str, workers: int, limit_s: float) -> None:
        self._function, self._setting, self._size, self._limit_s = function, setting, workers, limit_s
        self._workers: list[Worker] = []
        self._freed = asyncio.Condition()
        self._turns: asyncio.Semaphore | None = None
        self._want_alone = 0

    async def score(self, sample: Sample) -> Verdict:
        """The verdict on a sample. Raises ConfigError when the function cannot be imported."""
        async with await self._queue():
            result = await self._try(sample, alone=False) or await self._try(sample, alone=True)
        assert result is not None, "a sample that is alone with its process gets a verdict"
        return result

    async def start(self) -> None:
        """Start all processes now, so that a function that cannot be imported is known early. Raises ConfigError."""
        await self._queue()

    async def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            await worker.kill()
        self._workers.clear()

    async def _queue(self) -> asyncio.Semaphore:
        """The line in which samples wait; as many leave it as all processes together can work on."""
        async with self._freed:
            if self._turns is None:
                await self._fill()
                slots = ASYNC_SLOTS if self._workers[0].concurrent else 1
                self._turns = asyncio.Semaphore(slots * self._size)
            return self._turns

    async def _try(self, sample: Sample, alone: bool) -> Verdict | None:
        """The verdict of one process; None when another sample may be to blame that there is neither."""
        worker = await self._claim(alone)
        alone = alone or not worker.concurrent
        try:
            return await worker.call(sample, self._limit_s)
        except TimeoutError:
            await worker.kill()
            return Verdict(0.0, f"took longer than {self._limit_s:g} s; its process was killed") if alone else None
        except (WorkerLostError, BrokenPipeError, ConnectionResetError) as error:
            return Verdict(0.0, str(error) or "its process ended") if alone else None
        finally:
            worker.claims -= 1
            worker.reserved = False
            async with self._freed:
                self._freed.notify_all()

    async def _claim(self, alone: bool) -> Worker:
        """A process with a free slot, or one that works on nothing else; waits while others keep to their limits."""
        self._want_alone += alone
        try:
            async with self._freed:
                while True:
                    await self._fill()
                    worker = min(self._workers, key=lambda w: (w.reserved, w.claims))
                    room = ASYNC_SLOTS if worker.concurrent and not alone and not self._want_alone else 1
                    if not worker.reserved and worker.claims < room:
                        worker.claims += 1
                        worker.reserved = alone
                        return worker
                    await self._freed.wait()
        finally:
            self._want_alone -= alone

    async def _fill(self) -> None:
        """Start processes until the pool is full. The caller holds `_freed`."""
        self._workers = [w for w in self._workers if w.alive]
        while len(self._workers) < self._size:
            self._workers.append(await Worker.start(self._function, self._setting, self._limit_s))


class RewardScorer:
    """Scores samples as `reward` says. Belongs to one event loop; close it there.

    Attributes:
        errors: rewards that raised, ran out of time or were no finite number.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self.errors = 0
        self._pool: WorkerPool | None = None
        self.name = config.kind
        if config.kind != "exact":
            function = config.function if config.kind == "custom" else "mslime.rollout.math_reward:math_equivalent"
            if function is None:
                raise ConfigError("reward.function", None, "kind custom needs a function", "name it as module:function")
            self.name = function
            self._pool = WorkerPool(function, "reward.function", config.workers, config.timeout_s)

    async def start(self) -> None:
        """Import the function before anything is generated. Raises ConfigError when that fails."""
        if self._pool is not None:
            await self._pool.start()

    async def score(self, sample: Sample) -> float | None:
        """The reward of a finished sample, whose process rewards are set; None when it is to be dropped.

        Raises:
            RewardError: it could not be scored and `reward.on_error` is `fail`.
            ConfigError: the function cannot be imported.
        """
        if self._pool is None:
            return exact_match(sample)
        bare = dataclasses.replace(sample, routes=None, supports=None)  # large, and no reward reads them
        verdict = await self._pool.score(bare)
        if not verdict.error:
            sample.process_rewards = list(verdict.steps)
            return verdict.reward
        self.errors += 1
        sample.error = verdict.error
        if self._config.on_error == "fail":
            raise RewardError(
                f"reward {self.name}",
                f"group {sample.group_id}, sample {sample.index}: {sample.response[:200]!r}",
                verdict.error,
                "mend the function, or set reward.on_error to zero or drop",
            )
        return 0.0 if self._config.on_error == "zero" else None

    async def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            await self._pool.close()


def exact_match(sample: Sample) -> float:
    """1.0 when the response equals the label, blanks around them aside, else 0.0."""
    return float(sample.response.strip() == str(sample.label).strip())

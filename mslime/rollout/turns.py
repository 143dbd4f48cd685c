"""One rollout under way: the engine as its function sees it, and the function's call.

A group's rollouts reach the engines through its door. The door is open while the group runs and the traffic flows;
whoever finds it closed waits inside `generate` until the group is continued.
"""

from __future__ import annotations

import asyncio
import json
import math
import traceback
import zlib
from collections.abc import Callable, Sequence

from mslime.backends.sglang.generating import Finish
from mslime.config.errors import RolloutError, UserError
from mslime.data.sample import Sample, SampleStatus, check_invariants
from mslime.rollout.generation import Generator, Sampling, Traffic
from mslime.rollout.workflow import SETTING, NoRoomError, Task, Turn, Workflow


class Door:
    """Whether the rollouts of a group may ask the engines.

    Attributes:
        admitted: the group runs; else it rests.
        moved: set whenever a rollout of the group begins or ends to do something.
    """

    def __init__(self, traffic: Traffic, admitted: bool = False) -> None:
        self.traffic, self.admitted = traffic, admitted
        self.moved, self._next = asyncio.Event(), asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether a request may be sent."""
        return self.admitted and self.traffic.open

    def admit(self) -> None:
        """The group runs from now on; those who wait go on."""
        self.admitted = True
        self._next.set()
        self._next = asyncio.Event()

    async def next_admission(self) -> None:
        """Wait until the group is continued."""
        await self._next.wait()


class Rollout:
    """One rollout, and the `workflow.Engine` of its function.

    Args:
        session: its requests prefer one engine.
        spec: name of the function, for messages.
        booked: told of the tokens that an engine added to the sample.
        spoilt: told of a sample that its function has changed, and of the tokens that were to be trained before.

    Attributes:
        busy: it is at an engine, or is scored. waiting: for its group to be continued. Neither: its function works.
    """

    def __init__(
        self,
        sample: Sample,
        session: str,
        spec: str,
        generator: Generator,
        sampling: Sampling,
        door: Door,
        booked: Callable[[Sample, int], None] = lambda sample, tokens: None,
        spoilt: Callable[[Sample, int], None] = lambda sample, tokens: None,
    ) -> None:
        self.sample, self._session, self._spec = sample, session, spec
        self._generator, self._sampling, self._door = generator, sampling, door
        self._booked, self._spoilt, self._trained = booked, spoilt, sample.trainable_tokens
        self.busy = self.waiting = self._given = self._over = False
        self._turn_start = sample.prompt_length
        self._finish: Finish | None = None
        self._known = self._print()

    # ------------------------------------------------------------------------------------ as the function sees it

    def new_sample(self) -> Sample:
        """See `workflow.Engine`."""
        if self._given:
            raise self._error("called new_sample() a second time", "one rollout is one sample so far; take turns in it")
        self._given = True
        return self.sample

    async def generate(self, sample: Sample, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        """See `workflow.Engine`."""
        self._check(sample)
        if self.busy or self.waiting:
            raise self._error("called generate() while another call was under way", "await one turn after the other")
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        start, end = len(sample), None if max_tokens is None else len(sample) + max_tokens
        if start > sample.prompt_length and self._finish is None:
            start = self._turn_start  # the turn began in an earlier process
        self._finish = None
        while self._finish in (None, "abort"):
            await self._enter()
            try:
                most = None if end is None else end - len(sample)
                step = await self._generator.advance(
                    sample, self._sampling, self._session, self._door.traffic, start=start, most=most, stop=texts
                )
            finally:
                self._leave()
            self._check_alive()
            self._finish = step.finish
            sample.status = SampleStatus.ABORTED if step.finish == "abort" else SampleStatus.PENDING
            self._known, self._trained = self._print(), sample.trainable_tokens
            self._booked(sample, step.tokens)
        self._turn_start = len(sample)
        return Turn(sample.tokens[start:], "stop" if self._finish == "stop" else "length", self._generator.decode)

    def append(self, sample: Sample, added: str | Sequence[int]) -> None:
        """See `workflow.Engine`."""
        self._check(sample)
        tokens = self.encode(added) if isinstance(added, str) else list(added)
        if len(sample) + len(tokens) >= self._sampling.longest_input:
            self._finish = "length"
            raise NoRoomError(f"{len(tokens)} tokens after {len(sample)}; {self._sampling.longest_input} are too many")
        sample.extend(tokens)
        self._turn_start, self._known = len(sample), self._print()

    def room(self, sample: Sample) -> int:
        """See `workflow.Engine`."""
        return max(0, self._sampling.room(sample))

    def encode(self, text: str) -> list[int]:
        """See `workflow.Engine`."""
        return self._generator.encode(text)

    # -------------------------------------------------------------------------------------- as the runner sees it

    def task(self, seed: int, evaluation: bool) -> Task:
        """What its function is asked.

        Args:
            seed: of the run.
        """
        s = self.sample
        own = zlib.crc32(f"{seed}/{self._session}/{s.index}".encode()) & 0x7FFFFFFF
        prompt = s.tokens[: s.prompt_length]
        return Task(prompt, s.label, s.metadata, s.group_id, s.index, evaluation, own, self._generator.decode)

    async def run(self, function: Workflow, task: Task) -> None:
        """Call the function and finish its sample.

        Raises:
            RolloutError: the function raised, or returned or changed what it may not. Its own UserErrors pass.
        """
        try:
            returned = await function(task, self)
        except NoRoomError:
            returned = None
        except UserError:
            raise
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise self._error("was cancelled from within", "catch CancelledError in it") from error
        except Exception as error:  # a user's function may raise anything
            place = traceback.extract_tb(error.__traceback__)[-1]
            told = f"raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            raise self._error(told, "mend the function") from error
        self._check_returned(returned)
        self.sample.status = SampleStatus.COMPLETED if self._finish == "stop" else SampleStatus.TRUNCATED
        self.sample.response = self._generator.decode(self.sample.response_tokens.tolist())

    def end(self) -> None:
        """The function may add nothing any more: its response was thrown away."""
        self._over = True

    async def admitted(self) -> None:
        """Be scored from now on, when the group does not rest."""
        while not self._door.admitted:
            await self._wait()
        self.busy = True

    async def _enter(self) -> None:
        self._check_alive()
        while not self._door.open:
            await self._wait()
        self.busy = True

    async def _wait(self) -> None:
        self.waiting = True
        self._door.moved.set()
        try:
            await self._door.next_admission()
        finally:
            self.waiting = False

    def _leave(self) -> None:
        self.busy = False
        self._door.moved.set()

    # --------------------------------------------------------------------------------------------------- mistakes

    def _check(self, sample: Sample) -> None:
        self._check_alive()
        if sample is not self.sample:
            raise self._error(f"used {type(sample).__name__} of another rollout", "use the one of engine.new_sample()")
        if self._print() != self._known:
            self._over = True  # even if the function goes on after the error
            self._spoilt(sample, self._trained)
            raise self._error("changed tokens, loss mask or log-probs of its sample",
                              "let it grow by engine.generate and engine.append only")  # fmt: skip

    def _check_alive(self) -> None:
        if self._over:
            raise asyncio.CancelledError(f"rollout {self._session}-{self.sample.index} begins anew")

    def _check_returned(self, returned: object) -> None:
        samples = returned if isinstance(returned, list) else [self.sample if returned is None else returned]
        if len(samples) != 1:
            way_out = "return the sample of engine.new_sample(); several samples of one rollout are not trained yet"
            raise self._error(f"returned {len(samples)} samples", way_out)
        if samples[0] is not self.sample:
            raise self._error(f"returned {samples[0]!r:.80}", "return the sample of engine.new_sample(), or None")
        self._check(self.sample)
        if self._finish is None:
            raise self._error("returned without generating", "call engine.generate at least once")
        reward = self.sample.reward
        if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
            raise self._error(f"set the reward {reward!r:.80}", "set a finite number, or leave it to the reward")
        self.sample.reward = None if reward is None else float(reward)
        try:
            json.dumps(self.sample.metadata)
        except (TypeError, ValueError) as error:
            raise self._error(f"left metadata that cannot be saved: {error}",
                              "keep text, numbers, lists and objects in it") from error  # fmt: skip
        try:
            check_invariants(self.sample)
        except AssertionError as error:
            raise self._error(f"left a broken sample: {error}", "change nothing but its metadata") from error

    def _error(self, rule: str, way_out: str) -> RolloutError:
        where = f"group {self.sample.group_id}, response {self.sample.index}"
        return RolloutError(f"{SETTING} {self._spec}", where, rule, way_out)

    def _print(self) -> tuple[int, int]:
        """Length and checksum of what only the engine and the environment may write."""
        s, checksum = self.sample, 0
        for column in (s.tokens, s.loss_mask, s.log_probs):
            checksum = zlib.crc32(column.tobytes(), checksum)
        return len(s), checksum

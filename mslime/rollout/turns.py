"""One running rollout: the `Engine` of its function, the function's call, and its chats."""

from __future__ import annotations

import asyncio
import copy
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mslime.config.base import OnError
from mslime.config.errors import RolloutError, UserError
from mslime.config.rollout import AgentLimits, RolloutConfig
from mslime.data.sample import Group, Sample, SampleStatus
from mslime.extensions import raised
from mslime.rollout.agents.app import ModelEndpoint, ModelServer, ServedRollout
from mslime.rollout.agents.messages import ChatError, Tools
from mslime.rollout.agents.renderer import Renderer, Rendering
from mslime.rollout.agents.session import ChatSession, Reply, ReplyTurn
from mslime.rollout.generation import Generator, GroupGate, Sampling
from mslime.rollout.returned import GrowingSample, TakenTurn, TokenCounter, outcome_of, settle
from mslime.rollout.workflow import SETTING, AbsentError, Episode, NoRoomError, Task, Turn, Workflow


class Rollout:
    """One rollout, and the `workflow.Engine` of its function.

    Args:
        number: of the rollout within its group.
        session: its requests prefer one engine.
        spec: name of the function, for messages.
        agents: chat renderer and server.
        limit_s: seconds that the function may take between two requests to the engines; None: no limit.
    """

    def __init__(
        self,
        group: Group,
        number: int,
        session: str,
        spec: str,
        generator: Generator,
        sampling: Sampling,
        group_gate: GroupGate,
        agents: Agents,
        tracker: TokenCounter | None = None,
        limit_s: float | None = None,
    ) -> None:
        self._group, self.number, self._session, self._spec = group, number, session, spec
        self._generator, self._sampling, self._group_gate = generator, sampling, group_gate
        self._tracker, self._limit_s = tracker or TokenCounter(), limit_s
        self._chats = Conversations(agents, self, self._end_of_silence)
        self._grown = [GrowingSample(s, s.prompt_length) for s in group.parts(number)]
        self._at_work, self._waiting = set[object](), set[object]()
        self._generating = set[asyncio.Task[Any]]()
        self._given = self._over = False
        self._turns = 0
        self._watch: asyncio.Timeout | None = None

    @property
    def samples(self) -> list[Sample]:
        """Its sequences; once the rollout has ended, the last one has the newest turn."""
        return self._group.parts(self.number)

    @property
    def longest(self) -> int:
        """Sequences of this many tokens cannot be continued."""
        return self._sampling.longest_input

    @property
    def busy(self) -> bool:
        """Whether it is at an engine, or being scored. If neither busy nor waiting, its function works."""
        return bool(self._at_work)

    @property
    def generating(self) -> bool:
        """Whether it is at an engine."""
        return bool(self._at_work - {self})

    @property
    def waiting(self) -> bool:
        """Whether it waits for its group to be continued."""
        return bool(self._waiting)

    # ------------------------------------------------------------------------------------ as the function sees it

    def new_sample(self, prompt: Sequence[int] | None = None) -> Sample:
        self._check_alive()
        if prompt is None and not self._given:
            self._given = True
            return self._grown[0].sample
        tokens = self._group.prompt if prompt is None else self._ids(prompt)
        if not 0 < len(tokens) < self._sampling.longest_input:
            raise self._error(f"began a sequence with {len(tokens)} tokens",
                              f"use at least one, and fewer than {self._sampling.longest_input}")  # fmt: skip
        index, label = self._group.next_index(self.number), self._grown[0].sample.label
        sample = Sample.from_prompt(self._group.group_id, index, tokens, label)
        sample.metadata = copy.deepcopy(self._group.metadata)
        return self._add(GrowingSample(sample, len(sample)))

    def branch(self, sample: Sample, at: int | None = None) -> Sample:
        source = self._checked(sample)
        known = source.turn_start if source.busy else len(sample)
        where = known if at is None else at
        if not sample.prompt_length <= where <= known:
            raise self._error(f"branched at token {where} of {len(sample)}",
                              f"branch between the prompt's end ({sample.prompt_length}) and {known}")  # fmt: skip
        new = sample.branch(self._group.next_index(self.number), where)
        return self._add(GrowingSample(new, where, source=source, at=where))

    async def generate(self, sample: Sample, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        grown = self._checked(sample)
        if grown.busy:
            raise self._error("called generate() while another call for the sequence was running",
                              "await each turn before the next")  # fmt: skip
        grown.busy = True
        task = asyncio.current_task()
        assert task is not None, "generate() is awaited in a task"
        self._generating.add(task)
        try:
            return await self._turn(grown, max_tokens, (stop,) if isinstance(stop, str) else tuple(stop))
        finally:
            grown.busy = False
            self._generating.discard(task)

    def append(self, sample: Sample, added: str | Sequence[int]) -> None:
        grown = self._idle(sample)
        tokens = self.encode(added, int(sample.tokens[-1])) if isinstance(added, str) else self._ids(added)
        if len(sample) + len(tokens) >= self._sampling.longest_input:
            grown.finish = "length"
            limit = self._sampling.longest_input - 1
            raise NoRoomError(f"{len(tokens)} tokens after {len(sample)} exceed the limit of {limit}")
        if len(sample) > grown.turn_start:  # a cancelled turn's tokens
            self._end_turn(grown)
        sample.extend(tokens)
        grown.turn_start = len(sample)
        grown.note()

    def cut(self, sample: Sample, at: int) -> None:
        grown = self._idle(sample)
        self._check_span(sample, at, len(sample))
        self._tracker.dropped(sample.cut(at), "cut")
        for branch in (g for g in self._grown if g is grown or g.source is grown):
            branch.at = min(branch.at, at)
        grown.turn_start, grown.finish = len(sample), "stop" if sample.trainable_tokens else None
        grown.note()

    def mask(self, sample: Sample, start: int, end: int) -> None:
        grown = self._idle(sample)
        self._check_span(sample, start, end)
        self._tracker.masked(sample.mask_span(start, end), "rollout")
        grown.note()

    def room(self, sample: Sample) -> int:
        return max(0, self._sampling.room(sample))

    def encode(self, text: str, after: int | None = None) -> list[int]:
        return self._generator.encode(text, after)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *,
        max_tokens: int | None = None, stop: Sequence[str] = (),
    ) -> Reply:  # fmt: skip
        self._check_alive()
        return await self._chats.chat(messages, tools, max_tokens, (stop,) if isinstance(stop, str) else tuple(stop))

    async def endpoint(self) -> ModelEndpoint:
        self._check_alive()
        return await self._chats.endpoint()

    # -------------------------------------------------------------------------------------- as the runner sees it

    def task(self, seed: int, evaluation: bool) -> Task:
        """The task for its function.

        Args:
            seed: of the run.
        """
        g, first = self._group, self._grown[0].sample
        own = zlib.crc32(f"{seed}/{self._session}/{self.number}".encode()) & 0x7FFFFFFF
        return Task(
            g.prompt.copy(), copy.deepcopy(first.label), first.metadata, g.group_id, self.number, evaluation, own,
            self._generator.decode, copy.deepcopy(g.messages), copy.deepcopy(g.tools),
        )  # fmt: skip  # copies: the function may change them, and its siblings and a re-roll start from the originals

    @property
    def whole_group(self) -> bool:
        """Whether no rollout of the group has ended."""
        return len(self._group.numbers) == self._group.size and not any(s.status.finished for s in self._group.samples)

    def take_in(self, source: Sample, end: int, turns: Sequence[TakenTurn]) -> Sample:
        """Add an externally sampled sequence: the first `end` tokens of `source`, with their versions, log-probs,
        routes and supports. The model's turns that are not in `turns` become context.

        Args:
            turns: turns that are trained here, and nowhere else, in order; the last one ends the sequence.
        """
        self._check_alive()
        sample = source.branch(self._group.next_index(self.number), end)
        sample.group_id, sample.rollout_id = self._group.group_id, None
        first = self._grown[0].sample
        sample.label, sample.metadata = first.label, copy.deepcopy(self._group.metadata)
        for turn in turns:
            sample.train_span(turn.start, turn.end)
            self._tracker.generated(sample, turn.end - turn.start)
        grown = GrowingSample(sample, end, turns[-1].finish if turns else "stop")
        for turn in turns:
            self._turns += 1
            sample.turns.append((turn.start, self._turns))
            grown.newest = self._turns
            for start, stop in turn.masked:
                self._tracker.masked(sample.mask_span(start, stop), "rollout")
        grown.note()
        return self._add(grown)

    async def play(self, function: Workflow, task: Task, on_error: OnError = "fail") -> bool:
        """Call the function and finish its sequences. With `on_error` `drop` a rollout whose function fails is dropped
        with its tokens and does not count in its group.

        Returns:
            Whether the rollout counts.

        Raises:
            RolloutError: the function raised, took too long, reported a failed rollout, or returned or changed a
                forbidden value. Its own UserErrors pass.
        """
        try:
            try:
                returned = await self._called(function, task)
            finally:
                await self._chats.stop()
            self._conclude(returned)
        except AbsentError:
            self._give_up()
        except RolloutError as error:
            if on_error == "fail":
                raise
            print(f"a rollout is dropped (rollout.on_error): {error}", flush=True)
            self._give_up()
            return False
        finally:
            self._chats.forget()
            self._stop_turns()
        return True

    def _give_up(self) -> None:
        """Drop the rollout's tokens and exclude it from its group."""
        self._over = True
        self._tracker.dropped(self._group.restart_rollout(self.number), "failed")
        self.samples[0].status = SampleStatus.FAILED

    def end(self) -> None:
        """Forbid the function any further additions: its response was discarded."""
        self._over = True
        self._stop_turns()

    def admit(self) -> None:
        """The group continues: the rollout no longer waits."""
        self._waiting.clear()

    async def scoring(self) -> None:
        """Count as being scored until `scored`, once the group runs."""
        while not self._group_gate.admitted:
            await self._wait(self)
        self._at_work.add(self)

    def scored(self) -> None:
        """Scoring has ended."""
        self._at_work.discard(self)

    # --------------------------------------------------------------------------------------------------- inside

    def _stop_turns(self) -> None:
        """Cancel turns in the function's own tasks, which may outlive it: the sample may start again with another
        function call."""
        for task in self._generating - {asyncio.current_task()}:
            task.cancel()

    async def _called(self, function: Workflow, task: Task) -> object:
        """The function's result; None if it raised NoRoomError, or if its agent failed later for lack of room."""
        try:
            async with asyncio.timeout(self._limit_s) as self._watch:
                returned = await function(task, self)
            failed = isinstance(returned, Episode) and returned.failed and any(grown.finish for grown in self._grown)
            return None if failed and self._chats.full else returned
        except NoRoomError:
            return None
        except ChatError as error:
            raise self._error(f"sent an invalid request to the model: {error}", "fix the messages") from error
        except (UserError, AbsentError):
            raise
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise self._error("raised CancelledError", "catch CancelledError in it") from error
        except Exception as error:  # a user's function may raise anything
            if isinstance(error, TimeoutError) and self._watch is not None and self._watch.expired():
                if expired := self._chats.expired:
                    hint = "return when the agent ends, speed up its tools, or raise the limit"
                    raise self._error(f"waited for an agent that sends no more requests ({expired})", hint) from error
                hint = "set a time limit for its tools, or raise deadlines.rollout_function_s"
                raise self._error(f"sent no request to the engines for {self._limit_s:g} s", hint) from error
            if self._chats.full:  # its agent received this error and raised its own because of it
                return None
            if self._chats.failure is not None:
                raise self._chats.failure from error
            raise self._error(raised(error), "fix the function") from error
        finally:
            self._watch = None

    async def _turn(self, grown: GrowingSample, max_tokens: int | None, stop: tuple[str, ...]) -> Turn:
        sample, start = grown.sample, grown.turn_start
        end = None if max_tokens is None else len(sample) + max_tokens
        grown.finish = None
        while grown.finish in (None, "abort"):
            await self._enter(grown)
            try:
                most = None if end is None else end - len(sample)
                tokens, finish = await self._generator.advance(
                    sample, self._sampling, self._session, self._group_gate.traffic, start=start, most=most, stop=stop
                )
            finally:
                self._leave(grown)
            self._check_alive()
            grown.finish = finish
            sample.status = SampleStatus.ABORTED if finish == "abort" else SampleStatus.PENDING
            grown.note()
            self._tracker.generated(sample, tokens)
        grown.newest = self._end_turn(grown)
        return Turn(sample.tokens[start:], "stop" if grown.finish == "stop" else "length", self._generator.decode)

    def _end_turn(self, grown: GrowingSample) -> int:
        """End a turn of the rollout; returns its number."""
        self._turns += 1
        grown.end_turn(self._turns)
        return self._turns

    def _conclude(self, returned: object) -> None:
        """Apply the function's result to the sequences."""
        chat_metrics = self._chats.settle()
        for grown in self._grown:
            self._check_untouched(grown)
            if grown.finish is None and not grown.busy and grown.newest:  # its last turn was cancelled, and kept
                if len(grown.sample) > grown.turn_start:
                    grown.newest = self._end_turn(grown)
                grown.finish = "length"
        outcome = outcome_of(returned, self._grown, self._chats.reply, self._error)
        for grown in self._grown:
            grown.sample.process_rewards = outcome.steps.get(id(grown.sample), grown.sample.process_rewards)
        settle(self._group, self._grown, outcome.chosen, self._tracker)
        self._over = True
        last = outcome.chosen[-1]
        for grown in outcome.chosen:
            sample = grown.sample
            whole = grown.finish == "stop" and not (grown is last and self._chats.full)
            sample.status = SampleStatus.COMPLETED if whole else SampleStatus.TRUNCATED
            sample.response = self._generator.decode(sample.response_tokens.tolist())
            sample.reward = outcome.reward
        last.sample.scores |= {f"user/{name}": number for name, number in outcome.metrics.items()} | dict(chat_metrics)

    def _add(self, grown: GrowingSample) -> Sample:
        """Add a further sequence to the rollout and its group."""
        self._grown.append(grown)
        self._group.set_parts(self.number, [*self.samples, grown.sample])
        return grown.sample

    async def _enter(self, caller: object) -> None:
        self._check_alive()
        while not self._group_gate.open:
            await self._wait(caller)
        self._check_alive()
        self._at_work.add(caller)
        self._watch_outside()

    async def _wait(self, caller: object) -> None:
        self._waiting.add(caller)
        self._watch_outside()
        self._group_gate.moved.set()
        try:
            await self._group_gate.next_admission()
        finally:
            self._waiting.discard(caller)

    def _leave(self, caller: object) -> None:
        self._at_work.discard(caller)
        self._watch_outside()
        self._group_gate.moved.set()

    def _watch_outside(self) -> None:
        """Start or stop the timer of the function's time outside the engines."""
        if self._limit_s is not None and self._watch is not None and not self._watch.expired():
            outside = not self._at_work and not self._waiting
            self._watch.reschedule(asyncio.get_running_loop().time() + self._limit_s if outside else None)

    def _end_of_silence(self) -> bool:
        """The agent's time has expired: end the function, unless it generates by itself. Returns whether it ends."""
        if self._watch is None or self._at_work or self._waiting:
            return False
        if not self._watch.expired():
            self._watch.reschedule(asyncio.get_running_loop().time())
        return True

    # --------------------------------------------------------------------------------------------------- mistakes

    def _checked(self, sample: Sample) -> GrowingSample:
        self._check_alive()
        grown = next((g for g in self._grown if g.sample is sample), None)
        if grown is None:
            raise self._error(f"used a {type(sample).__name__} that does not belong to this rollout",
                              "use samples of engine.new_sample() and engine.branch()")  # fmt: skip
        self._check_untouched(grown)
        return grown

    def _idle(self, sample: Sample) -> GrowingSample:
        grown = self._checked(sample)
        if grown.busy:
            raise self._error("changed a sequence while a turn was being generated", "await generate() first")
        return grown

    def _ids(self, given: Sequence[int]) -> NDArray[np.int32]:
        """Convert and check token ids from a function or an agent. Raises ChatError: an id outside the vocabulary would
        kill an engine."""
        ids, known = np.asarray(given) if len(given) else np.empty(0, np.int32), self._generator.vocab_size
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or (len(ids) and not 0 <= ids.min() <= ids.max() < known):
            wrong = next((i for i in given if type(i) is not int or not 0 <= i < known), given)
            raise ChatError("prompt", f"{wrong!r:.80}", f"is not a token id of this model, which has {known} tokens",
                            "send ids of the model's own tokenizer, or a string")  # fmt: skip
        return ids.astype(np.int32)

    def _check_span(self, sample: Sample, start: int, end: int) -> None:
        if not sample.prompt_length <= start <= end <= len(sample):
            raise self._error(f"passed the tokens {start} to {end} of {len(sample)}",
                              f"use a range after the prompt ({sample.prompt_length} tokens)")  # fmt: skip

    def _check_untouched(self, grown: GrowingSample) -> None:
        if not grown.untouched:
            self._over = True  # even if the function continues after the error
            grown.sample.restart()
            grown.sample.metadata = copy.deepcopy(self._group.metadata)
            self._tracker.dropped(grown.trained, "failed")
            raise self._error("changed tokens, loss mask or log-probs of its sample",
                              "add tokens only with engine.generate and engine.append")  # fmt: skip

    def _check_alive(self) -> None:
        if self._over:
            raise asyncio.CancelledError(f"rollout {self._session}-{self.number} has ended or restarted")

    def _error(self, rule: str, hint: str) -> RolloutError:
        where = f"group {self._group.group_id}, response {self.number}"
        return RolloutError(f"{SETTING} {self._spec}", where, rule, hint)


# Chats of rollouts: one renderer and one server for all, one set of conversations per rollout. Each is created on first
# use, because most runs do not chat.


T = TypeVar("T")


class Agents:
    """Renderer and server that the rollouts of a service share.

    Args:
        config: `rollout`.
        make: creates the renderer; called once.
        special: the tokenizer's special tokens as text.
    """

    def __init__(self, config: RolloutConfig, make: Callable[[], Renderer], special: Sequence[str] = ()) -> None:
        self._config, self._make = config, make
        self._special = () if config.read_special_tokens else tuple(special)
        self._rendering: Rendering | None = None
        self._server: ModelServer | None = None
        self._making = asyncio.Lock()

    async def chat(
        self, engine: Rollout, on_expiry: Callable[[], bool], limits: AgentLimits | None = None
    ) -> ChatSession:
        """Open the conversations of a rollout (see `ChatSession`), within `rollout.limits` or other limits. Raises
        ConfigError if there is no renderer for them."""
        async with self._making:
            if self._rendering is None:
                self._rendering = Rendering(await asyncio.to_thread(self._make), self._special)
        return ChatSession(engine, self._rendering, limits or self._config.limits, on_expiry)

    async def serve(self, chat: ChatSession) -> tuple[ModelEndpoint, ServedRollout]:
        """Serve the conversations of a rollout. Raises ConfigError if the server cannot listen on the address."""
        if self._server is None:
            s = self._config.server
            self._server = ModelServer(s.host, s.port, s.secret(), s.max_request_mib << 20)
        return await self._server.open(chat)

    async def end(self, session: ServedRollout) -> None:
        """Stop serving these conversations."""
        if self._server is not None:
            await self._server.end(session)

    async def close(self) -> None:
        """Close the server and the renderer."""
        if self._server is not None:
            await self._server.close()
        if self._rendering is not None:
            self._rendering.close()


class Conversations:
    """The conversations of one rollout, created at its first request.

    Args:
        on_expiry: see `ChatSession`.
    """

    def __init__(self, agents: Agents, engine: Rollout, on_expiry: Callable[[], bool]) -> None:
        self._agents = agents
        self._open: Callable[[], Coroutine[Any, Any, ChatSession]] | None = lambda: agents.chat(engine, on_expiry)
        self._chat: asyncio.Task[ChatSession] | None = None
        self._served: asyncio.Task[tuple[ModelEndpoint, ServedRollout]] | None = None

    async def chat(self, messages: Sequence[Any], tools: Tools, max_tokens: int | None, stop: Sequence[str]) -> Reply:
        return await (await self._session()).chat(messages, tools, max_tokens=max_tokens, stop=stop)

    async def endpoint(self) -> ModelEndpoint:
        if self._served is None:
            self._served = asyncio.create_task(self._serve())
        return (await asyncio.shield(self._served))[0]

    @property
    def failure(self) -> UserError | None:
        """The engines' error at the last request, if any, however its agent handles it."""
        return None if (chat := self._begun) is None else chat.failure

    @property
    def full(self) -> bool:
        """Whether the last request was refused for lack of room, or by a limit."""
        return (chat := self._begun) is not None and chat.full

    @property
    def expired(self) -> str:
        """The time limit that passed without a request; empty if none did."""
        return "" if (chat := self._begun) is None else chat.expired

    async def stop(self) -> None:
        """Accept no more requests; cancel running turns."""
        if (served := _made(self._served)) is not None:
            await self._agents.end(served[1])
        for task in (self._chat, self._served):
            if task is not None:
                task.cancel()
        if (chat := self._begun) is not None:
            await chat.stop()

    def settle(self) -> dict[str, float]:
        """After `stop`: mask undelivered replies. Returns the rollout's metrics by name."""
        if (chat := self._begun) is None:
            return {}
        chat.mask_undelivered()
        return chat.report()

    def forget(self) -> None:
        """Release the conversations of a finished rollout, for the reason given in `ChatSession.forget`."""
        if (chat := self._begun) is not None:
            chat.forget()
        self._chat = self._served = self._open = None

    def reply(self, response: str, choice: int) -> ReplyTurn | None:
        return None if (chat := self._begun) is None else chat.choice(response, choice)

    @property
    def _begun(self) -> ChatSession | None:
        return _made(self._chat)

    async def _session(self) -> ChatSession:
        if self._chat is None:
            if self._open is None:
                raise asyncio.CancelledError("the rollout has ended")
            self._chat = asyncio.create_task(self._open())
        return await asyncio.shield(self._chat)

    async def _serve(self) -> tuple[ModelEndpoint, ServedRollout]:
        return await self._agents.serve(await self._session())


def _made(task: asyncio.Task[T] | None) -> T | None:
    """Result of a task; None if it has none yet."""
    done = task is not None and task.done() and not task.cancelled() and task.exception() is None
    return task.result() if task is not None and done else None

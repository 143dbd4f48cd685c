"""The conversations of one rollout: messages in, a reply out, and every token recorded exactly in a trained sequence.

`TurnForest` places a request among the recorded turns. The renderer's extension of the turn is appended to the exact
tokens that the model saw and sampled. If that is impossible, a new sequence is rendered and the reason is counted. A
turn is trained once, in the sequence in which it was sampled.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mslime.config.errors import RolloutError, UserError
from mslime.config.rollout import AgentLimits
from mslime.data.sample import Sample
from mslime.rollout import workflow
from mslime.rollout.agents.messages import (
    ChatError,
    ContextFull,
    LimitReached,
    Message,
    SessionOver,
    ToolCall,
    Tools,
    echoes,
    from_chat,
    is_copy,
    to_chat,
    to_template,
)
from mslime.rollout.agents.renderer import Parsed, Rendering
from mslime.rollout.workflow import NoRoomError

if TYPE_CHECKING:
    from mslime.rollout.turns import Rollout

# The turns of a rollout, and the choice of the turn that a request continues.
#
# A turn refers to its tokens in a sequence, up to the end of its reply. The recorded messages of a matched turn are
# used; the client's copies only identify the turn. Pure data: nothing here waits, renders or generates.


@dataclass(eq=False)
class ReplyTurn:
    """One reply of the model.

    Attributes:
        number: in the order in which replies were complete.
        parent: the previous turn of its conversation; None: it begins a sequence.
        asked: messages after the parent's reply.
        sample: the sequence that trains it. start, end: of the reply's tokens there.
        tools: key of its tool definitions.
        why: `extends`, or the reason for a new sequence.
        finish: as in `workflow.Turn`. stopped: the client's stop text that ended it.
        whole: for a turn after a plain text: that text and the reply, including special tokens.
        delivered: a client received the reply.
    """

    number: int
    parent: ReplyTurn | None
    asked: tuple[Message, ...]
    reply: Message
    sample: Sample
    start: int
    end: int
    tools: str
    why: str
    finish: str
    stopped: str = ""
    whole: str = ""
    delivered: bool = False
    children: list[ReplyTurn] = field(default_factory=list["ReplyTurn"], repr=False)

    @property
    def known(self) -> bool:
        """Whether the reply had an effect: it was delivered or continued."""
        return self.delivered or bool(self.children)

    @property
    def alone(self) -> bool:
        """Whether it is the last turn of its sequence."""
        return len(self.sample) == self.end

    def path(self) -> list[ReplyTurn]:
        """The turns of its conversation up to this one."""
        turns: list[ReplyTurn] = []
        turn: ReplyTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def messages(self) -> tuple[Message, ...]:
        """The conversation up to and with the reply."""
        return tuple(m for turn in self.path() for m in (*turn.asked, turn.reply))


@dataclass(frozen=True)
class ConversationPlace:
    """Position of a request among the turns.

    Attributes:
        turn: the turn whose conversation it repeats; None: it repeats none.
        rest: messages after that turn's reply.
        why: the reason for a new sequence; empty if the turn may be extended.
    """

    turn: ReplyTurn | None
    rest: tuple[Message, ...]
    why: str = ""

    def messages(self) -> tuple[Message, ...]:
        """The whole conversation, with recorded messages instead of the client's copies."""
        return (*(self.turn.messages() if self.turn is not None else ()), *self.rest)


class TurnForest:
    """All turns of a rollout.

    Attributes:
        named: its turns by the name that clients use.
        reasons: number of sequences begun, by reason.
    """

    def __init__(self) -> None:
        self.turns: list[ReplyTurn] = []
        self.named: dict[str, ReplyTurn] = {}
        self.reasons: Counter[str] = Counter()

    def add(self, turn: ReplyTurn) -> None:
        """Record a turn."""
        self.turns.append(turn)
        self.named[turn.reply.echo] = turn
        if turn.parent is not None:
            turn.parent.children.append(turn)

    def place(self, messages: Sequence[Message], tools: str) -> ConversationPlace:
        """Find the position of a request, which does not end with an assistant's message."""
        found = self._matches(messages, tools)
        if not found:
            return ConversationPlace(None, tuple(messages), self._why_alone(messages))
        names = echoes(messages)
        depth, turn = max(found, key=lambda f: (f[0], _named(f[1], names), f[1].delivered, f[1].alone, f[1].number))
        rest = tuple(messages[depth:])
        if any(m.role == "assistant" for m in rest):
            return ConversationPlace(turn, rest, "foreign_assistant_message")
        return ConversationPlace(turn, rest, "" if turn.tools == tools else "tools_differ")

    def _matches(self, messages: Sequence[Message], tools: str) -> list[tuple[int, ReplyTurn]]:
        """(messages, turn) of the turns whose whole conversation the request repeats. If some have the same tools, only
        those."""
        found = list(self._repeated(messages))
        return [f for f in found if f[1].tools == tools] or found

    def _repeated(self, messages: Sequence[Message]) -> Iterator[tuple[int, ReplyTurn]]:
        left = [(0, turn) for turn in self.turns if turn.parent is None]
        while left:
            at, turn = left.pop()
            recorded = (*turn.asked, turn.reply)
            end = at + len(recorded)
            if end <= len(messages) and all(map(is_copy, messages[at:end], recorded)):
                yield end, turn
                left += [(end, child) for child in turn.children]

    def _why_alone(self, messages: Sequence[Message]) -> str:
        if not self.turns:
            return "first"
        return "history_differs" if any(m.role == "assistant" for m in messages) else "new_conversation"


def _named(turn: ReplyTurn, names: set[str]) -> bool:
    """Whether the request names this turn, or a call of it. Names are generated here, so no other turn can match."""
    return turn.reply.echo in names or any(call.id in names for call in turn.reply.calls)


def tools_key(tools: Tools) -> str:
    """Key of a list of tool definitions; equal for equal lists."""
    return json.dumps(list(tools), sort_keys=True)


# Time limits of an agent: between a reply and its next request, and in total.
#
# A dead agent sends no requests, so only a timer can detect it. Each rollout has one, which runs while no turn is
# running: a reply that waits for new weights does not use up its agent's time.


class AgentClock:
    """The time limits of one rollout's agents.

    Args:
        on_expiry: called when a limit has passed without another request; returns whether the rollout ends. If it does
            not, because its function generates by itself, the agent has `idle_s` again.

    Attributes:
        expired: the limit that ended the rollout, with its value; empty if none did.
    """

    def __init__(self, limits: AgentLimits, on_expiry: Callable[[], bool]) -> None:
        self._limits, self._on_expiry, self.expired = limits, on_expiry, ""
        self._first = self._last = time.monotonic()
        self._alarm: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start the total time at the first request."""
        self._first = time.monotonic()

    def passed(self, alone: bool) -> tuple[str, float] | None:
        """The limit that had passed when a request came: its name and value.

        Args:
            alone: no other turn is running.
        """
        now, idle, wall = time.monotonic(), self._limits.idle_s, self._limits.wall_s
        if alone and now - self._last > idle:
            return "idle_s", idle
        return ("wall_s", wall) if now - self._first > wall else None

    def run(self) -> None:
        """Start the timer after a reply. If all time has passed already, the next request is refused."""
        self.stop()
        self._last = now = time.monotonic()
        idle, wall = self._limits.idle_s, self._first + self._limits.wall_s - now
        of_all = 0 < wall < idle
        limit = f"wall_s = {self._limits.wall_s:g}" if of_all else f"idle_s = {idle:g}"
        self._alarm = asyncio.get_running_loop().call_later(wall if of_all else idle, self._ring, limit)

    def stop(self) -> None:
        """Stop the timer: a turn is running, or the rollout has ended."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _ring(self, limit: str) -> None:
        self.expired = f"rollout.limits.{limit}"
        if not self._on_expiry():
            self.expired = ""
            self.run()


REASONS = (
    "first", "new_conversation", "history_differs", "foreign_assistant_message", "tools_differ", "sibling",
    "template_rewrites_history", "prefix_broken",
)  # fmt: skip
"""Reasons for beginning a sequence; docs/agents.md explains each."""
DISTINCT = ("response_format", "text", "output_config", "tool_choice", "chat_template_kwargs", "tools")
"""Ignored fields that affect the expected replies; each is counted by its name."""
COUNTED = (
    "malformed_calls", "unknown_tools", "undelivered_turns", "joined_retries", "ignored_fields", "limits_reached",
    *(f"ignored_{name}" for name in DISTINCT),
)  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """A reply of the model.

    Attributes:
        message: in the form of chat completions, to be sent back as history.
        text, reasoning, calls: its parts.
        finish: stop: the model ended its turn. length: a limit was reached.
        sample: the sequence that trains it; the reply's tokens are [start, end).
    """

    message: dict[str, Any]
    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish: str
    sample: Sample
    start: int
    end: int


@dataclass(frozen=True)
class _Grown:
    """A sequence that is ready for a reply.

    Attributes:
        back: number of its tokens before this request.
        parent, asked, why: of the new turn.
    """

    sample: Sample
    back: int
    parent: ReplyTurn | None
    asked: tuple[Message, ...]
    why: str


class ChatSession:
    """All conversations of one rollout.

    Attributes:
        forest, completions: turns of chats, and of plain prompts.
        counts: other events, by the names in `COUNTED`.
        closed: it accepts no more requests.
        full: the last request was refused for lack of room, or by a limit.
        failure: the engines' error at the last request.

    Args:
        on_expiry: see `AgentClock`.
    """

    def __init__(
        self, engine: Rollout, rendering: Rendering, limits: AgentLimits,
        on_expiry: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        self._engine, self._rendering, self._limits = engine, rendering, limits
        self._clock = AgentClock(limits, on_expiry)
        self.forest, self.completions = TurnForest(), TurnForest()
        self.counts: Counter[str] = Counter()
        self.closed = self.full = False
        self.failure: UserError | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._numbers, self._nonce = itertools.count(), uuid.uuid4().hex[:8]
        self._begun, self._tokens = 0, 0
        self._native: dict[str, str] = {}
        self._answers: dict[str, Sequence[ReplyTurn]] = {}

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools = (), *, max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Reply:  # fmt: skip
        """The model's reply to messages in the form of chat completions.

        Raises:
            ChatError: a message cannot be answered. ContextFull, LimitReached, SessionOver: see there.
        """
        read = [from_chat(m, f"messages[{i}]") for i, m in enumerate(messages)]
        turn = await asyncio.create_task(self.reply(read, tools, max_tokens=max_tokens, stop=stop))
        turn.delivered = True
        r = turn.reply
        return Reply(to_chat(r), r.text, r.reasoning or "", r.calls, turn.finish, turn.sample, turn.start, turn.end)

    async def reply(
        self, messages: Sequence[Message], tools: Tools, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> ReplyTurn:
        """One turn, in its own task. The code that delivers it to a client sets `turn.delivered`. Raises like
        `chat`."""
        if not messages or messages[-1].role == "assistant":
            last = messages[-1].role if messages else None
            raise ChatError("messages", last, "must not end with an assistant message: a reply that the model did not "
                            "sample cannot be continued", "end with a user or tool message")  # fmt: skip
        return await self._tracked(self._reply(messages, tools, max_tokens, tuple(stop)))

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> ReplyTurn:
        """One turn after a plain prompt, as text or token ids, in its own task. Raises like `chat`.

        It continues a recorded turn if the prompt begins with that turn's prompt and reply: compared by token, or by
        character including special tokens.
        """
        if not prompt:
            raise ChatError("prompt", prompt, "is empty", "send a string or token ids")
        return await self._tracked(self._complete(prompt, max_tokens, tuple(stop)))

    def ignore(self, fields: Sequence[str]) -> None:
        """Count ignored fields of a request."""
        self.counts["ignored_fields"] += len(fields)
        self.counts.update(f"ignored_{name}" for field in fields if (name := field.partition(":")[0]) in DISTINCT)

    def check_replies(self, count: int) -> None:
        """Raise LimitReached if this many replies to one request exceed the rollout's remaining limit."""
        left = self._limits.turns - len(self.turns) - len(self._running)
        if count > max(1, left):  # a single reply too many is refused by its own check
            raise self._over("turns", f"{self._limits.turns} ({count} replies requested, {left} left)", "request fewer")

    async def count(self, messages: Sequence[Message], tools: Tools) -> int:
        """Number of tokens of messages, up to the start of the model's reply. Adds no turn."""
        return len(await self._rendering.render(to_template(messages, self._native), tools))

    async def spell(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return await self._rendering.spell_each(ids)

    async def stop(self) -> None:
        """Accept no more requests, and cancel running turns, which leave no trace."""
        self.closed = True
        self._clock.stop()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def forget(self) -> None:
        """No more turns will be requested: break reference cycles, so sequences are freed at once and not by the late
        cycle collector, since routes are large."""
        for turn in self.turns:
            turn.children.clear()

    def answered(self, turns: Sequence[ReplyTurn]) -> None:
        """Record the choices of one response, whose id ends with the name of the first."""
        self._answers[turns[0].reply.echo] = turns

    def choice(self, response: str, index: int) -> ReplyTurn | None:
        """A turn by the id of its response and the index of the choice; None if there is none."""
        choices = self._answers.get(re.split("[-_]", response)[-1], ())
        return choices[index] if index in range(len(choices)) else None

    def mask_undelivered(self) -> None:
        """Mask undelivered replies out of the loss."""
        for turn in self.turns:
            if not turn.known:
                self.counts["undelivered_turns"] += 1
                self._engine.mask(turn.sample, turn.start, turn.end)

    def report(self) -> dict[str, float]:
        """Metrics of the rollout, by name."""
        reasons = self.reasons
        return {
            "rollout/turns": float(len(self.turns)),
            **{f"rollout/new_sequence/{why}": float(reasons[why]) for why in REASONS},
            **{f"rollout/chat/{name}": float(self.counts[name]) for name in COUNTED},
        }

    @property
    def expired(self) -> str:
        """The time limit that passed without another request, with its value; empty if none did."""
        return self._clock.expired

    @property
    def turns(self) -> list[ReplyTurn]:
        """All turns of chats and plain prompts."""
        return [*self.forest.turns, *self.completions.turns]

    @property
    def reasons(self) -> Counter[str]:
        """Number of sequences begun, by reason."""
        return self.forest.reasons + self.completions.reasons

    # ------------------------------------------------------------------------------------------------------- one turn

    async def _tracked(self, work: Coroutine[Any, Any, ReplyTurn]) -> ReplyTurn:
        """Run a turn in a task that `stop` can cancel."""
        task = asyncio.current_task()
        assert task is not None, "a turn is part of a task"
        self._running.add(task)
        self._clock.stop()
        self.full, self.failure = False, None  # recorded, as the function may see only its agent's version of an error
        try:
            self._check_limits()
            return await work
        except NoRoomError:
            self.full = True
            raise
        except ChatError:
            raise
        except UserError as error:
            self.failure = error
            raise
        finally:
            work.close()
            self._running.discard(task)
            if self.turns and not self._running and not self.closed:
                self._clock.run()

    async def _reply(
        self, messages: Sequence[Message], tools: Tools, max_tokens: int | None, stop: tuple[str, ...]
    ) -> ReplyTurn:
        key = tools_key(tools)
        grown = await self._grow(self.forest.place(messages, key), tools)
        start = len(grown.sample)
        try:
            generated = await self._engine.generate(grown.sample, max_tokens=max_tokens, stop=stop)
            ids = self._sampled(generated, start)
            parsed = await self._rendering.parse(ids, grown.sample.tokens[:start].tolist(), tools)
        except BaseException:
            self._undo(grown)
            raise
        number = next(self._numbers)
        reply, stopped = self._message(number, parsed, tools, stop if generated.finish == "stop" else ())
        turn = ReplyTurn(
            number, grown.parent, grown.asked, reply, grown.sample, start, start + len(ids), key, grown.why,
            generated.finish, stopped,
        )  # fmt: skip
        return self._recorded(self.forest, turn)

    async def _complete(self, prompt: str | Sequence[int], max_tokens: int | None, stop: tuple[str, ...]) -> ReplyTurn:
        place, parent, added = self._continued(prompt)
        if parent is not None:
            grown = self._extended(parent, (), added)
        else:
            grown = self._new(added, (), place)
        start = len(grown.sample)
        try:
            generated = await self._engine.generate(grown.sample, max_tokens=max_tokens, stop=stop)
            ids = self._sampled(generated, start)
            spelled = await self._rendering.spell(ids)
        except BaseException:
            self._undo(grown)
            raise
        whole = prompt + spelled if isinstance(prompt, str) else ""
        text, stopped = _before_stop(generated.text, stop if generated.finish == "stop" else ())
        number = next(self._numbers)
        reply = Message("assistant", text, echo=self._name(number))
        turn = ReplyTurn(
            number, grown.parent, (), reply, grown.sample, start, start + len(ids), "", grown.why, generated.finish,
            stopped, whole,
        )  # fmt: skip
        return self._recorded(self.completions, turn)

    def _recorded(self, forest: TurnForest, turn: ReplyTurn) -> ReplyTurn:
        forest.add(turn)
        self._tokens += turn.end - turn.start
        self._native |= {c.id: c.native for c in turn.reply.calls if c.native}
        if turn.why != "extends":
            forest.reasons[turn.why] += 1
        return turn

    def _message(self, number: int, parsed: Parsed, tools: Tools, stop: tuple[str, ...]) -> tuple[Message, str]:
        """The reply as a message, and the text that ended it. An invalid call becomes text, so the client can respond
        to it."""
        offered = {tool["function"]["name"] for tool in tools}
        self.counts["malformed_calls"] += sum(not call.callable for call in parsed.calls)
        self.counts["unknown_tools"] += sum(call.callable and call.name not in offered for call in parsed.calls)
        calls = tuple(
            ToolCall(f"call_{self._nonce}_{number}_{i}", c.name, c.arguments, c.id)
            for i, c in enumerate(c for c in parsed.calls if c.callable)
        )
        broken = "".join(c.raw for c in parsed.calls if not c.callable and c.raw not in parsed.text)
        text, stopped = _before_stop(parsed.text + broken, stop)
        return Message("assistant", text, calls, parsed.reasoning, echo=self._name(number)), stopped

    def _name(self, number: int) -> str:
        return f"{self._nonce}{number}"

    def _sampled(self, generated: workflow.Turn, start: int) -> list[int]:
        if not len(generated.tokens):
            most = min(self._engine.longest, start) - 1
            raise ContextFull.of(f"{start} tokens", "leave no room for a reply", start, most)
        return generated.tokens.tolist()

    # ----------------------------------------------------------------------------------------- sequence of a request

    async def _grow(self, place: ConversationPlace, tools: Tools) -> _Grown:
        """Prepare the sequence for a request, with all tokens before the reply."""
        why, turn = place.why, place.turn
        if turn is not None and not why:
            before, new = turn.sample.tokens[: turn.end].tolist(), to_template(place.rest, self._native)
            added, why = await self._rendering.extend(before, turn.end - turn.start, new, tools)
            if added is not None:
                return self._extended(turn, place.rest, added)
        messages = place.messages()
        ids = await self._rendering.render(to_template(messages, self._native), tools)
        return self._new(ids, messages, why)

    def _continued(self, prompt: str | Sequence[int]) -> tuple[str, ReplyTurn | None, list[int]]:
        """For a plain prompt: the reason for a new sequence or the turn that it continues, and the ids after that."""
        given = prompt if isinstance(prompt, str) else np.asarray(prompt)
        longest = sorted(self.completions.turns, key=lambda t: (t.end, t.alone, t.number), reverse=True)
        turn = next((t for t in longest if _begins(given, t)), None)
        if turn is not None:
            rest = prompt[len(turn.whole) :] if isinstance(prompt, str) else prompt[turn.end :]
            last = int(turn.sample.tokens[turn.end - 1])
            return "", turn, self._engine.encode(rest, last) if isinstance(rest, str) else list(rest)
        why = "new_conversation" if self.completions.turns or self.forest.turns else "first"
        return why, None, self._engine.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _extended(self, turn: ReplyTurn, asked: tuple[Message, ...], added: Sequence[int]) -> _Grown:
        """Append tokens to the turn's sequence, or to a branch of it if it already continues otherwise."""
        alone = turn.alone
        sample = turn.sample if alone else self._begin(lambda: self._engine.branch(turn.sample, turn.end))
        grown = _Grown(sample, turn.end, turn, asked, "extends" if alone else "sibling")
        try:
            self._engine.append(sample, added)
        except (NoRoomError, ChatError) as error:
            self._undo(grown)
            if isinstance(error, ChatError):
                raise
            tokens = turn.end + len(added)
            raise ContextFull.of(str(error), "are too long", tokens, self._engine.longest - 1) from error
        return grown

    def _new(self, ids: Sequence[int], asked: tuple[Message, ...], why: str) -> _Grown:
        why = "new_conversation" if why == "first" and self._begun else why  # another conversation is running
        try:
            sample = self._begin(lambda: self._engine.new_sample(ids))
        except RolloutError as error:
            raise ContextFull.of(str(error), "are too long", len(ids), self._engine.longest - 1) from error
        return _Grown(sample, len(sample), None, asked, why)

    def _begin(self, make: Callable[[], Sample]) -> Sample:
        if self._begun >= self._limits.sequences:
            causes = ", ".join(f"{count} {why}" for why, count in self.reasons.most_common())
            raise self._over("sequences", f"{self._limits.sequences} (begun by: {causes})",
                             "find out why histories are not continued (docs/agents.md)")  # fmt: skip
        sample = make()
        self._begun += 1
        return sample

    def _undo(self, grown: _Grown) -> None:
        """Remove all traces of a failed turn."""
        self._begun -= grown.why != "extends"
        if len(grown.sample) > grown.back:
            self._engine.cut(grown.sample, grown.back)

    # --------------------------------------------------------------------------------------------------------- limits

    def _check_limits(self) -> None:
        if self.closed:
            raise SessionOver("rollout", "over", "the rollout has ended and accepts no more turns", "stop the agent")
        limits, turns = self._limits, len(self.turns) + len(self._running) - 1  # not counting this one
        for name, had, limit in (("turns", turns, limits.turns), ("tokens", self._tokens, limits.tokens)):
            if had >= limit:
                raise self._over(name, limit, "let the agent end earlier")
        if not turns:
            self._clock.begin()
        elif passed := self._clock.passed(alone=len(self._running) == 1):
            raise self._over(*passed, "let the agent and its tools respond faster")

    def _over(self, name: str, value: object, hint: str) -> LimitReached:
        self.counts["limits_reached"] += 1
        rule = "this rollout has reached the limit; its turns are kept"
        return LimitReached(f"rollout.limits.{name}", value, rule, f"{hint}, or raise the limit")


def _begins(prompt: str | NDArray[np.integer], turn: ReplyTurn) -> bool:
    """Whether a plain prompt begins with a turn's prompt and reply, compared in the prompt's own form."""
    if isinstance(prompt, str):
        return bool(turn.whole) and prompt.startswith(turn.whole)
    return len(prompt) >= turn.end and np.array_equal(prompt[: turn.end], turn.sample.tokens[: turn.end])


def _before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Split a text into the part before its stop text, which the client receives, and the stop text."""
    found = min(((text.find(s), s) for s in stop if s and s in text), default=(len(text), ""))
    return text[: found[0]], found[1]

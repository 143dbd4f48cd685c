"""The turns of a rollout, and which of them a request goes on from.

A turn holds no tokens: its sequence does, up to where its reply ends. The recorded messages of a matched turn count;
the client's copies of them only say which turn it is. Pure data: nothing here waits, renders or generates.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mslime.data.sample import Sample
from mslime.rollout.chat.messages import Message, Tools, echoes, is_copy


@dataclass(eq=False)
class ReplyTurn:
    """One reply of the model.

    Attributes:
        number: in the order in which replies were complete.
        parent: the turn before it in its conversation; None: it begins a sequence.
        asked: messages after the parent's reply.
        sample: the sequence that trains it. start, end: of the reply's tokens there.
        tools: key of the definitions that it was given.
        why: `extends`, or the reason for which a sequence begins with it.
        finish: as in `workflow.Turn`. stopped: the client's stop text that ended it.
        whole: of a turn after a plain text: that text and the reply, special tokens written out.
        delivered: somebody received the reply.
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
        """Whether the reply had an effect: it was received, or gone on from."""
        return self.delivered or bool(self.children)

    @property
    def alone(self) -> bool:
        """Whether nothing follows it in its sequence."""
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
    """Where a request belongs.

    Attributes:
        turn: whose conversation it repeats; None: nobody's.
        rest: messages after that turn's reply.
        why: the reason for a sequence of its own; empty when the turn may be extended.
    """

    turn: ReplyTurn | None
    rest: tuple[Message, ...]
    why: str = ""

    def messages(self) -> tuple[Message, ...]:
        """The whole conversation, with what is recorded instead of its copies."""
        return (*(self.turn.messages() if self.turn is not None else ()), *self.rest)


class Forest:
    """All turns of a rollout.

    Attributes:
        named: its turns by the name that clients know.
        reasons: how many sequences were begun, by reason.
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
        """Where a request belongs. It does not end with an assistant's message."""
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
        """(messages, turn) of the turns whose whole conversation the request repeats: those with the same tools, or all
        where there is none."""
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
    """Whether the request names this turn, or a call of it: names are ours, so it is an echo of no other turn."""
    return turn.reply.echo in names or any(call.id in names for call in turn.reply.calls)


def tools_key(tools: Tools) -> str:
    """By which two lists of definitions are the same."""
    return json.dumps(list(tools), sort_keys=True)

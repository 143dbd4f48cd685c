"""Recorded conversations that no group contains yet, found by their beginning.

Environments do not identify conversations. A request continues one if it begins with its recorded messages, and a group
is recognised by its tokens. Each first request begins a conversation; its replies (`n`) are sequences of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mslime.rollout.agents.app import ServedRollout
from mslime.rollout.agents.messages import Message
from mslime.rollout.agents.requests import Request
from mslime.rollout.agents.session import ReplyTurn, tools_key
from mslime_plugins.atropos.matching import shared_length

log = logging.getLogger(__name__)
_EVERY_S = 5.0
"""Seconds between two checks for old conversations."""


@dataclass(eq=False)
class Conversation:
    """A first request and its continuations.

    Attributes:
        key: of its first messages, if it is a chat.
        last: end of the last reply (`time.monotonic`).
        taken: turns that a group contains.
    """

    session: ServedRollout
    key: object
    last: float = field(default_factory=time.monotonic)
    taken: set[ReplyTurn] = field(default_factory=set[ReplyTurn])

    @property
    def turns(self) -> list[ReplyTurn]:
        """All its turns."""
        return self.session.chat.turns

    @property
    def busy(self) -> bool:
        """Whether a reply is in progress."""
        return self.session.under_way > 0

    @property
    def whole(self) -> bool:
        """Whether all its turns are taken."""
        return not self.busy and len(self.taken) == len(self.turns)


class RecordedConversations:
    """All conversations.

    Args:
        keep_s: seconds for which one is kept after its last reply.
        drop: called for each removed conversation with its number of unused sampled tokens.
    """

    def __init__(self, keep_s: float, drop: Callable[[int], None]) -> None:
        self._keep_s, self._drop = keep_s, drop
        self._all: dict[Conversation, None] = {}
        self._by_key: defaultdict[object, dict[Conversation, None]] = defaultdict(dict)
        self._by_prompt: dict[int, dict[int, dict[Conversation, None]]] = {}
        self._sweeping: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, session: ServedRollout, request: Request) -> Conversation:
        """Start a conversation with its first request."""
        found = Conversation(session, _key(request))
        self._all[found] = None
        self._by_key[found.key][found] = None
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="remove unused conversations")
        return found

    def continued(self, request: Request) -> Conversation | None:
        """The conversation that a request continues: the one with the longest repeated turn."""
        longest = 0
        best: Conversation | None = None
        for conversation in self._candidates(request):
            if (length := self._repeated(conversation, request)) > longest:
                longest, best = length, conversation
        return best

    def noted(self, conversation: Conversation) -> None:
        """Record the end of a reply: its sequences can be recognised from now on."""
        if conversation not in self._all:  # it was removed meanwhile
            return
        conversation.last = time.monotonic()
        for sample in {id(t.sample): t.sample for t in conversation.turns}.values():
            n = sample.prompt_length
            self._by_prompt.setdefault(n, {}).setdefault(_hash(sample.tokens[:n]), {})[conversation] = None

    def begun_with(self, tokens: NDArray[np.int32]) -> list[Conversation]:
        """Conversations with a sequence whose prompt begins these tokens."""
        found: dict[Conversation, None] = {}
        for n, by_hash in self._by_prompt.items():
            if n <= len(tokens):
                found |= by_hash.get(_hash(tokens[:n]), {})
        return list(found)

    def settle(self) -> None:
        """Remove conversations whose turns are all taken."""
        for conversation in [c for c in self._all if c.whole]:
            self._forget(conversation)

    async def close(self) -> None:
        """Remove all conversations."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for conversation in list(self._all):
            await conversation.session.chat.stop()
            self._forget(conversation)

    def _candidates(self, request: Request) -> list[Conversation]:
        if not request.prompts:
            return list(self._by_key.get(_key(request), ()))
        prompt, *others = request.prompts
        if others:
            return []
        if isinstance(prompt, str):
            return list(self._by_key.get("text", ()))
        return self.begun_with(np.asarray(prompt, np.int32))

    def _repeated(self, conversation: Conversation, request: Request) -> int:
        """Tokens of the longest turn of a conversation that a request repeats; 0 if there is none."""
        chat = conversation.session.chat
        if not request.prompts:
            turn = chat.forest.place(request.messages, tools_key(request.tools)).turn
            return 0 if turn is None else turn.end
        prompt = request.prompts[0]
        if isinstance(prompt, str):
            return max((t.end for t in chat.completions.turns if t.whole and prompt.startswith(t.whole)), default=0)
        ids = np.asarray(prompt, np.int32)
        ends = (t.end for t in chat.completions.turns if shared_length(ids, t.sample.tokens[: t.end]) == t.end)
        return max(ends, default=0)

    def _forget(self, conversation: Conversation) -> None:
        del self._all[conversation]
        self._by_key[conversation.key].pop(conversation)
        if not self._by_key[conversation.key]:
            del self._by_key[conversation.key]
        for n, key in {(t.sample.prompt_length, _hash(t.sample.tokens[: t.sample.prompt_length]))
                       for t in conversation.turns}:  # fmt: skip
            by_hash = self._by_prompt.get(n, {})
            holders = by_hash.get(key, {})
            holders.pop(conversation, None)
            if not holders:
                by_hash.pop(key, None)
            if not by_hash:
                self._by_prompt.pop(n, None)
        left = sum(t.end - t.start for t in conversation.turns if t not in conversation.taken)
        if left:
            self._drop(left)
        conversation.session.chat.forget()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_EVERY_S, self._keep_s))
            try:
                self.let_go(time.monotonic() - self._keep_s)
            except Exception:  # otherwise no later conversation would ever be removed
                log.exception("unused conversations cannot be removed")

    def let_go(self, before: float) -> None:
        """Remove conversations whose last request ended before this time (`time.monotonic`)."""
        for conversation in [c for c in self._all if not c.busy and c.last < before]:
            self._forget(conversation)


def _key(request: Request) -> object:
    """Key of a chat: its tools, and its messages before the first reply."""
    if request.prompts:
        return "text" if isinstance(request.prompts[0], str) else "tokens"
    return tools_key(request.tools), tuple((m.role, m.text, m.answers) for m in _before_reply(request.messages))


def _before_reply(messages: Sequence[Message]) -> Iterator[Message]:
    for message in messages:
        if message.role == "assistant":
            return
        yield message


def _hash(tokens: NDArray[np.int32]) -> int:
    return hash(np.ascontiguousarray(tokens).tobytes())

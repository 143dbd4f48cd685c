"""One rollout behind a URL: access control, and detection of repeated requests.

Clients repeat requests by themselves after a time-out or an error, with the same body and a retry count. Only such
marked repeats of an equal body join the running attempt, or receive its reply; any other request is sampled anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mslime.rollout.agents.chat.messages import SessionOver
from mslime.rollout.agents.chat.session import ChatSession, ReplyTurn
from mslime.rollout.agents.server.requests import Request, ServedReply
from mslime.web_server import same_key

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelEndpoint:
    """Address of one rollout's model for an agent.

    Attributes:
        url: for clients that add /v1 themselves, such as Anthropic's.
        openai_url: for those that do not, such as OpenAI's.
        key: the API key; of this rollout alone.
        model: a name for the model. Any other works too.
    """

    url: str
    openai_url: str
    key: str
    model: str


class ServedRollout:
    """A served rollout.

    Args:
        token: prefix of its key, by which a proxy in front can refuse all other requests.

    Attributes:
        name: in its URL. key: API key of its agents.
        under_way: attempts that have not ended, awaited or not. on_end: called when one has.
    """

    def __init__(self, chat: ChatSession, token: str = "") -> None:
        self.chat, self.name = chat, secrets.token_hex(8)
        self.key = f"{token}{'.' if token else ''}{secrets.token_urlsafe(24)}"
        self._attempts: dict[bytes, asyncio.Task[list[ReplyTurn]]] = {}
        self.under_way = 0
        self.on_end: Callable[[], None] = lambda: None

    def admits(self, key: str) -> bool:
        """Whether this is its key."""
        return same_key(key, self.key)

    def attempt(self, request: Request, body: bytes, marked: bool) -> asyncio.Task[list[ReplyTurn]]:
        """Task of the replies to a request. A caller that gives up leaves it running: a repeat may join it.

        It ends with a ChatError if the request cannot be answered; see `ChatSession`.

        Args:
            body: with the path; equal for a repeat. marked: the client marked the request as a repeat.
        """
        digest = hashlib.blake2b(body, digest_size=16).digest()
        attempt = self._attempts.get(digest) if marked else None
        if attempt is not None and not _failed(attempt):
            self.chat.counts["joined_retries"] += 1
            return attempt
        attempt = self._attempts[digest] = asyncio.create_task(self._replies(request))
        self.under_way += 1
        attempt.add_done_callback(self._ended)
        return attempt

    def _ended(self, attempt: asyncio.Task[list[ReplyTurn]]) -> None:
        self.under_way -= 1
        _seen(attempt)
        self.on_end()

    async def told(self, turns: Sequence[ReplyTurn], log_probs: bool) -> list[ServedReply]:
        """Replies with the data that the client receives."""
        return [
            ServedReply(turn, tuple(await self.chat.spell(ServedReply(turn).ids)) if log_probs else ())
            for turn in turns
        ]

    @property
    def recorded(self) -> Mapping[str, ReplyTurn]:
        """Turns by the name that clients use."""
        return self.chat.forest.named

    async def _replies(self, request: Request) -> list[ReplyTurn]:
        self.chat.ignore(request.ignored)
        self.chat.check_replies(max(1, len(request.prompts)) * request.count)
        asked = [
            self.chat.complete(prompt if isinstance(prompt, str) else list(prompt), max_tokens=request.max_tokens,
                               stop=request.stop)
            for prompt in request.prompts for _ in range(request.count)
        ] or [
            self.chat.reply(request.messages, request.tools, max_tokens=request.max_tokens, stop=request.stop)
            for _ in range(request.count)
        ]  # fmt: skip
        try:
            turns = [await asked[0]] if len(asked) == 1 else await _all(asked)
        except asyncio.CancelledError:
            if not self.chat.closed:
                raise
            raise SessionOver("rollout", "over", "ended while the reply was generated", "stop the agent") from None
        self.chat.answered(turns)
        return turns


async def _all(asked: Sequence[Coroutine[Any, Any, ReplyTurn]]) -> list[ReplyTurn]:
    """The replies, generated concurrently; if one fails, all are cancelled."""
    tasks = [asyncio.create_task(one) for one in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _failed(attempt: asyncio.Task[list[ReplyTurn]]) -> bool:
    return attempt.done() and (attempt.cancelled() or attempt.exception() is not None)


def _seen(attempt: asyncio.Task[list[ReplyTurn]]) -> None:
    """Retrieve the attempt's error, so asyncio does not log it if no client waits for it."""
    if _failed(attempt) and not attempt.cancelled():
        log.debug("a request failed: %s", attempt.exception())

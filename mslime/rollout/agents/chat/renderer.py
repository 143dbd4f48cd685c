"""Messages to tokens and back, as the rest of the package sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, ParamSpec, Protocol, TypeVar

from mslime.config.errors import MALFORMED
from mslime.rollout.agents.chat.messages import Tools, as_ordinary, parsed_json

P = ParamSpec("P")
T = TypeVar("T")
SHORT = 8192
"""Tokens and characters that a renderer may work on in the event loop: for about 2 ms."""


@dataclass(frozen=True)
class ParsedCall:
    """An attempt to call a tool.

    Attributes:
        name, arguments: of a call that can be made; the arguments are JSON.
        raw: what the model wrote.
        status: ok, or what is wrong: unknown_tool for one that can be made, anything else for one that cannot.
        id: that the model wrote, in formats that have one.
    """

    name: str
    arguments: str
    raw: str
    status: str = "ok"
    id: str = ""

    @property
    def callable(self) -> bool:
        """Whether the environment can be asked to make it."""
        return self.status in ("ok", "unknown_tool")


@dataclass(frozen=True)
class Parsed:
    """What a model said, in parts."""

    text: str
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()


class Renderer(Protocol):
    """Messages and tokens of one family. Its methods are called one at a time, not always in the same thread.

    Messages are in the form of chat templates (`messages.to_template`).

    Attributes:
        name: for logs and errors.
        stop_ids: tokens that end a turn.
    """

    name: str
    stop_ids: frozenset[int]

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins to speak.

        Raises:
            ChatError: the template refuses these messages.
        """
        ...

    def extend(
        self, before: Sequence[int], sampled: int, new: Sequence[Mapping[str, Any]], tools: Tools
    ) -> list[int] | None:
        """`before`, the messages that follow it, and the beginning of the next reply.

        The caller checks that the result begins with `before`: a renderer may be wrong about it.

        Args:
            before: token ids, exactly as the model saw and sampled them.
            sampled: how many of the last ones are the reply that ends there.

        Returns:
            None where the family's template would write something before the new messages otherwise.
        """
        ...

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        """The parts of a reply.

        Args:
            sampled: token ids of the reply, with those that ended it.
            prompt: token ids that it was sampled after; it may have begun the reasoning.
        """
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens written out."""
        ...


class Rendering:
    """A renderer beside an event loop. What is short is done at once: a thread's start and end cost more than it does.
    The rest has a thread of its own, for a long conversation takes a second to render. Tokenizers carry state, so the
    renderer does one thing at a time.

    Args:
        special: tokens that stay text where anybody but the model writes them out.
    """

    def __init__(self, renderer: Renderer, special: Sequence[str] = ()) -> None:
        self.renderer, self._special = renderer, tuple(special)
        self._thread, self._turn = ThreadPoolExecutor(1, "renderer"), Lock()

    async def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        """See `Renderer.render`."""
        return await self._run(None, self.renderer.render, self._ordinary(messages), tools)

    async def extend(
        self, before: list[int], sampled: int, new: Sequence[Mapping[str, Any]], tools: Tools
    ) -> tuple[list[int] | None, str]:
        """What follows `before` (see `Renderer.extend`), or None and the reason why nothing can."""
        size = len(before) + sum(len(message["content"]) for message in new)
        try:
            whole = await self._run(size, self.renderer.extend, before, sampled, self._ordinary(new), tools)
        except MALFORMED:  # as for `_parse`: a reply that its renderer was not written for
            return None, "prefix_broken"
        if whole is None:
            return None, "template_rewrites_history"
        if whole[: len(before)] != before:
            return None, "prefix_broken"
        return whole[len(before) :], ""

    async def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        """See `Renderer.parse`. What its parser cannot read is text, and so is a call that JSON cannot carry."""
        return await self._run(len(sampled) + len(prompt), self._parse, sampled, prompt, tools)

    async def spell(self, ids: Sequence[int]) -> str:
        """See `Renderer.spell`."""
        return await self._run(len(ids), self.renderer.spell, ids)

    async def spell_each(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""
        return await self._run(None, lambda: [self.renderer.spell([i]) for i in ids])

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ordinary(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        return [
            m if m["role"] == "assistant" else {**m, "content": as_ordinary(m["content"], self._special)}
            for m in messages
        ]

    def _parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        try:
            found = self.renderer.parse(sampled, prompt, tools)
            return replace(found, calls=tuple(map(_carried, found.calls)))
        except MALFORMED:  # a model can say anything, and a parser of others can meet what it was not written for
            text = self.renderer.spell([i for i in sampled if i not in self.renderer.stop_ids])
            return Parsed(text, calls=(ParsedCall("", "", text, "parser_failed"),))

    async def _run(self, size: int | None, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """The renderer's work, on so many tokens and characters (None: on many)."""
        if size is not None and size <= SHORT and self._turn.acquire(blocking=False):
            try:
                return work(*arguments, **named)
            finally:
                self._turn.release()

        def alone() -> T:
            with self._turn:
                return work(*arguments, **named)

        return await asyncio.get_running_loop().run_in_executor(self._thread, alone)


def _carried(call: ParsedCall) -> ParsedCall:
    """A call with a name that is a text and arguments that are an object, so that every client can be told of it, and
    every template can write it again; else one that cannot be made."""
    if not call.callable:
        return call
    name: object = call.name
    if not isinstance(name, str) or not name:
        return replace(call, name="", status="missing_name")
    arguments = parsed_json(call.arguments)
    if not isinstance(arguments, dict):
        return replace(call, status="malformed_structure")
    try:  # a number beyond all bounds, and half of a character, which UTF-8 does not have
        json.dumps([name, call.id, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return replace(call, status="invalid_json")
    return call

"""Interface of renderers: messages to tokens and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, ParamSpec, Protocol, TypeVar

from mslime.config.errors import MALFORMED
from mslime.rollout.agents.messages import Tools, as_ordinary, parsed_json

P = ParamSpec("P")
T = TypeVar("T")
SHORT = 8192
"""Largest input, in tokens and characters, that a renderer may process in the event loop: about 2 ms."""


@dataclass(frozen=True)
class ParsedCall:
    """A parsed tool call, valid or not.

    Attributes:
        name, arguments: of a valid call; the arguments are JSON.
        raw: the model's text.
        status: ok, or the error: unknown_tool if the call can still be made, any other value if it cannot.
        id: written by the model, in formats that have one.
    """

    name: str
    arguments: str
    raw: str
    status: str = "ok"
    id: str = ""

    @property
    def callable(self) -> bool:
        """Whether the environment can execute it."""
        return self.status in ("ok", "unknown_tool")


@dataclass(frozen=True)
class Parsed:
    """Parts of a model's reply."""

    text: str
    reasoning: str = ""
    calls: tuple[ParsedCall, ...] = ()


class Renderer(Protocol):
    """Messages and tokens of one family. Methods are called one at a time, not always in the same thread.

    Messages are in the form of chat templates (`messages.to_template`).

    Attributes:
        name: for logs and errors.
        stop_ids: tokens that end a turn.
    """

    name: str
    stop_ids: frozenset[int]

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        """Token ids of a conversation, up to the start of the assistant's reply.

        Raises:
            ChatError: the template refuses these messages.
        """
        ...

    def extend(
        self, before: Sequence[int], sampled: int, new: Sequence[Mapping[str, Any]], tools: Tools
    ) -> list[int] | None:
        """`before`, the messages that follow it, and the beginning of the next reply.

        The caller checks that the result begins with `before`, since a renderer may be wrong.

        Args:
            before: token ids, exactly as the model saw and sampled them.
            sampled: number of last tokens that form the reply.

        Returns:
            None if the family's template would change the text before the new messages.
        """
        ...

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        """The parts of a reply.

        Args:
            sampled: token ids of the reply, including those that ended it.
            prompt: token ids before the reply; they may open the reasoning.
        """
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """Text of token ids, including special tokens."""
        ...


class Rendering:
    """Runs a renderer beside an event loop. Short work runs at once: a thread switch costs more. Long conversations
    take a second to render, so they run in a thread. Tokenizers carry state, so calls are serialized.

    Args:
        special: special tokens that are broken up in all text not written by the model.
    """

    def __init__(self, renderer: Renderer, special: Sequence[str] = ()) -> None:
        self.renderer, self._special = renderer, tuple(special)
        self._thread, self._turn = ThreadPoolExecutor(1, "renderer"), Lock()

    async def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        return await self._run(None, self.renderer.render, self._ordinary(messages), tools)

    async def extend(
        self, before: list[int], sampled: int, new: Sequence[Mapping[str, Any]], tools: Tools
    ) -> tuple[list[int] | None, str]:
        """The tokens after `before` (see `Renderer.extend`), or None and the reason for the failure."""
        size = len(before) + sum(len(message["content"]) for message in new)
        try:
            whole = await self._run(size, self.renderer.extend, before, sampled, self._ordinary(new), tools)
        except MALFORMED:  # as in `_parse`: a reply that the renderer was not written for
            return None, "prefix_broken"
        if whole is None:
            return None, "template_rewrites_history"
        if whole[: len(before)] != before:
            return None, "prefix_broken"
        return whole[len(before) :], ""

    async def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        """See `Renderer.parse`. Unreadable output becomes text, and so does a call that JSON cannot represent."""
        return await self._run(len(sampled) + len(prompt), self._parse, sampled, prompt, tools)

    async def spell(self, ids: Sequence[int]) -> str:
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
        except MALFORMED:  # a model may write anything, and third-party parsers may fail on unexpected output
            text = self.renderer.spell([i for i in sampled if i not in self.renderer.stop_ids])
            return Parsed(text, calls=(ParsedCall("", "", text, "parser_failed"),))

    async def _run(self, size: int | None, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Run the renderer's work, for this many tokens and characters (None: many)."""
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
    """Check that a call's name is a text and its arguments an object, so all clients and templates can represent it;
    otherwise mark it as impossible to make."""
    if not call.callable:
        return call
    name: object = call.name
    if not isinstance(name, str) or not name:
        return replace(call, name="", status="missing_name")
    arguments = parsed_json(call.arguments)
    if not isinstance(arguments, dict):
        return replace(call, status="malformed_structure")
    try:  # infinite numbers, and surrogates, which UTF-8 cannot encode
        json.dumps([name, call.id, arguments], ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return replace(call, status="invalid_json")
    return call

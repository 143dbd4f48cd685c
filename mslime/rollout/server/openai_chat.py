"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mslime.rollout.chat.forest import ReplyTurn
from mslime.rollout.chat.messages import as_list, as_object, from_chat, to_chat
from mslime.rollout.server.openai_shared import OpenAIErrors, token_log_probs, usage
from mslime.rollout.server.requests import (
    MOST_REPLIES,
    Event,
    Request,
    ServedReply,
    asked,
    flag,
    integer,
    refuse,
    stopped,
    texts,
    tool,
    wants_usage,
)

_READ = (
    "messages", "tools", "n", "max_tokens", "max_completion_tokens", "stop", "stream", "logprobs", "stream_options",
    "model",
)  # fmt: skip


class ChatCompletions(OpenAIErrors):
    """See `Dialect`."""

    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        """See `Dialect`."""
        refuse(body, functions="functions became tools")
        tools = [read_tool(t, f"tools[{i}]") for i, t in enumerate(as_list(body.get("tools"), "tools"))]
        shorter = [n for name in ("max_completion_tokens", "max_tokens") if (n := integer(body, name, 1)) is not None]
        return asked(
            body,
            _READ,
            messages=tuple(
                from_chat(m, f"messages[{i}]") for i, m in enumerate(as_list(body.get("messages"), "messages"))
            ),
            tools=tuple(t for t in tools if t is not None),
            left_out=("tools: those that are no functions",) if None in tools else (),
            count=integer(body, "n", 1, MOST_REPLIES) or 1,
            max_tokens=min(shorter, default=None),
            stop=texts(body, "stop"),
            logprobs=flag(body, "logprobs"),
            usage=wants_usage(body),
        )

    def answer(self, request: Request, replies: Sequence[ServedReply]) -> Mapping[str, Any]:
        """See `Dialect`. A choice also has the `token_ids` that were sampled."""
        choices = [
            {
                "index": i,
                "message": to_chat(told.turn.reply),
                "finish_reason": stopped(told.turn),
                "logprobs": _log_probs(told),
                "token_ids": told.ids,
            }
            for i, told in enumerate(replies)
        ]
        return {**_base(request, replies, "chat.completion"), "choices": choices, "usage": usage(replies)}

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        """See `Dialect`."""
        base = _base(request, replies, "chat.completion.chunk")
        for i, told in enumerate(replies):
            for delta in _deltas(told.turn):
                yield "", {**base, "choices": [{"index": i, "delta": delta, "finish_reason": None}]}
            last = {"index": i, "delta": {}, "finish_reason": stopped(told.turn), "logprobs": _log_probs(told)}
            yield "", {**base, "choices": [last]}
        if request.usage:
            yield "", {**base, "choices": [], "usage": usage(replies)}
        yield "", "[DONE]"


def read_tool(value: object, where: str) -> dict[str, Any] | None:
    """A definition of a tool in a chat completion's request; None for tools that are no functions."""
    given = as_object(value, where)
    if given.get("type", "function") != "function":
        return None
    function = as_object(given.get("function"), f"{where}.function")
    return tool(function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function")


def _log_probs(told: ServedReply) -> dict[str, Any] | None:
    return {"content": token_log_probs(told), "refusal": None} if told.spelled else None


def _base(request: Request, replies: Sequence[ServedReply], kind: str) -> dict[str, Any]:
    name = f"chatcmpl-{replies[0].turn.reply.echo}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": request.model}


def _deltas(turn: ReplyTurn) -> Iterator[dict[str, Any]]:
    shown = to_chat(turn.reply)
    yield {"role": "assistant", "content": ""}
    if "reasoning_content" in shown:
        yield {"reasoning_content": shown["reasoning_content"]}
    if shown["content"]:
        yield {"content": shown["content"]}
    for i, call in enumerate(shown.get("tool_calls", ())):
        function = call["function"]
        yield {"tool_calls": [{"index": i, **call, "function": {"name": function["name"], "arguments": ""}}]}
        yield {"tool_calls": [{"index": i, "function": {"arguments": function["arguments"]}}]}

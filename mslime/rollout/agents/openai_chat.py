"""OpenAI's chat completions and completions: POST /v1/chat/completions, /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from mslime.rollout.agents.messages import ChatError, as_list, as_object, from_chat, to_chat
from mslime.rollout.agents.requests import (
    MOST_IN_ALL,
    MOST_REPLIES,
    Event,
    Request,
    ServedReply,
    flag,
    integer,
    refuse,
    request_of,
    stopped,
    texts,
    tool,
    tools_of,
    wants_usage,
)
from mslime.rollout.agents.session import ReplyTurn

# Parts shared by OpenAI's three APIs: log-probabilities, token counts, errors.


def token_log_probs(served: ServedReply) -> list[dict[str, Any]]:
    """A reply's tokens with their log-probabilities; empty if not requested."""
    pairs = zip(served.spelled, served.log_probs, strict=True) if served.spelled else ()
    return [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]


def usage(replies: Sequence[ServedReply]) -> dict[str, int]:
    """Token counts; a prompt of several replies is counted once."""
    prompt = max(served.turn.start for served in replies)
    completion = sum(served.turn.end - served.turn.start for served in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class OpenAIErrors:
    """A `Dialect` with OpenAI's form of errors."""

    def too_long(self, tokens: int, most: int) -> str:
        return (f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
                "tokens.")  # fmt: skip

    def error(self, status: int, message: str, field: str, code: str) -> dict[str, Any]:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": field or None, "code": code}}


_READ = (
    "messages", "tools", "n", "max_tokens", "max_completion_tokens", "stop", "stream", "logprobs", "stream_options",
    "model",
)  # fmt: skip


class ChatCompletions(OpenAIErrors):
    path = "/v1/chat/completions"

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        refuse(body, functions="is not supported: OpenAI replaced functions by tools")
        shorter = [n for name in ("max_completion_tokens", "max_tokens") if (n := integer(body, name, 1)) is not None]
        return request_of(
            body,
            _READ,
            messages=tuple(
                from_chat(m, f"messages[{i}]") for i, m in enumerate(as_list(body.get("messages"), "messages"))
            ),
            **tools_of(body, _read_tool, "tools: other than functions"),
            count=integer(body, "n", 1, MOST_REPLIES) or 1,
            max_tokens=min(shorter, default=None),
            stop=texts(body, "stop"),
            logprobs=flag(body, "logprobs"),
            usage=wants_usage(body),
        )

    def answer(self, request: Request, replies: Sequence[ServedReply]) -> Mapping[str, Any]:
        """See `Dialect`. A choice also contains the sampled `token_ids`."""
        choices = [
            {
                "index": i,
                "message": to_chat(served.turn.reply),
                "finish_reason": stopped(served.turn),
                "logprobs": _log_probs(served),
                "token_ids": served.ids,
            }
            for i, served in enumerate(replies)
        ]
        return {**_base(request, replies, "chatcmpl", "chat.completion"), "choices": choices, "usage": usage(replies)}

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        base = _base(request, replies, "chatcmpl", "chat.completion.chunk")
        for i, served in enumerate(replies):
            for delta in _deltas(served.turn):
                yield "", {**base, "choices": [{"index": i, "delta": delta, "finish_reason": None}]}
            last = {"index": i, "delta": {}, "finish_reason": stopped(served.turn), "logprobs": _log_probs(served)}
            yield "", {**base, "choices": [last]}
        yield from _ending(request, base, replies)


def _ending(request: Request, base: Mapping[str, Any], replies: Sequence[ServedReply]) -> Iterator[Event]:
    if request.usage:
        yield "", {**base, "choices": [], "usage": usage(replies)}
    yield "", "[DONE]"


def _read_tool(value: object, where: str) -> dict[str, Any] | None:
    """A tool definition in a chat completion's request; None for other tools than functions."""
    given = as_object(value, where)
    if given.get("type", "function") != "function":
        return None
    function = as_object(given.get("function"), f"{where}.function")
    return tool(function.get("name"), function.get("description"), function.get("parameters"), f"{where}.function")


def _log_probs(served: ServedReply) -> dict[str, Any] | None:
    return {"content": token_log_probs(served), "refusal": None} if served.spelled else None


def _base(request: Request, replies: Sequence[ServedReply], prefix: str, kind: str) -> dict[str, Any]:
    name = f"{prefix}-{replies[0].turn.reply.echo}"
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


# OpenAI's completions: POST /v1/completions, plain prompts as text or token ids.

_COMPLETION_FIELDS = (
    "prompt", "n", "max_tokens", "stop", "stream", "logprobs", "stream_options", "model", "echo", "suffix",
)  # fmt: skip
_FEWER = "send several requests"


class Completions(OpenAIErrors):
    path = "/v1/completions"

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        for name in ("echo", "suffix"):
            if body.get(name):
                raise ChatError(name, f"{body[name]!r:.80}", "is not supported", "remove the field")
        prompts, count = _prompts(body.get("prompt")), integer(body, "n", 1, MOST_REPLIES) or 1
        if len(prompts) * count > MOST_IN_ALL:
            raise ChatError(
                "n", count, f"replies to each of {len(prompts)} prompts exceed the limit of {MOST_IN_ALL}", _FEWER
            )
        return request_of(
            body,
            _COMPLETION_FIELDS,
            prompts=prompts,
            count=count,
            max_tokens=integer(body, "max_tokens", 1),
            stop=texts(body, "stop"),
            logprobs=integer(body, "logprobs", 0) is not None,
            usage=wants_usage(body),
        )

    def answer(self, request: Request, replies: Sequence[ServedReply]) -> Mapping[str, Any]:
        """See `Dialect`. A choice also contains the sampled `token_ids`."""
        choices = [{**_choice(i, served), "token_ids": served.ids} for i, served in enumerate(replies)]
        return {**_base(request, replies, "cmpl", "text_completion"), "choices": choices, "usage": usage(replies)}

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        base = _base(request, replies, "cmpl", "text_completion")
        for i, served in enumerate(replies):
            yield "", {**base, "choices": [_choice(i, served)]}
        yield from _ending(request, base, replies)


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ChatError("prompt", f"{value!r:.80}", "must be a string, token ids, or an array", "send a prompt")
    items = cast("list[object]", value)
    if all(isinstance(item, int) for item in items):
        return (read_ids(items, "prompt"),)
    if len(items) > MOST_IN_ALL:
        raise ChatError("prompt", f"{len(items)} prompts", f"exceed the limit of {MOST_IN_ALL}", _FEWER)
    return tuple(item if isinstance(item, str) else read_ids(item, f"prompt[{i}]") for i, item in enumerate(items))


def read_ids(value: object, where: str) -> tuple[int, ...]:
    """Token ids. Raises ChatError for any other value."""
    good = isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in value)
    if not good or not value:
        raise ChatError(where, f"{value!r:.80}", "must be a string or token ids below 2^31", "send a prompt")
    return tuple(cast("list[int]", value))


def _choice(index: int, served: ServedReply) -> dict[str, Any]:
    turn, found = served.turn, None
    if served.spelled:
        tokens = list(served.spelled)
        found = {"tokens": tokens, "token_logprobs": served.log_probs, "top_logprobs": None, "text_offset": []}
    return {"index": index, "text": turn.reply.text, "finish_reason": turn.finish, "logprobs": found}

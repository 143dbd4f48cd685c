"""OpenAI's completions: POST /v1/completions, plain prompts as text or token ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from mslime.rollout.chat.errors import ChatError
from mslime.rollout.chat.forest import ReplyTurn
from mslime.rollout.server.openai_shared import OpenAIErrors, usage
from mslime.rollout.server.requests import (
    MOST_IN_ALL,
    MOST_REPLIES,
    Event,
    Request,
    ServedReply,
    asked,
    integer,
    texts,
    wants_usage,
)

_COMPLETION_FIELDS = (
    "prompt",
    "n",
    "max_tokens",
    "stop",
    "stream",
    "logprobs",
    "stream_options",
    "model",
    "echo",
    "suffix",
)
_FEWER = "send several requests"


class Completions(OpenAIErrors):
    """See `Dialect`."""

    path = "/v1/completions"

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        """See `Dialect`."""
        for name in ("echo", "suffix"):
            if body.get(name):
                raise ChatError(name, f"{body[name]!r:.80}", "is not supported", "leave the field out")
        prompts, count = _prompts(body.get("prompt")), integer(body, "n", 1, MOST_REPLIES) or 1
        if len(prompts) * count > MOST_IN_ALL:
            raise ChatError(
                "n", count, f"replies to each of {len(prompts)} prompts are more than {MOST_IN_ALL}", _FEWER
            )
        return asked(
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
        """See `Dialect`. A choice also has the `token_ids` that were sampled."""
        choices = [{**_choice(i, told), "token_ids": told.ids} for i, told in enumerate(replies)]
        return {**_completion_base(request, replies), "choices": choices, "usage": usage(replies)}

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        """See `Dialect`."""
        base = _completion_base(request, replies)
        for i, told in enumerate(replies):
            yield "", {**base, "choices": [_choice(i, told)]}
        if request.usage:
            yield "", {**base, "choices": [], "usage": usage(replies)}
        yield "", "[DONE]"


def _prompts(value: object) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise ChatError("prompt", f"{value!r:.80}", "must be a text, token ids, or an array of either", "send a prompt")
    items = cast("list[object]", value)
    if all(isinstance(item, int) for item in items):
        return (read_ids(items, "prompt"),)
    if len(items) > MOST_IN_ALL:
        raise ChatError("prompt", f"{len(items)} prompts", f"are more than {MOST_IN_ALL}", _FEWER)
    return tuple(item if isinstance(item, str) else read_ids(item, f"prompt[{i}]") for i, item in enumerate(items))


def read_ids(value: object, where: str) -> tuple[int, ...]:
    """Token ids. Raises ChatError for anything else."""
    good = isinstance(value, list) and all(type(i) is int and 0 <= i < 1 << 31 for i in value)
    if not good or not value:
        raise ChatError(where, f"{value!r:.80}", "must be a text or token ids below 2^31", "send a prompt")
    return tuple(cast("list[int]", value))


def _completion_base(request: Request, replies: Sequence[ServedReply]) -> dict[str, Any]:
    name = f"cmpl-{replies[0].turn.reply.echo}"
    return {"id": name, "object": "text_completion", "created": int(time.time()), "model": request.model}


def _choice(index: int, told: ServedReply) -> dict[str, Any]:
    turn, found = told.turn, None
    if told.spelled:
        found = {
            "tokens": list(told.spelled),
            "token_logprobs": told.log_probs,
            "top_logprobs": None,
            "text_offset": [],
        }
    return {"index": index, "text": turn.reply.text, "finish_reason": turn.finish, "logprobs": found}

"""What OpenAI's three APIs write alike: log-probabilities, numbers of tokens, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mslime.rollout.server.requests import ServedReply


def token_log_probs(told: ServedReply) -> list[dict[str, Any]]:
    """A reply's tokens with their log-probabilities; empty where they are not wanted."""
    pairs = zip(told.spelled, told.log_probs, strict=True) if told.spelled else ()
    return [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]


def usage(replies: Sequence[ServedReply]) -> dict[str, int]:
    """Numbers of tokens; a prompt of several replies is counted once."""
    prompt = max(told.turn.start for told in replies)
    completion = sum(told.turn.end - told.turn.start for told in replies)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class OpenAIErrors:
    """A `Dialect` whose errors are written in that form."""

    def too_long(self, tokens: int, most: int) -> str:
        """See `Dialect`."""
        return (f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
                "tokens.")  # fmt: skip

    def error(self, status: int, message: str, field: str, code: str) -> dict[str, Any]:
        """See `Dialect`."""
        kind = "invalid_request_error" if status < 500 else "server_error"
        return {"error": {"message": message, "type": kind, "param": field or None, "code": code}}

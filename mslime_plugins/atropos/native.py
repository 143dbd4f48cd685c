"""SGLang's and vLLM's own POST /generate, which Atropos' managed servers use for tokens with log-probabilities.

Both use one path; a `prompt` identifies a vLLM request. Their answers contain exactly the sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from mslime.rollout.agents.messages import ChatError, as_object
from mslime.rollout.agents.openai_chat import OpenAIErrors, read_ids
from mslime.rollout.agents.requests import MOST_REPLIES, Event, Request, ServedReply, asked, integer, texts
from mslime.rollout.agents.session import ReplyTurn

PATH = "/generate"
_SAMPLING = ("n", "max_new_tokens", "stop")
_OF_SGLANG = ("input_ids", "text", "sampling_params", "return_logprob", "return_text_in_logprobs")
_OF_VLLM = ("prompt", "n", "max_tokens", "stop", "logprobs")


class SGLangGenerate(OpenAIErrors):
    """Dialect of SGLang's /generate, with one prompt a request."""

    path = PATH

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        sampling = as_object(body.get("sampling_params") or {}, "sampling_params")
        given = body.get("text") if body.get("input_ids") is None else body.get("input_ids")
        unread = sorted(name for name, value in sampling.items() if value is not None and name not in _SAMPLING)
        return asked(
            body,
            _OF_SGLANG,
            left_out=tuple(unread),
            prompts=(given if isinstance(given, str) and given else read_ids(given, "input_ids"),),
            count=integer(sampling, "n", 1, MOST_REPLIES) or 1,
            max_tokens=integer(sampling, "max_new_tokens", 1),
            stop=texts(sampling, "stop"),
        )  # fmt: skip

    def answer(
        self, request: Request, replies: Sequence[ServedReply]
    ) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        found = [_of_sglang(told) for told in replies]
        return found if request.count > 1 else found[0]

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        raise _no_stream()


class VLLMGenerate(OpenAIErrors):
    """Dialect of vLLM's /generate, with one prompt a request."""

    path = PATH

    def read(self, body: Mapping[str, Any], recorded: Mapping[str, ReplyTurn]) -> Request:
        given = body.get("prompt")
        ids = cast("dict[str, Any]", given).get("prompt_token_ids") if isinstance(given, dict) else given
        if integer(body, "prompt_logprobs", 0) is not None:
            raise ChatError("prompt_logprobs", body["prompt_logprobs"], "log-probs of prompts are not supported",
                            "leave it out; see teacher for distillation")  # fmt: skip
        return asked(
            body,
            _OF_VLLM,
            prompts=(ids if isinstance(ids, str) and ids else read_ids(ids, "prompt.prompt_token_ids"),),
            count=integer(body, "n", 1, MOST_REPLIES) or 1,
            max_tokens=integer(body, "max_tokens", 1),
            stop=texts(body, "stop"),
        )

    def answer(self, request: Request, replies: Sequence[ServedReply]) -> Mapping[str, Any]:
        """The answer; `logprobs` has, for each reply and position, a list with one {token id: log-probability}."""
        return {
            "text": [told.turn.reply.text for told in replies],
            "logprobs": [
                [[{str(token): log_prob}] for token, log_prob in zip(told.ids, told.log_probs, strict=True)]
                for told in replies
            ],
            "finish_reasons": [told.turn.finish for told in replies],
        }

    def events(self, request: Request, replies: Sequence[ServedReply]) -> Iterator[Event]:
        raise _no_stream()


def generate_dialect(body: Mapping[str, Any]) -> SGLangGenerate | VLLMGenerate:
    """The dialect of a request. Raises ChatError if it requests a stream."""
    if body.get("stream"):
        raise _no_stream()
    return VLLMGenerate() if "prompt" in body else SGLangGenerate()


def _of_sglang(told: ServedReply) -> dict[str, Any]:
    turn = told.turn
    pairs = [[log_prob, token, None] for token, log_prob in zip(told.ids, told.log_probs, strict=True)]
    return {
        "text": turn.reply.text,
        "output_ids": told.ids,
        "meta_info": {
            "id": turn.reply.echo,
            "finish_reason": {"type": turn.finish},
            "prompt_tokens": turn.start,
            "completion_tokens": turn.end - turn.start,
            "output_token_logprobs": pairs,
        },
    }


def _no_stream() -> ChatError:
    return ChatError("stream", True, "streams are not supported here", "leave it out")

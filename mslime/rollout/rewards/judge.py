"""Rewards from a language model that is asked for a number: reward kind `judge`.

It is asked at an OpenAI-compatible `/v1/chat/completions`, which SGLang, vLLM and vendors serve.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mslime.config.errors import UserError
from mslime.config.reward import JudgeConfig
from mslime.data.sample import Sample
from mslime.data.tokenizer import Tokenizer
from mslime.rollout.rewards.result import RewardResult, checked
from mslime.rollout.rewards.servers import AgainError, RewardRefusedError, RewardServers, as_json

_PLACES = re.compile(r"\{(prompt|response|label)\}")


class JudgeGrader:
    """Scores samples by what a judge says of them. Belongs to one event loop.

    Args:
        place: the configuration section, for messages.
        limit_s: seconds for one attempt.
        tokenizer: turns prompts back into text; without one {prompt} is empty.
    """

    def __init__(self, config: JudgeConfig, place: str, limit_s: float, tokenizer: Tokenizer | None) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._servers = RewardServers(config, place, limit_s)

    async def start(self) -> None:
        """Open the connection pool. Raises ConfigError when the token's variable is not set."""
        await self._servers.start()

    async def score(self, sample: Sample) -> RewardResult:
        """The result of a sample; what went wrong with its request is its error."""
        try:
            return await self._servers.ask(self._request(sample), self._read)
        except (AgainError, RewardRefusedError) as error:
            return RewardResult(0.0, str(error))
        except UserError:
            raise
        except Exception as error:  # an error of this sample, whatever it is
            return RewardResult(0.0, f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Give up the connections."""
        await self._servers.close()

    def _request(self, sample: Sample) -> dict[str, Any]:
        asked = [{"role": "user", "content": self._question(sample)}]
        if self._config.system is not None:
            asked.insert(0, {"role": "system", "content": self._config.system})
        model = {} if self._config.model is None else {"model": self._config.model}
        return {**model, "messages": asked, **self._config.options}

    def _question(self, sample: Sample) -> str:
        """The template, filled in one pass: what a response says in braces stays as it is."""
        prompt = ""
        if self._tokenizer is not None:
            prompt = self._tokenizer.decode(sample.tokens[: sample.prompt_length].tolist())
        said = {"prompt": prompt, "response": sample.response, "label": _text(sample.label)}
        assert self._config.template is not None, "check_reward"
        return _PLACES.sub(lambda place: said[place[1]], self._config.template)

    def _read(self, answer: Any) -> RewardResult:
        """The number in an answer.

        Raises:
            RewardRefusedError: the answer has no number. AgainError: likewise, and another sample may have one.
        """
        reply = _reply(answer)
        said = number_in(reply, self._config.pattern, self._config.field)
        if isinstance(said, float) and self._config.range is not None:
            low, high = self._config.range
            said = said if low <= said <= high else f"answered {said:g}, outside of {low:g} to {high:g}"
        if isinstance(said, str):
            sampled = self._config.options.get("temperature", 1.0) != 0
            raise (AgainError if sampled else RewardRefusedError)(f"{said}: {reply[-200:]!r}")
        return checked(said, 0)


def _text(label: object) -> str:
    if label is None:
        return ""
    return label if isinstance(label, str) else as_json(label).decode()


def number_in(reply: str, pattern: str | None, field: str | None) -> float | str:
    """The number in a judge's reply; or what is wrong with it, in words.

    Args:
        pattern: its last match holds the number in its first group.
        field: the key of the number, in the last JSON object of the reply that has it.
    """
    if pattern is not None:
        found = [match[1] for match in re.finditer(pattern, reply)]
        if not found:
            return f"answered without {pattern}"
        return _number(found[-1])
    objects = list(_objects(reply))
    if not objects:
        return "answered what is no JSON object"
    said = [o[field] for o in objects if field in o]
    return _number(said[-1]) if said else f"answered without the key {field!r}"


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text, whatever stands around them."""
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            found, at = decoder.raw_decode(text, at)
            yield found
        except (ValueError, RecursionError):
            at += 1


def _number(said: object) -> float | str:
    try:
        return float(said)  # pyright: ignore[reportArgumentType]  what is no number raises
    except (TypeError, ValueError, OverflowError):
        return f"answered {said!r:.80}, which is no number"


def _reply(answer: Any) -> str:
    """What the judge said. Raises RewardRefusedError when that is not in the answer."""
    try:
        choice = answer["choices"][0]
        content = choice["message"]["content"]
    except (TypeError, LookupError) as error:
        raise RewardRefusedError(f"answered no chat completion: {str(answer)[:200]!r}") from error
    if not isinstance(content, str):
        ended = choice.get("finish_reason")
        raise RewardRefusedError(f"answered no text (finish_reason {ended!r}): allow more max_tokens in judge.options")
    return content

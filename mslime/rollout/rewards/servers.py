"""Rewards from servers: reward models, and language models as judges."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import numpy as np
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from mslime.config.errors import ConfigError, UserError
from mslime.config.reward import HttpRewardConfig, JudgeConfig, RewardServersConfig
from mslime.data.sample import Sample
from mslime.data.tokenizer import Tokenizer
from mslime.rollout.rewards.reward_kinds import RewardResult, checked

MOST_BYTES = 64 * 2**20  # limit of a response
RETRY_STATUSES = (408, 425, 429)  # and every 5xx
T = TypeVar("T")


class RetryableError(Exception):
    """A request failed temporarily; a retry may succeed."""


class RewardRefusedError(Exception):
    """The server answered, and a retry would not change the answer."""


class RewardServers:
    """One server, or a pool of equal ones. Belongs to one event loop.

    Args:
        place: the configuration section, for messages.
        limit_s: seconds for one attempt.
        tokenizer: turns prompts back into text.
    """

    def __init__(self, config: RewardServersConfig, place: str, limit_s: float, tokenizer: Tokenizer | None) -> None:
        self._servers, self._place, self._limit_s, self._tokenizer = config, place, limit_s, tokenizer
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.concurrency)
        self._under_way = Counter(dict.fromkeys(config.urls, 0))

    async def start(self) -> None:
        """Open the connection pool. Raises ConfigError if the token's variable is not set."""
        headers = {"Content-Type": "application/json"}
        if self._servers.auth_env is not None:
            headers["Authorization"] = f"Bearer {token_of(self._servers.auth_env, self._place)}"
        timeout = aiohttp.ClientTimeout(total=self._limit_s)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=headers)

    async def ask(self, body: object, read: Callable[[Any], T]) -> T:
        """Post `body` and return the response as parsed by `read`.

        Args:
            body: any JSON value.
            read: raises RewardRefusedError for an invalid response, RetryableError if a retry may help.

        Raises:
            RetryableError: the last attempt failed.
            RewardRefusedError: a retry would not help, or the body cannot be written as JSON.
        """
        if self._session is None:
            await self.start()
        data = as_json(body)
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._servers.retries + 1), wait=wait_random_exponential(0.2, max=10), reraise=True,
            retry=retry_if_exception_type(RetryableError),
        )  # fmt: skip
        failed = Counter[str]()
        async with self._slots:
            return await attempts(self._attempt, data, read, failed)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def prompt_of(self, sample: Sample) -> str | None:
        """Text of the prompt; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode(sample.tokens[: sample.prompt_length].tolist())

    async def _attempt(self, data: bytes, read: Callable[[Any], T], failed: Counter[str]) -> T:
        """Post to the server with the fewest failures for this request and, among equals, the fewest running
        requests."""
        url = min(self._under_way, key=lambda u: (failed[u], self._under_way[u]))
        self._under_way[url] += 1
        try:
            return read(await self._post(url, data))
        except (RetryableError, RewardRefusedError) as error:
            failed[url] += 1
            raise type(error)(f"{url} {error}") from error
        finally:
            self._under_way[url] -= 1

    async def _post(self, url: str, data: bytes) -> object:
        assert self._session is not None
        try:
            async with self._session.post(url, data=data, allow_redirects=False, proxy=proxy_of(url)) as answer:
                text = await _read(answer)
        except TimeoutError as error:
            raise RetryableError(f"did not answer within {self._limit_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RetryableError(f"cannot be reached ({type(error).__name__}: {error})") from error
        if answer.status != 200:
            passing = answer.status in RETRY_STATUSES or answer.status >= 500
            excerpt = text[:200].decode(errors="replace")
            raise (RetryableError if passing else RewardRefusedError)(f"answered HTTP {answer.status}: {excerpt!r}")
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise RewardRefusedError(f"sent invalid JSON: {text[:80].decode(errors='replace')!r}") from error


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, RetryableError | RewardRefusedError) else f"{type(error).__name__}: {error}"


def as_json(value: object) -> bytes:
    """A value as JSON, integers of any size included. Raises RewardRefusedError if it cannot be written as JSON."""
    try:
        return orjson.dumps(value, default=str, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # an integer beyond 64 bits, a lone surrogate, a key that is not text
        pass
    try:
        return json.dumps(
            value, default=lambda v: v.tolist() if isinstance(v, np.generic | np.ndarray) else str(v)
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardRefusedError(f"cannot be called: the sample cannot be written as JSON ({error})") from error


def proxy_of(url: str) -> str | None:
    """The proxy for a URL from HTTP_PROXY, HTTPS_PROXY and NO_PROXY; none for machines of the own network."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        near = ipaddress.ip_address(host).is_private
    except ValueError:
        near = "." not in host  # localhost, a machine or service of the cluster
    return None if near or proxy_bypass(host) else getproxies().get(parts.scheme)


def token_of(variable: str, place: str) -> str:
    """The token in an environment variable. Raises ConfigError if it is not set.

    Args:
        place: the section that names it, for messages.
    """
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"{place}.auth_env", variable, "this environment variable is not set",
                          "export it where the run is started, or remove the setting")  # fmt: skip
    return token


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The body, up to MOST_BYTES. Raises RewardRefusedError if it is longer."""
    parts, size = list[bytes](), 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise RewardRefusedError(f"sent more than {MOST_BYTES} bytes")
    return b"".join(parts)


# Rewards from a server of reward models: samples are posted in batches.


class HttpGrader(RewardServers):
    """Scores samples at `http.url`.

    A request is {"samples": [{"prompt", "response", "label", "metadata"}, ...]}; the answer {"rewards": [...]}, one for
    each sample: a number, or an object {"reward": number, "metrics": {name: number}}. Without a tokenizer `prompt` is
    null.
    """

    def __init__(self, config: HttpRewardConfig, place: str, limit_s: float, tokenizer: Tokenizer | None) -> None:
        super().__init__(config, place, limit_s, tokenizer)
        self._config = config
        self._waiting: list[tuple[Sample, asyncio.Future[RewardResult]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def score(self, sample: Sample) -> RewardResult:
        """Score a sample; a failed request is returned as its error."""
        future: asyncio.Future[RewardResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, future))
        if len(self._waiting) == 1:
            self._spawn(self._send_later())
        elif len(self._waiting) >= self._config.batch_size:
            self._spawn(self._send())
        return await future

    async def close(self) -> None:
        """Cancel pending requests and close the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_later(self) -> None:
        if self._config.batch_size > 1:
            await asyncio.sleep(self._config.batch_wait_s)
        await self._send()

    async def _send(self) -> None:
        """Post queued samples, and set their results."""
        batch, self._waiting = self._waiting[: self._config.batch_size], self._waiting[self._config.batch_size :]
        if self._waiting:
            self._spawn(self._send_later())
        if not batch:
            return
        try:
            results = await self._results([sample for sample, _ in batch])
        except ConfigError as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        except Exception as error:  # any error belongs to these samples, whose callers wait
            results = [RewardResult(0.0, _said(error))] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def _results(self, samples: list[Sample]) -> list[RewardResult]:
        """Post samples. Raises RetryableError if the last attempt failed, RewardRefusedError for a bad response."""

        def read(answer: Any) -> list[RewardResult]:
            rewards = answer.get("rewards") if isinstance(answer, dict) else answer
            if not isinstance(rewards, list) or len(rewards) != len(samples):
                found = f"{len(rewards)} rewards" if isinstance(rewards, list) else f"{str(answer)[:80]!r}"
                raise RewardRefusedError(f'answered {found} to {len(samples)} samples; expected {{"rewards": [...]}}')
            return [checked(r, len(s)) for r, s in zip(rewards, samples, strict=True)]

        rows = [
            {"prompt": self.prompt_of(s), "response": s.response, "label": s.label, "metadata": s.metadata}
            for s in samples
        ]
        return await self.ask({"samples": rows}, read)


# Rewards from a language model that replies with a number: reward kind `judge`.
#
# Requests go to an OpenAI-compatible `/v1/chat/completions`, which SGLang, vLLM and vendors serve.

_PLACES = re.compile(r"\{(prompt|response|label)\}")


class JudgeGrader(RewardServers):
    """Scores samples by a judge's reply. Without a tokenizer {prompt} is empty."""

    def __init__(self, config: JudgeConfig, place: str, limit_s: float, tokenizer: Tokenizer | None) -> None:
        super().__init__(config, place, limit_s, tokenizer)
        self._config = config

    async def score(self, sample: Sample) -> RewardResult:
        """Score a sample; a failed request is returned as its error."""
        try:
            return await self.ask(self._request(sample), self._read)
        except UserError:
            raise
        except Exception as error:  # any error belongs to this sample
            return RewardResult(0.0, _said(error))

    def _request(self, sample: Sample) -> dict[str, Any]:
        messages = [{"role": "user", "content": self._question(sample)}]
        if self._config.system is not None:
            messages.insert(0, {"role": "system", "content": self._config.system})
        model = {} if self._config.model is None else {"model": self._config.model}
        return {**model, "messages": messages, **self._config.options}

    def _question(self, sample: Sample) -> str:
        """The filled template. It is filled in one pass, so braces in a response stay unchanged."""
        values = {"prompt": self.prompt_of(sample) or "", "response": sample.response, "label": _text(sample.label)}
        assert self._config.template is not None, "check_reward"
        return _PLACES.sub(lambda place: values[place[1]], self._config.template)

    def _read(self, answer: Any) -> RewardResult:
        """The number in a response.

        Raises:
            RewardRefusedError: it contains no number. RetryableError: likewise, and another reply may contain one.
        """
        reply = _reply(answer)
        number = number_in(reply, self._config.pattern, self._config.field)
        if isinstance(number, float) and self._config.range is not None:
            low, high = self._config.range
            number = number if low <= number <= high else f"answered {number:g}, outside the range {low:g} to {high:g}"
        if isinstance(number, str):
            sampled = self._config.options.get("temperature", 1.0) != 0
            raise (RetryableError if sampled else RewardRefusedError)(f"{number}: {reply[-200:]!r}")
        return checked(number, 0)


def _text(label: object) -> str:
    if label is None:
        return ""
    return label if isinstance(label, str) else as_json(label).decode()


def number_in(reply: str, pattern: str | None, field: str | None) -> float | str:
    """The number in a judge's reply, or a description of the error.

    Args:
        pattern: its last match holds the number in its first group.
        field: the key of the number, in the last JSON object of the reply that has it.
    """
    if pattern is not None:
        found = [match[1] for match in re.finditer(pattern, reply)]
        if not found:
            return f"answered without a match of {pattern}"
        return _number(found[-1])
    objects = list(_objects(reply))
    if not objects:
        return "answered without a JSON object"
    found = [o[field] for o in objects if field in o]
    return _number(found[-1]) if found else f"answered without the key {field!r}"


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text, ignoring all text around them."""
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            found, at = decoder.raw_decode(text, at)
            yield found
        except (ValueError, RecursionError):
            at += 1


def _number(value: object) -> float | str:
    try:
        return float(value)  # pyright: ignore[reportArgumentType]  other values than numbers raise
    except (TypeError, ValueError, OverflowError):
        return f"answered {value!r:.80}, which is not a number"


def _reply(answer: Any) -> str:
    """The judge's reply. Raises RewardRefusedError if the response contains none."""
    try:
        choice = answer["choices"][0]
        content = choice["message"]["content"]
    except (TypeError, LookupError) as error:
        raise RewardRefusedError(f"sent a reply that is not a chat completion: {str(answer)[:200]!r}") from error
    if not isinstance(content, str):
        ended = choice.get("finish_reason")
        raise RewardRefusedError(f"sent no text (finish_reason {ended!r}): raise max_tokens in judge.options")
    return content

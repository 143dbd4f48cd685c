"""Rewards from a server: samples are posted in batches, and tried again when the network or the server fails."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp
import orjson
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from mslime.config.errors import ConfigError
from mslime.config.reward import HttpRewardConfig
from mslime.data.sample import Sample
from mslime.data.tokenizer import Tokenizer
from mslime.rollout.rewards.result import RewardResult, checked

MOST_BYTES = 64 * 2**20  # of an answer
AGAIN = (408, 425, 429)  # and every 5xx


class _AgainError(Exception):
    """A request failed in a way that may pass."""


class _RefusedError(Exception):
    """The server answered, and will not answer otherwise."""


class HttpGrader:
    """Scores samples at `http.url`. Belongs to one event loop.

    A request is {"samples": [{"prompt", "response", "label", "metadata"}, ...]}; the answer {"rewards": [...]}, one for
    each sample: a number, or an object {"reward": number, "metrics": {name: number}}.

    Args:
        place: the configuration section, for messages.
        limit_s: seconds for one attempt.
        tokenizer: turns prompts back into text; without one `prompt` is null.
    """

    def __init__(self, config: HttpRewardConfig, place: str, limit_s: float, tokenizer: Tokenizer | None) -> None:
        assert config.url is not None
        self._config, self._place, self._url, self._tokenizer = config, place, config.url, tokenizer
        self._timeout = aiohttp.ClientTimeout(total=limit_s)
        self._limit_s = limit_s
        self._session: aiohttp.ClientSession | None = None
        self._waiting: list[tuple[Sample, asyncio.Future[RewardResult]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(config.concurrency)

    async def start(self) -> None:
        """Open the connection pool. Raises ConfigError when the token's variable is not set."""
        headers = {"Content-Type": "application/json"}
        if self._config.auth_env is not None:
            headers["Authorization"] = f"Bearer {token_of(self._config.auth_env, self._place)}"
        self._session = aiohttp.ClientSession(timeout=self._timeout, headers=headers)

    async def score(self, sample: Sample) -> RewardResult:
        """The result of a sample; what went wrong with its request is its error."""
        if self._session is None:
            await self.start()
        future: asyncio.Future[RewardResult] = asyncio.get_running_loop().create_future()
        self._waiting.append((sample, future))
        if len(self._waiting) == 1:
            self._spawn(self._send_later())
        elif len(self._waiting) >= self._config.batch_size:
            self._spawn(self._send())
        return await future

    async def close(self) -> None:
        """Give up what is on its way, and the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send_later(self) -> None:
        if self._config.batch_size > 1:
            await asyncio.sleep(self._config.batch_wait_s)
        await self._send()

    async def _send(self) -> None:
        """Post what waits, and hand out the results."""
        batch, self._waiting = self._waiting[: self._config.batch_size], self._waiting[self._config.batch_size :]
        if self._waiting:
            self._spawn(self._send_later())
        if not batch:
            return
        try:
            async with self._slots:
                results = await self._results([sample for sample, _ in batch])
        except (_AgainError, _RefusedError) as error:
            results = [RewardResult(0.0, f"{self._url} {error}")] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def _results(self, samples: list[Sample]) -> list[RewardResult]:
        """Raises _AgainError when the last attempt failed, _RefusedError for an answer that is none."""
        body = orjson.dumps(
            {"samples": [self._row(s) for s in samples]}, default=str, option=orjson.OPT_SERIALIZE_NUMPY
        )
        attempts = AsyncRetrying(
            stop=stop_after_attempt(self._config.retries + 1), wait=wait_random_exponential(0.2, max=10), reraise=True,
            retry=retry_if_exception_type(_AgainError),
        )  # fmt: skip
        answer: Any = await attempts(self._post, body)
        rewards = answer.get("rewards") if isinstance(answer, dict) else answer
        if not isinstance(rewards, list) or len(rewards) != len(samples):
            found = f"{len(rewards)} rewards" if isinstance(rewards, list) else f"{str(answer)[:80]!r}"
            raise _RefusedError(f'answered {found} to {len(samples)} samples; expected {{"rewards": [...]}}')
        return [checked(r, len(s)) for r, s in zip(rewards, samples, strict=True)]

    def _row(self, sample: Sample) -> dict[str, Any]:
        prompt = None
        if self._tokenizer is not None:
            prompt = self._tokenizer.decode(sample.tokens[: sample.prompt_length].tolist())
        return {"prompt": prompt, "response": sample.response, "label": sample.label, "metadata": sample.metadata}

    async def _post(self, body: bytes) -> object:
        """One attempt."""
        assert self._session is not None
        try:
            async with self._session.post(self._url, data=body, allow_redirects=False) as answer:
                text = await _read(answer)
        except TimeoutError as error:
            raise _AgainError(f"did not answer within {self._limit_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _AgainError(f"cannot be reached ({type(error).__name__}: {error})") from error
        if answer.status in AGAIN or answer.status >= 500:
            raise _AgainError(f"answered HTTP {answer.status}: {text[:200].decode(errors='replace')!r}")
        if answer.status != 200:
            raise _RefusedError(f"answered HTTP {answer.status}: {text[:200].decode(errors='replace')!r}")
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise _RefusedError(f"answered what is not JSON: {text[:80].decode(errors='replace')!r}") from error


def token_of(variable: str, place: str) -> str:
    """The token that an environment variable holds. Raises ConfigError when it is not set.

    Args:
        place: the configuration section, for messages.
    """
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(f"{place}.http.auth_env", variable, "this environment variable is not set",
                          "export it where the run is started, or remove the setting")  # fmt: skip
    return token


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    """The body, up to MOST_BYTES. Raises _RefusedError when it goes on."""
    parts, size = list[bytes](), 0
    async for part in answer.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise _RefusedError(f"answered more than {MOST_BYTES} bytes")
    return b"".join(parts)

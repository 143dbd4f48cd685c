"""Rewards from a server of reward models: samples are posted in batches."""

from __future__ import annotations

import asyncio
from typing import Any

from mslime.config.errors import ConfigError
from mslime.config.reward import HttpRewardConfig
from mslime.data.sample import Sample
from mslime.data.tokenizer import Tokenizer
from mslime.rollout.rewards.result import RewardResult, checked
from mslime.rollout.rewards.servers import AgainError, RewardRefusedError, RewardServers


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
        self._config, self._tokenizer = config, tokenizer
        self._servers = RewardServers(config, place, limit_s)
        self._waiting: list[tuple[Sample, asyncio.Future[RewardResult]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open the connection pool. Raises ConfigError when the token's variable is not set."""
        await self._servers.start()

    async def score(self, sample: Sample) -> RewardResult:
        """The result of a sample; what went wrong with its request is its error."""
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
        await self._servers.close()

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
            results = await self._results([sample for sample, _ in batch])
        except ConfigError as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        except Exception as error:  # an error of these samples, whatever it is: they wait for an answer
            said = (
                str(error) if isinstance(error, AgainError | RewardRefusedError) else f"{type(error).__name__}: {error}"
            )
            results = [RewardResult(0.0, said)] * len(batch)
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def _results(self, samples: list[Sample]) -> list[RewardResult]:
        """Raises AgainError when the last attempt failed, RewardRefusedError for an answer that is none."""

        def read(answer: Any) -> list[RewardResult]:
            rewards = answer.get("rewards") if isinstance(answer, dict) else answer
            if not isinstance(rewards, list) or len(rewards) != len(samples):
                found = f"{len(rewards)} rewards" if isinstance(rewards, list) else f"{str(answer)[:80]!r}"
                raise RewardRefusedError(f'answered {found} to {len(samples)} samples; expected {{"rewards": [...]}}')
            return [checked(r, len(s)) for r, s in zip(rewards, samples, strict=True)]

        return await self._servers.ask({"samples": [self._row(s) for s in samples]}, read)

    def _row(self, sample: Sample) -> dict[str, Any]:
        prompt = None
        if self._tokenizer is not None:
            prompt = self._tokenizer.decode(sample.tokens[: sample.prompt_length].tolist())
        return {"prompt": prompt, "response": sample.response, "label": sample.label, "metadata": sample.metadata}

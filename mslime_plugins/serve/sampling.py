"""Convert sampling requests for engines, and run them on a pool whose engines may die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.engine_pool import EnginePool, all_or_first_failure
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.config.errors import EngineError
from mslime_plugins.serve import bodies
from mslime_plugins.serve.client_errors import ServeError
from mslime_plugins.serve.pass_requests import ModelLimits

LOOK_S = 0.2
_NOT_SERVED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")


def requests_of(body: bodies.SampleBody, rid: str, limits: ModelLimits) -> list[GenerateRequest]:
    """The requests to engines: one per continuation, all for one engine. Log-probs are over the whole vocabulary, as
    the trainer computes them; the first request returns the prompt's log-probs. Raises ServeError for the first
    mistake."""
    for name in _NOT_SERVED:
        if getattr(body, name):
            raise ServeError(name, getattr(body, name), "is not supported", "remove it")
    prompt = prompt_of(body, limits)
    params, room = body.sampling_params, limits.positions - len(prompt)
    wanted = params.max_tokens if params.max_tokens is not None else room
    if room < 1 or wanted > room:
        raise ServeError("prompt", f"{len(prompt)} tokens, and {wanted} more", f"the limit is {limits.positions}",
                         "shorten the prompt, or lower max_tokens")  # fmt: skip
    texts, ids = _stops(params)
    request = GenerateRequest(
        rid, prompt, wanted, temperature=params.temperature, top_p=params.top_p, top_k=params.top_k or -1, stop=texts,
        stop_token_ids=ids, ignore_eos=isinstance(params.stop, list) and not params.stop, session_id=rid, masked=False,
    )  # fmt: skip
    scored_from = _scored_from(body, len(prompt))
    return [
        replace(
            request,
            rid=f"{rid}-{index}",
            seed=None if params.seed is None else params.seed + index,
            scored_from=scored_from if index == 0 else None,
        )
        for index in range(body.num_samples)
    ]


def prompt_of(body: bodies.SampleBody, limits: ModelLimits) -> tuple[int, ...]:
    """The prompt's token ids. Raises ServeError."""
    for chunk in body.prompt.chunks:
        if not isinstance(chunk, bodies.TextChunk):
            raise ServeError("prompt", chunk.type, "only text is supported", "send chunks of tokens")
    prompt = tuple(t for chunk in body.prompt.chunks if isinstance(chunk, bodies.TextChunk) for t in chunk.tokens)
    if not prompt:
        raise ServeError("prompt", "no token", "must not be empty", "send at least one token")
    if max(prompt) >= limits.vocab_size:
        raise ServeError("prompt", max(prompt), f"the model has token ids 0 to {limits.vocab_size - 1}",
                         "use the tokenizer from get_tokenizer")  # fmt: skip
    return prompt


def _stops(params: bodies.SamplingParams) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Texts and token ids that end a continuation."""
    stop = params.stop
    if stop is None:
        return (), ()
    if isinstance(stop, str):
        return (stop,), ()
    return tuple(s for s in stop if isinstance(s, str)), tuple(s for s in stop if isinstance(s, int))


def _scored_from(body: bodies.SampleBody, length: int) -> int | None:
    if not body.prompt_logprobs:
        if body.prompt_logprobs_last_n is not None:
            raise ServeError("prompt_logprobs_last_n", body.prompt_logprobs_last_n, "requires include_prompt_logprobs",
                             "set both, or remove it")  # fmt: skip
        return None
    last = body.prompt_logprobs_last_n
    if last is not None and last >= length:
        raise ServeError("prompt_logprobs_last_n", last, f"must be below the prompt's {length} tokens", "lower it")
    return 1 if last is None else length - last


class PooledEngines:
    """A pool of engines; requests wait while all are dead.

    Args:
        room: most loaded adapters of an engine.
        may_come: whether a new engine can appear after the last one died.
    """

    def __init__(self, pool: EnginePool, room: int, may_come: Callable[[], bool]) -> None:
        self._pool, self._room, self._may_come = pool, room, may_come

    async def sample(self, adapter: Path | None, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """All continuations of a prompt, under an adapter or the base. If an engine dies, its request goes to another
        one.

        Raises:
            EngineError: no engine can serve a request; raised after all requests have ended.
        """
        where = None if adapter is None else adapter.absolute()
        found = await asyncio.gather(*(self._one(where, each) for each in requests), return_exceptions=True)
        return all_or_first_failure(found)

    async def forget(self, adapter: Path) -> None:
        """Release an adapter that no request will use again."""
        await self._pool.take_back(adapter.absolute())

    async def _one(self, adapter: Path | None, request: GenerateRequest) -> GenerateResult:
        while True:
            try:
                found = await self._pool.generate_from(adapter, request, self._room)
            except EngineDied as error:
                await self._another(error)
                continue
            if found.finish == "abort":
                raise EngineError(found.engine, request.rid, "the engine aborted the request", "sample again")
            return found

    async def _another(self, error: EngineDied) -> None:
        """Wait for a live engine. Raises EngineError if none will come."""
        while not len(self._pool):
            if not self._may_come():
                raise EngineError(
                    "engines", 0, "all engines have died; see the console", "restart the server"
                ) from error
            await asyncio.sleep(LOOK_S)

"""A request to sample: from its body to what an engine is asked, or to words."""

from __future__ import annotations

from dataclasses import replace

from mslime.backends.sglang.generating import GenerateRequest
from mslime_plugins.serve import bodies
from mslime_plugins.serve.data import Limits
from mslime_plugins.serve.errors import ServeError

_NOT_SERVED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")


def requests_of(body: bodies.SampleBody, rid: str, limits: Limits) -> list[GenerateRequest]:
    """What engines are asked: one request for each continuation, all for one engine. Log-probs are those of the whole
    vocabulary, which the trainer computes; the first one returns those of the prompt. Raises ServeError for the first
    mistake."""
    for name in _NOT_SERVED:
        if getattr(body, name):
            raise ServeError(name, getattr(body, name), "is not served", "leave it out")
    prompt = prompt_of(body, limits)
    params, room = body.sampling_params, limits.positions - len(prompt)
    wanted = params.max_tokens if params.max_tokens is not None else room
    if room < 1 or wanted > room:
        raise ServeError("prompt", f"{len(prompt)} tokens, and {wanted} more", f"the model takes {limits.positions}",
                         "shorten the prompt, or ask for fewer with max_tokens")  # fmt: skip
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


def prompt_of(body: bodies.SampleBody, limits: Limits) -> tuple[int, ...]:
    """The prompt's token ids. Raises ServeError."""
    for chunk in body.prompt.chunks:
        if not isinstance(chunk, bodies.TextChunk):
            raise ServeError("prompt", chunk.type, "only text is served", "give chunks of tokens")
    prompt = tuple(t for chunk in body.prompt.chunks if isinstance(chunk, bodies.TextChunk) for t in chunk.tokens)
    if not prompt:
        raise ServeError("prompt", "no token", "there is nothing to continue", "give at least one token")
    if max(prompt) >= limits.vocab_size:
        raise ServeError("prompt", max(prompt), f"the model has token ids 0 to {limits.vocab_size - 1}",
                         "use the tokenizer that get_tokenizer gives")  # fmt: skip
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
            raise ServeError("prompt_logprobs_last_n", body.prompt_logprobs_last_n, "applies to prompt_logprobs",
                             "set include_prompt_logprobs")  # fmt: skip
        return None
    last = body.prompt_logprobs_last_n
    if last is not None and last >= length:
        raise ServeError("prompt_logprobs_last_n", last, f"must be below the prompt's {length} tokens", "lower it")
    return 1 if last is None else length - last

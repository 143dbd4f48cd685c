"""Requests to an SGLang server (0.5.23) and their answers: generation, scores of given tokens, probes.

Engine answers are untrusted: lengths, ids, log-probs, versions and routes are checked against the request, and nothing
is repaired. Every fault is raised as one of `MALFORMED`, which the client turns into an EngineError.

Which log-prob is the behaviour policy's (read in sglang/srt/layers/sampler.py, kept by tests): `output_token_logprobs`
is log softmax(logits / temperature). It includes the temperature but not top-k, top-p and min-p. So a restricted draw
requests the sampling mask (the ids that it kept) and uses `output_token_sampling_logprobs`, which is renormalised over
them. Greedy requests (temperature 0) report log softmax(logits).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pybase64
from numpy.typing import NDArray

from mslime.backends.sglang.engine_reply import MASKS, ROUTES, IntegerRows
from mslime.config.errors import DataError, EngineError, reading
from mslime.config.model_facts import ModelFacts, eos_ids
from mslime.data.probe import NEW_TOKENS, ProbeScores
from mslime.data.routes import Supports, narrowest_dtype
from mslime.data.tokenizer import Tokenizer
from mslime.engine_plugin.wire import NARROW

# Scoring given tokens on an SGLang server (0.5.23): one prefill, no generation.
#
# Scores (read in sglang/srt/layers/logprob_processor.py and logits_processor.py, kept by tests) are log softmax(logits)
# of each prompt token after those before it. Unlike for generated tokens, the request's temperature does not enter, and
# no setting makes it.


@dataclass(frozen=True)
class ScoreRequest:
    """One sequence to be scored.

    Attributes:
        rid: request id, unique among the requests in flight.
        input_ids: [n] token ids.
        start: first token whose log-prob is returned, at least 1. Earlier tokens may come from the prefix cache.
        session_id: requests of one session are sent to one engine (see `EnginePool`), which reuses its prefix cache.
    """

    rid: str
    input_ids: Sequence[int] | NDArray[np.int32]
    start: int = 1
    session_id: str = ""

    def payload(self) -> dict[str, Any]:
        """The body of POST /generate."""
        assert 1 <= self.start < len(self.input_ids), f"start {self.start} of {len(self.input_ids)} tokens"
        return {
            "rid": self.rid,
            "input_ids": [int(t) for t in self.input_ids],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": self.start - 1,  # the engine's first entry has no log-prob
        }


def parse_scores(request: ScoreRequest, answer: dict[str, Any], vocab_size: int | None) -> NDArray[np.float32]:
    """[n] float32: index t is the log-prob of token t, 0 before `request.start`.

    Args:
        vocab_size: of the served model, if known.

    Raises:
        AssertionError: the answer lacks a finite log-prob for a requested token.
    """
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] != "abort", f"aborted: {meta['finish_reason'].get('message')}"
    scores = np.zeros(len(request.input_ids), np.float32)
    scores[request.start :] = read_scores(meta, request.input_ids, request.start, vocab_size)
    return scores


def read_scores(
    meta: Mapping[str, Any], ids: Sequence[int] | NDArray[np.int32], start: int, vocab_size: int | None
) -> NDArray[np.float32]:
    """[n - start] float32: log-probs of the tokens from `start` on of a prompt of n. Raises like `parse_scores`."""
    requested, pairs = np.asarray(ids, np.int64)[start - 1 :], meta["input_token_logprobs"]
    assert len(pairs) == len(requested), f"{len(pairs) - 1} log-probs for {len(requested) - 1} tokens"
    found = np.asarray([pair[1] for pair in pairs], np.int64)
    # The engine reports the last id of the vocabulary as 0 (it treats it as an image placeholder).
    last = vocab_size is None or requested == vocab_size - 1
    assert bool(((found == requested) | ((found == 0) & last)).all()), "log-probs of other tokens"
    assert pairs[0][0] is None, f"the first entry is {pairs[0][0]}, and must be null"
    values = np.asarray([pair[0] for pair in pairs[1:]], np.float64)
    assert bool(np.isfinite(values).all()), "log-probs that are not finite"
    return np.minimum(values, 0.0).astype(np.float32)  # log of a rounded probability can exceed 0 by an ulp


Finish = Literal["stop", "length", "abort"]

LOWEST_LOG_PROB, HIGHEST_LOG_PROB = -1e4, 1e-4
"""Range of a sampled token's log-prob: the log of a rounded probability can exceed 0 by a few ulp, and a token below
the lower bound is never drawn."""


@dataclass(frozen=True)
class GenerateRequest:
    """One continuation of one token sequence.

    Attributes:
        rid: request id, unique among the requests in flight; `abort` takes it.
        input_ids: [prompt] token ids.
        top_k: -1 for the whole vocabulary.
        min_p: least probability of a token, as a share of the likeliest one's.
        seed: honoured only by servers with `enable_deterministic_inference`.
        ignore_eos: continue to `max_new_tokens` whatever is sampled.
        want_routes: return the experts of every position from `routes_start` on.
        routes_start: first position whose routes are returned, at most len(input_ids).
        session_id: requests of one session are sent to one engine (see `EnginePool`), which reuses its prefix cache.
        cache_key: only prefixes computed by requests with the same key are reused; empty for no key.
        adapter: which of several adapters answers; empty in a run with one or none.
        masked: a restricted draw returns its sampling masks, and log-probs over them; else log-probs are always those
            of the whole vocabulary.
        scored_from: first prompt token whose log-prob is returned, at least 1; None: no prompt log-probs.
    """

    rid: str
    input_ids: Sequence[int] | NDArray[np.int32]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    want_routes: bool = False
    routes_start: int = 0
    session_id: str = ""
    cache_key: str = ""
    adapter: str = ""
    masked: bool = True
    scored_from: int | None = None

    @property
    def restricted(self) -> bool:
        """Whether the draw is from less than the whole vocabulary, with sampling masks requested."""
        return self.masked and self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0)

    def payload(self) -> dict[str, Any]:
        """The body of POST /generate. Raises EngineError for a draw whose log-probs the engine cannot report."""
        if self.restricted and self.top_k < 1:
            raise EngineError(
                "rollout.top_k",
                self.top_k,
                "SGLang reports the log-probs of a restricted draw only together with a finite top_k",
                "set rollout.top_k (for example 4096, the most that the engine allows by default)",
            )
        params: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": False,
        }
        if self.stop:
            params["stop"] = list(self.stop)
        if self.stop_token_ids:
            params["stop_token_ids"] = list(self.stop_token_ids)
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        body: dict[str, Any] = {
            "rid": self.rid,
            "input_ids": np.asarray(self.input_ids, np.int64).tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "return_routed_experts": self.want_routes,
            "return_sampling_mask": self.restricted,
        }
        if self.want_routes:
            body["routed_experts_start_len"] = self.routes_start
        if self.scored_from is not None:
            body["logprob_start_len"] = self.scored_from - 1  # the engine's first entry has no log-prob
        if self.cache_key:
            body["extra_key"] = self.cache_key  # SGLang's radix cache separates requests by it
        return body


@dataclass(frozen=True)
class GenerateResult:
    """A parsed answer to a request.

    Attributes:
        output_ids: [n] int32 new tokens; fewer than requested after an abort, none if it came before the first.
        log_probs: [n] float32, natural log of the probability each token was drawn with (see the module's text).
        finish: stop (end of sequence, stop id or stop string), length, or abort.
        versions: (weight version, start, end) spans over the n new tokens.
        routes: [prompt + n - 1 - routes_start, layers, top-k] global expert ids, dense layers as zeros; None if not
            requested. After a pause in mode `retract` the engine prefills again, so that rows of tokens sampled before
            the pause then describe the newest weights.
        supports: n rows, none of them empty: the ids that each token was drawn from; None for an unrestricted draw.
        cached_tokens: prompt tokens found in the prefix cache.
        text: the new tokens as text.
        engine: name of the engine.
        retractions: how often the running request was put back into the queue.
        scores: [prompt] float32 log-probs of the prompt's tokens, NaN before `scored_from`; None if not requested.
    """

    output_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    finish: Finish
    versions: tuple[tuple[int, int, int], ...]
    routes: NDArray[np.integer] | None
    supports: Supports | None
    cached_tokens: int
    text: str
    engine: str
    retractions: int = 0
    scores: NDArray[np.float32] | None = None


def parse_version(text: str) -> int:
    """A weight version as a number; `default`, for weights that the engine loaded itself, is version 0."""
    return 0 if text == "default" else int(text)


def decode_routes(encoded: str | memoryview, rows: int, model: ModelFacts) -> NDArray[np.integer]:
    """Base64 of C-ordered ids -> [rows, layers, top-k] expert ids in the narrowest dtype for the model's experts.

    Raises ValueError for invalid base64, AssertionError for another number of entries or ids out of range.

    Args:
        encoded: base64 of int32, or of its tag's dtype (`wire.NARROW`).
    """
    dtype, text = _untagged(encoded)
    decoded = pybase64.b64decode(text, validate=True)
    expected = rows * model.num_layers * model.top_k
    assert len(decoded) == dtype.itemsize * expected, (
        f"{len(decoded) / dtype.itemsize:g} route entries, expected {rows} x {model.num_layers} x {model.top_k} = "
        f"{expected}"
    )
    flat = np.frombuffer(decoded, dtype)
    if model.num_experts:
        unsigned = flat.view(np.uint32) if dtype == np.int32 else flat  # a negative id becomes a very large one
        known = not len(flat) or unsigned.max() < model.num_experts
        assert known, f"expert id {flat[unsigned.argmax()]} of {model.num_experts}"
        flat = flat.astype(narrowest_dtype(model.num_experts), copy=False)
    return flat.reshape(rows, model.num_layers, model.top_k)


def _untagged(encoded: str | memoryview) -> tuple[np.dtype[np.integer], str | memoryview]:
    """The dtype of a text of routes, and its base64."""
    for tag, dtype in NARROW.items():
        if encoded[: len(tag)] == (tag if isinstance(encoded, str) else tag.encode()):
            return np.dtype(dtype), encoded[len(tag) :]
    return np.dtype(np.int32), encoded


def answer_limit(request: GenerateRequest, model: ModelFacts | None) -> int:
    """Upper bound on the bytes of an answer to `request`."""
    per_token = 1024 + 16 * (request.top_k if request.restricted else 0)  # including ids that tie with the last one
    routes = 0
    if request.want_routes and model is not None:
        rows = len(request.input_ids) + request.max_new_tokens
        routes = 6 * rows * model.num_layers * model.top_k  # base64 of int32 is 5.4 bytes an entry
    scores = 0 if request.scored_from is None else 256 * len(request.input_ids)
    return (1 << 20) + per_token * request.max_new_tokens + routes + scores


def parse_generation(
    request: GenerateRequest, answer: Mapping[str, Any], engine: str, model: ModelFacts | None
) -> GenerateResult:
    """One answer of /generate, checked against its request. Raises one of MALFORMED.

    A request aborted while it waits in the engine's queue returns without routes and supports, even if it ran before.
    Its tokens cannot be replayed then, and the result contains none of them.
    """
    meta = answer["meta_info"]
    ids = _token_ids(answer["output_ids"], model)
    finish = meta["finish_reason"]["type"]
    assert finish in get_args(Finish), f"finished by {finish!r}"
    restricted, encoded = request.restricted, meta.get(ROUTES)
    incomplete = (request.want_routes and encoded is None) or (restricted and MASKS not in meta)
    if finish == "abort" and (incomplete or len(ids) == 0):
        return nothing(request, engine, meta)
    n = len(ids)
    assert n <= request.max_new_tokens, f"{n} tokens, more than the requested {request.max_new_tokens}"
    supports = _supports(meta, ids, model) if restricted else None
    routes = None
    if request.want_routes:
        assert encoded is not None, "the engine returned no routed experts"
        assert model is not None, "routes need a client with the model"
        routes = decode_routes(encoded, len(request.input_ids) + n - 1 - request.routes_start, model)
    scores = None
    if (start := request.scored_from) is not None:
        scores = np.full(len(request.input_ids), np.nan, np.float32)
        scores[start:] = read_scores(meta, request.input_ids, start, None if model is None else model.vocab_size)
    return GenerateResult(
        ids,
        _log_probs(meta, ids, restricted),
        finish,
        _version_spans(meta["weight_versions"], n) if n else (),
        routes,
        supports,
        int(meta.get("cached_tokens") or 0),
        str(answer.get("text") or ""),
        engine,
        int(meta.get("num_retractions") or 0),
        scores,
    )


def of_version(result: GenerateResult, version: int) -> GenerateResult:
    """A result with one version for all tokens: that of its adapter, whatever version the engine reports."""
    return replace(result, versions=((version, 0, n),) if (n := len(result.output_ids)) else ())


def _integers(values: Sequence[Any]) -> NDArray[np.int64]:
    """[n] of a JSON list of integers; text, fractions and booleans are rejected."""
    found = np.asarray(values) if len(values) else np.empty(0, np.int64)
    assert found.dtype.kind == "i" and found.ndim == 1, f"expected integers, got {str(values)[:100]}"
    return found.astype(np.int64)


def _token_ids(values: Sequence[Any] | NDArray[np.uint32], model: ModelFacts | None) -> NDArray[np.int32]:
    ids = values if isinstance(values, np.ndarray) else _integers(values)
    top = model.vocab_size if model is not None else 1 << 31
    beyond = ids[(ids < 0) | (ids >= top)]
    assert not len(beyond), f"token id {beyond[0]} is outside the vocabulary of {top}"
    return ids.astype(np.int32)


def _log_probs(meta: Mapping[str, Any], ids: NDArray[np.int32], restricted: bool) -> NDArray[np.float32]:
    """[n] float32, at most 0."""
    pairs = meta["output_token_logprobs"]
    named = _integers([pair[1] for pair in pairs])
    assert np.array_equal(named, ids), f"{len(pairs)} log-probs for {len(ids)} tokens, or for other tokens"
    values = np.asarray(meta["output_token_sampling_logprobs"] if restricted else [pair[0] for pair in pairs])
    assert values.shape == ids.shape, f"{len(values)} log-probs for {len(ids)} tokens"
    assert not len(values) or values.dtype.kind in "fi", "log-probs that are not numbers"
    within = (values >= LOWEST_LOG_PROB) & (values <= HIGHEST_LOG_PROB) if len(values) else np.empty(0, np.bool_)
    assert within.all(), f"impossible log-prob {values[~within][0]} of a sampled token"
    return np.minimum(values.astype(np.float32), 0.0)


def _version_spans(spans: Sequence[Mapping[str, Any]], n: int) -> tuple[tuple[int, int, int], ...]:
    """(weight version, start, end) over [0, n); the spans must cover it in order."""
    found = tuple((parse_version(s["version"]), s["start"], s["end"]) for s in spans)
    edges = [0, *(end for _, _, end in found)]
    touching = [start for _, start, _ in found] == edges[:-1] and edges[-1] == n and edges == sorted(edges)
    assert touching and all(type(edge) is int for edge in edges), f"version spans {found} for {n} tokens"
    return found


def _supports(meta: Mapping[str, Any], ids: NDArray[np.int32], model: ModelFacts | None) -> Supports:
    """The ids that each token was drawn from: distinct, inside the vocabulary, and including the token itself."""
    masks = meta.get(MASKS)
    assert masks is not None, "the engine returned no sampling mask (the ids left by top-k, top-p and min-p)"
    assert len(masks) == len(ids), f"{len(masks)} sampling masks for {len(ids)} tokens"
    if isinstance(masks, IntegerRows):
        kept, sizes = _token_ids(masks.values, model), masks.sizes
    else:
        sizes = np.asarray([len(mask) for mask in masks], np.int64)
        kept = _token_ids(list(chain.from_iterable(masks)), model)
    supports = Supports.of_sizes(kept, sizes)
    outside = np.flatnonzero((sizes == 0) | ~supports.hold(ids))
    if len(outside):
        at = int(outside[0])
        drawn_from = str(supports.row(at).tolist())[:100]
        raise AssertionError(f"token {ids[at]} is not in its sampling mask, {drawn_from}")
    assert not supports.repeats(), "a sampling mask contains an id twice"
    return supports


def nothing(request: GenerateRequest, engine: str, meta: Mapping[str, Any]) -> GenerateResult:
    """The result of a request aborted before it produced usable output."""
    retractions = int(meta.get("num_retractions") or 0)
    supports = Supports.empty() if request.restricted else None
    ids, log_probs = np.empty(0, np.int32), np.empty(0, np.float32)
    return GenerateResult(ids, log_probs, "abort", (), None, supports, 0, "", engine, retractions)


# A fixed text at an SGLang server (0.5.23): its log-probs and routes, and its continuation.
#
# One prefill computes the text; the tokens after it follow one by one. Some models use different weights for the two:
# DeepSeek's attention uses the projections themselves in a prefill, and weights derived from them in a decoding step.


@dataclass(frozen=True)
class ProbeRequest:
    """A text to be scored and continued, greedily.

    Attributes:
        rid: request id, unique among the requests in flight.
        input_ids: [T] token ids, at least 2.
        version: required weight version.
        want_routes: return the experts of every token but the last.
        adapter: which of several adapters answers; empty in a run with one or none.
    """

    rid: str
    input_ids: Sequence[int]
    version: int
    want_routes: bool
    adapter: str = ""

    @property
    def generation(self) -> GenerateRequest:
        """The continuation request. Its cache key separates it from other weights and other requests."""
        return GenerateRequest(
            self.rid, self.input_ids, NEW_TOKENS, temperature=0.0, ignore_eos=True, want_routes=self.want_routes,
            cache_key=self.rid,
        )  # fmt: skip

    def payload(self) -> dict[str, Any]:
        """The body of POST /generate."""
        return self.generation.payload() | {"logprob_start_len": 0}


def parse_probe(
    request: ProbeRequest, answer: dict[str, Any], engine: str, model: ModelFacts, adapter: bool = False
) -> ProbeScores:
    """Parse a probe's answer. Raises one of MALFORMED, also for another weight version.

    Args:
        adapter: it was answered with the adapter of its version, which the engine does not report.
    """
    text = parse_scores(ScoreRequest(request.rid, request.input_ids), answer, model.vocab_size)
    return probed(request, text, parse_generation(request.generation, answer, engine, model), model, adapter)


def probed(
    request: ProbeRequest, text: NDArray[np.float32], new: GenerateResult, model: ModelFacts, adapter: bool = False
) -> ProbeScores:
    """Combine log-probs and continuation; returns and raises like `parse_probe`.

    Args:
        text: [T] log-probs of the text.
        new: its continuation.
    """
    assert len(new.output_ids) == NEW_TOKENS, f"{len(new.output_ids)} tokens of {NEW_TOKENS}, finished by {new.finish}"
    versions = {version for version, _, _ in new.versions}
    assert adapter or versions == {request.version}, f"weights of version {versions} instead of {request.version}"
    return ProbeScores(
        np.concatenate([np.asarray(request.input_ids, np.int32), new.output_ids]),
        len(text),
        np.concatenate([text, new.log_probs]),
        None if new.routes is None else new.routes[:, list(model.moe_layer_ids)],
    )


# Ends of responses at an SGLang server, including those that it reports as aborted.
#
# SGLang tests for an abort before an end (`Req.update_finish_state`, 0.5.23): if the last sampled token ends the
# response and an abort comes in the same step, the answer reports `abort`. It also searches stop texts only in the
# tokens of one request, so it misses one that spans an abort. If continued, such a response would grow beyond its end.

_STOP_TEXTS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Added tokens that end a response if a tokenizer has them (`attach_additional_stop_token_ids`)."""


def end_ids(checkpoint: Path | str, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end a response without being requested: those of config.json, generation_config.json and the tokenizer.

    Raises DataError if one of the files cannot be read.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(checkpoint) / name
        if path.is_file():
            with reading(DataError, str(path), "is not JSON with integer eos_token_ids", "download the file again"):
                found |= set(eos_ids(json.loads(path.read_text(encoding="utf-8"))))
    encoded = [tokenizer.encode(text, special_tokens=False) for text in _STOP_TEXTS]
    found |= {ids[0] for ids in encoded if len(ids) == 1}
    return frozenset(found if tokenizer.eos_token_id is None else found | {tokenizer.eos_token_id})


class Endings:
    """Detects the ends of interrupted responses.

    Args:
        ids: tokens that end a response.
        texts: stop texts that end a response, their last token included.
    """

    def __init__(self, ids: Collection[int], texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self._ids, self._texts, self._tokenizer = frozenset(ids), tuple(texts), tokenizer
        self._reach = max((len(text.encode()) for text in texts), default=0)  # in tokens: each has a byte at least

    def settled(self, before: NDArray[np.int32], result: GenerateResult) -> GenerateResult:
        """The answer as if the earlier response and its tokens belonged to one request.

        Args:
            before: [m] earlier tokens of the response.
        """
        n = len(result.output_ids)
        if n == 0:
            return result
        added = result.output_ids.tolist()
        tail = before[-self._reach :].tolist() if self._reach else []
        for end in range(1, min(len(added), self._reach) + 1) if tail else ():
            if self._in([*tail, *added[:end]]):  # new tokens complete a stop text that begins in the old ones
                return head(result, end)
        if result.finish == "abort" and (added[-1] in self._ids or (self._texts and self._in(added[-self._reach :]))):
            return dataclasses.replace(result, finish="stop")
        return result

    def _in(self, ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(ids, special_tokens=True)
        return any(stop in text for stop in self._texts)


def head(result: GenerateResult, n: int) -> GenerateResult:
    """The first `n` tokens of an answer, as if it had ended with them; n >= 1."""
    cut = len(result.output_ids) - n
    return dataclasses.replace(
        result,
        output_ids=result.output_ids[:n],
        log_probs=result.log_probs[:n],
        finish="stop",
        versions=tuple((version, start, min(end, n)) for version, start, end in result.versions if start < n),
        routes=None if result.routes is None else result.routes[: len(result.routes) - cut],
        supports=None if result.supports is None else result.supports.first(n),
        text="",
    )

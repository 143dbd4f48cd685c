"""Checks of an engine's features before a run depends on them.

Two kinds of checks: the routes and request fields that the server declares (its OpenAPI schema), and small real
requests whose answers must have the right shape. The first missing feature ends the handshake with an EngineError that
names it, so a run does not fail later on wrong data.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mslime.backends.cpu.sglang import SGLANG_VERSION
from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult, ScoreRequest
from mslime.config.base import Half, PauseMode
from mslime.config.errors import CheckpointError, EngineError
from mslime.config.model_facts import ModelFacts, language_model, read_hf_config
from mslime.config.resolved import ServedLora
from mslime.data.tokenizer import Tokenizer, first_difference, probe_texts

PROBE_PROMPT = (1, 2, 3)
PROBE_TOKENS = 2


@dataclass(frozen=True)
class EngineNeeds:
    """Features that a run needs from its engines.

    Attributes:
        routes: routed experts (`train.replay: r3`).
        architectures: of the trained checkpoint's config.json; empty if unknown.
        dtype: in which weights will be sent, as torch names it; empty for any.
        checkpoint_dtype: dtype in the checkpoint's config.json, which the server uses for `auto`.
        lora: adapters served from directories; None: none.
        memory: that they release their memory (`cluster.placement: colocated`).
        truncation: top_p, top_k and min_p of draws whose sampling masks are trained; empty for unrestricted ones.
    """

    routes: bool
    architectures: tuple[str, ...] = ()
    dtype: str = ""
    checkpoint_dtype: str | None = None
    memory: bool = False
    lora: ServedLora | None = None
    truncation: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class DeclaredFeature:
    """A feature declared in the server's schema: a POST route, and fields or choices of its body."""

    feature: str
    route: str
    fields: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


DECLARED: tuple[DeclaredFeature, ...] = (
    DeclaredFeature("log-probs", "/generate", ("input_ids", "return_logprob", "rid")),
    DeclaredFeature("routed experts", "/generate", ("return_routed_experts", "routed_experts_start_len")),
    DeclaredFeature("sampling mask", "/generate", ("return_sampling_mask",)),
    DeclaredFeature("cache keys", "/generate", ("extra_key",)),
    DeclaredFeature("abort", "/abort_request", ("rid", "abort_all")),
    DeclaredFeature("pause modes", "/pause_generation", ("mode",), get_args(PauseMode)),
    DeclaredFeature("resume", "/continue_generation"),
    # Not tested: the end of a session processes the weights again, and corrupts quantised ones that were not loaded.
    DeclaredFeature("weight-update sessions", "/begin_weight_update"),
    DeclaredFeature("weight-update sessions", "/end_weight_update"),
    DeclaredFeature("weight groups", "/init_weights_update_group", ("master_address", "rank_offset", "group_name")),
    DeclaredFeature(
        "flattened buckets", "/update_weights_from_distributed", ("names", "dtypes", "shapes", "load_format")
    ),
    DeclaredFeature("weight versions", "/update_weight_version", ("new_version", "abort_all_requests")),
    DeclaredFeature("weight checksums", "/weights_checker"),
)


async def handshake(client: EngineClient, needs: EngineNeeds) -> int:
    """Check one engine, which must be idle. Raises EngineError naming the first missing feature.

    Args:
        client: must know its model if `needs.routes` is set.
        needs: features that the run needs.

    Returns:
        The smallest number of input tokens that it rejects.
    """
    with client.reading("handshake"):
        roles = ("null",) if len(client.servers) == 1 else get_args(Half)
        limit = min([await _check_server(*each, needs) for each in zip(client.servers, roles, strict=True)])
        await _probe(client, "log-probs", _probe_log_probs)
        if needs.routes:
            await _probe(client, "routed experts", _probe_routes)
        if needs.truncation:
            await _probe(client, "sampling mask", partial(_probe_supports, truncation=needs.truncation))
        if needs.memory:
            await _probe(client, "memory release", _probe_memory)
        await _probe(client, "pause modes", _probe_pause_modes)
        return limit


async def _check_server(client: EngineClient, role: str, needs: EngineNeeds) -> int:
    """Check a server's own description, before it generates anything; see `handshake`.

    Args:
        role: its role in a pair; `null`: it is not in one.
    """
    if client.identity and (found := (await client.model_info()).get("served_model_name")) != client.identity:
        raise client.error(
            f"serves {found!r}", f"another server answers on its port; the run's serves the name {client.identity!r}"
        )
    info = await client.server_info()
    if info.get("version") != SGLANG_VERSION:
        raise _missing(client, f"sglang {SGLANG_VERSION}", f"it runs {info.get('version')}")
    served_dtype = str(info.get("dtype", "auto"))  # resolved as by SGLang (model_config.py: `_get_and_verify_dtype`)
    if served_dtype == "auto":
        served_dtype = "float16" if needs.checkpoint_dtype in (None, "float32") else needs.checkpoint_dtype
    served_dtype = {"half": "float16", "float": "float32"}.get(served_dtype, served_dtype)
    if needs.dtype and served_dtype != needs.dtype:
        raise _missing(
            client, f"weights in {needs.dtype}", f"it has them in {served_dtype}: start it with --dtype {needs.dtype}"
        )
    schema = await client.openapi()
    for declared in DECLARED:
        _check_declared(client, declared, schema)
    model = await client.model_info()
    if (found := model.get("disaggregation_mode") or "null") != role:
        # A request without a pair is refused (managers/scheduler.py), or with the transfer backend `fake` waits until
        # the probe's deadline. So the role is read before anything is generated.
        raise _missing(
            client, "prefill and decode in one server" if role == "null" else f"{role} for the other half of a pair",
            f"it is one half of a pair: start it without --disaggregation-mode {found}" if role == "null" else
            f"it was started with --disaggregation-mode {found}",
        )  # fmt: skip
    served = tuple(model.get("architectures") or ())
    if needs.architectures and served != needs.architectures:
        raise _missing(client, f"the model {', '.join(needs.architectures)}", f"it serves {', '.join(served)}")
    await client.version()
    if needs.routes and not info.get("enable_return_routed_experts"):
        raise _missing(client, "routed experts", "it was started without --enable-return-routed-experts")
    # A min-p draw with a seed, which such a server sets for every request, crashes it (layers/sampler.py).
    if needs.truncation.get("min_p") and info.get("enable_deterministic_inference"):
        raise _missing(client, "min-p draws", "it was started with --enable-deterministic-inference")
    if needs.lora is not None and (lacks := _lacks_adapters(needs.lora, info)):
        raise _missing(client, "adapters", lacks)
    limit = info.get("max_req_input_len")
    if not isinstance(limit, int) or limit < 1:
        raise _missing(client, "longest input", f"/server_info returns max_req_input_len = {limit!r}")
    return limit


def _lacks_adapters(lora: ServedLora, info: Mapping[str, Any]) -> str:
    """Missing server options for these adapters; empty if none."""
    if not info.get("enable_lora"):
        return "it was started without --enable-lora"
    if (info.get("max_lora_rank") or 0) < lora.rank:
        return f"it was started with --max-lora-rank {info.get('max_lora_rank')}, and adapters have rank {lora.rank}"
    targets = set(info.get("lora_target_modules") or ())
    if "all" not in targets and (absent := sorted({*lora.modules} - targets)):
        return f"its --lora-target-modules lack {', '.join(absent)}"
    if (most := info.get("max_loaded_loras")) is not None and most <= lora.alive:
        return f"it was started with --max-loaded-loras {most}, and {lora.alive + 1} are loaded at once"
    if bool(info.get("experts_shared_outer_loras")) != lora.shares_outer:
        return f"it was started with{'out' * lora.shares_outer} --experts-shared-outer-loras"
    return ""


def _missing(client: EngineClient, feature: str, found: str) -> EngineError:
    return client.error(f"without {feature}", f"mslime needs the engine feature {feature!r}, but {found}")


def _check_declared(client: EngineClient, declared: DeclaredFeature, schema: Mapping[str, Any]) -> None:
    operations = schema.get("paths", {}).get(declared.route)
    if operations is None:
        raise _missing(client, declared.feature, f"it has no route {declared.route}")
    operation = operations.get("post") or next(iter(operations.values()))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if (reference := body.get("$ref")) is not None:
        body = schema["components"]["schemas"][reference.rpartition("/")[2]]
    body = body.get("properties", {})
    absent = [name for name in declared.fields if name not in body]
    if absent:
        raise _missing(client, declared.feature, f"{declared.route} does not accept {', '.join(absent)}")
    known = body.get("mode", {}).get("enum", [])
    lacking = [choice for choice in declared.choices if choice not in known]
    if lacking:
        raise _missing(client, declared.feature, f"{declared.route} does not support {', '.join(lacking)}")


async def _probe(client: EngineClient, feature: str, probe: Callable[[EngineClient], Awaitable[str]]) -> None:
    """Run one real request; `probe` returns the fault, or an empty string.

    An idle engine that does not answer within the silence deadline hangs; a run's responses have `engine_request_s`.
    """
    silence_s = client.deadlines.engine_silence_s
    try:
        async with asyncio.timeout(silence_s):
            wrong = await probe(client)
    except TimeoutError:
        wrong = f"a small request was not answered within {silence_s:g} s"
    except EngineError as error:
        raise _missing(client, feature, f"a small request failed: {error.rule}") from error
    if wrong:
        raise _missing(client, feature, wrong)


async def _generate(client: EngineClient, **options: Any) -> GenerateResult:
    rid = f"handshake-{client.name}-{secrets.token_hex(8)}"  # a killed run's request may still be there
    request = GenerateRequest(rid, PROBE_PROMPT, PROBE_TOKENS, ignore_eos=True, **options)
    return await client.generate(request)


async def _probe_log_probs(client: EngineClient) -> str:
    result = await _generate(client)
    complete = len(result.output_ids) == PROBE_TOKENS and (result.log_probs < 0).any()
    return "" if complete else f"{PROBE_TOKENS} tokens came back as {result.output_ids} with {result.log_probs}"


async def _probe_routes(client: EngineClient) -> str:
    assert client.model is not None, "give the client its model"
    result = await _generate(client, want_routes=True, routes_start=1)
    rows = len(PROBE_PROMPT) + PROBE_TOKENS - 2
    expected = (rows, client.model.num_layers, client.model.top_k)
    got = None if result.routes is None else result.routes.shape
    return "" if got == expected else f"routes came back as {got} instead of {expected}"


async def _probe_supports(client: EngineClient, truncation: Mapping[str, Any]) -> str:
    """A draw with the run's truncation; the parser checks the answer."""
    result = await _generate(client, **truncation)
    complete = len(result.output_ids) == PROBE_TOKENS and result.supports is not None
    return "" if complete else f"{PROBE_TOKENS} tokens came back as {result.output_ids} with {result.supports}"


async def _probe_memory(client: EngineClient) -> str:
    released = (await client.released_memory()).tags
    return f"it has released {', '.join(sorted(released))}" if released else ""


async def _probe_pause_modes(client: EngineClient) -> str:
    for mode in get_args(PauseMode):
        await client.pause(mode)
        paused = not await client.ready()
        await client.resume()
        if not paused:
            return f"mode {mode} did not pause it"
    return "" if await client.ready() else "it did not resume after the pause"


# Checks of a teacher's server before a run depends on it: it must have the student's tokens, and score them.
#
# A token id beyond a model's vocabulary crashes an SGLang server, so the number of the teacher's embedding rows must be
# known. Its tokenizer must be the student's, because log-probs of other tokens would silently train on nonsense.

_PROBE = (1, 2, 3, 4)


async def connect_teacher(client: EngineClient, tokenizer: Tokenizer, vocab_size: int, longest: int) -> None:
    """Check one server, and set the number of its embedding rows in its client.

    Args:
        tokenizer, vocab_size: of the student; rows of its embedding.
        longest: tokens of a sequence that the teacher must be able to score.

    Raises:
        EngineError: the server is unreachable, has other or too few tokens, too short a context, or no scores.
    """
    with client.reading("handshake"):
        info = await client.server_info()
        rows = embedding_rows(Path(str(info.get("model_path", ""))))
        if rows is not None and rows < vocab_size:
            raise EngineError(
                client.name, f"a vocabulary of {rows}",
                f"the teacher embeds fewer token ids than the student, which may sample any of {vocab_size}",
                "use a teacher of the student's family",
            )  # fmt: skip
        await _compare_tokenizers(client, tokenizer)
        # If its checkpoint is not readable here, it embeds at least its tokenizer's tokens, which are the student's.
        rows = rows or tokenizer.vocab_size
        client.model = ModelFacts(
            vocab_size=rows, max_positions=longest, num_layers=0, moe_layer_ids=(), num_experts=0, top_k=0
        )
        limit = info.get("max_req_input_len")
        if isinstance(limit, int) and longest >= limit:
            raise EngineError(
                client.name, f"at most {limit - 1} tokens",
                f"the teacher must score sequences of {longest} tokens",
                "start it with a longer context, or lower rollout.max_response_tokens or rollout.max_total_tokens",
            )  # fmt: skip
        scores = await client.score(ScoreRequest(f"handshake-{client.name}-{secrets.token_hex(8)}", _PROBE))
        if not (np.count_nonzero(scores) and scores[0] == 0):
            raise client.error("scores", f"{len(_PROBE)} tokens have invalid scores: {scores.tolist()}")


def embedding_rows(checkpoint: Path) -> int | None:
    """Embedding rows of a checkpoint's model; None if its config.json cannot be read on this machine."""
    try:
        config = read_hf_config(checkpoint)
    except CheckpointError:
        return None
    return int(language_model(config)["vocab_size"])


async def _compare_tokenizers(client: EngineClient, tokenizer: Tokenizer) -> None:
    texts = probe_texts(tokenizer)
    try:
        theirs = await client.tokenize(texts)
    except EngineError as error:
        raise client.error("/tokenize", f"its tokenizer cannot be compared with the student's: {error.rule}") from error
    different = first_difference(texts, [tokenizer.encode(text, special_tokens=False) for text in texts], theirs)
    if different:
        raise EngineError(
            client.name,
            "its tokenizer",
            f"a teacher needs the student's tokenizer, but {different}",
            "use a teacher of the student's family, with its tokenizer",
        )

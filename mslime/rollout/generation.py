"""One request: send a sample's tokens to an engine and add the result to the sample.

A continuation sends all tokens so far and requests the missing routes. Data in a sample is never overwritten: old
tokens keep the log-probs, routes and versions of the weights that sampled them.

A request carries its weight version in the key of the engine's prefix cache. Prefixes of older weights are therefore
not reused, even if the cache outlives a weight update (`pause_mode: in_place`).
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mslime.backends.sglang.client import EngineBusy, EngineDied
from mslime.backends.sglang.generating import Endings, Finish, GenerateRequest, GenerateResult
from mslime.config.base import ReplayMode
from mslime.config.data import EvalSetConfig
from mslime.config.errors import EngineError, reading
from mslime.config.model_facts import ModelFacts
from mslime.config.rollout import RolloutConfig
from mslime.config.schema import RunConfig
from mslime.data.routes import Routes
from mslime.data.sample import Sample
from mslime.data.tokenizer import Tokenizer, begins_with_blank, encode_after
from mslime.rollout.agents.messages import whole_text
from mslime.rollout.request_slots import RequestSlots


class Engines(Protocol):
    """Engines with load balancing: `backends.sglang.engine_pool.EnginePool`, or scripted replies."""

    @property
    def clients(self) -> Sequence[object]:
        """All engines, dead ones included."""
        ...

    @property
    def dead(self) -> Mapping[str, EngineError]:
        """Engines that died, by name."""
        ...

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Continue a sequence on one engine. Raises EngineDied if it died meanwhile, EngineError if it refused."""
        ...


def living(engines: Engines) -> int:
    """Engines that are alive."""
    return len(engines.clients) - len(engines.dead)


@dataclass(frozen=True)
class EngineLimits:
    """Limits at which engines end a sequence, besides the model's own length.

    Attributes:
        refused_input: an engine refuses to continue this many tokens, or more (6 fewer than its context holds).
        end_ids: tokens that end a response at the engines.
    """

    refused_input: int = sys.maxsize
    end_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of responses.

    Attributes:
        max_response_tokens: limit for the model's tokens in a sample, over all turns and continuations.
        max_total_tokens: prompt and response together.
        want_routes: request routed experts.
        refused_input: see `EngineLimits`.
        top_p, top_k, min_p: truncation of the vocabulary (`GenerateRequest`).
    """

    temperature: float
    top_p: float
    top_k: int
    max_response_tokens: int
    max_total_tokens: int
    want_routes: bool
    refused_input: int = sys.maxsize
    min_p: float = 0.0

    @classmethod
    def for_training(cls, r: RolloutConfig, replay: ReplayMode, model: ModelFacts, limits: EngineLimits) -> Sampling:
        """Parameters of `rollout`; with routes if they are replayed."""
        total = r.longest(model.max_positions)
        routes = model.sends_routes(replay)
        return cls(
            r.temperature, r.top_p, r.top_k, r.max_response_tokens, total, routes, limits.refused_input, r.min_p
        )  # fmt: skip

    @classmethod
    def for_evaluation(
        cls, rollout: RolloutConfig, model: ModelFacts, limits: EngineLimits, eval_set: EvalSetConfig
    ) -> Sampling:
        """Parameters of the held-out set; draws from the whole vocabulary, without routes."""
        total = rollout.longest(model.max_positions)
        length = eval_set.max_response_tokens or rollout.max_response_tokens
        return cls(eval_set.temperature, 1.0, -1, length, total, False, limits.refused_input)

    @property
    def longest_input(self) -> int:
        """Sequences of this many tokens, or more, cannot be continued."""
        return min(self.max_total_tokens, self.refused_input)

    def room(self, sample: Sample) -> int:
        """Tokens that may still be added to `sample`; 0 if no engine would accept its present tokens."""
        if len(sample) >= self.longest_input:
            return 0
        return min(self.max_response_tokens - sample.sampled_tokens, self.max_total_tokens - len(sample))


class Traffic:
    """Requests of one purpose.

    Attributes:
        open: whether new requests may be sent.
        in_flight: requests at the engines now.
    """

    def __init__(self, open: bool = False) -> None:
        self.open = open
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self, seconds: float | None) -> bool:
        """Wait until no request is at an engine, at most `seconds`; returns whether there is none."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # Python 3.11's wait_for can lose a cancellation
                await self._idle.wait()
        return self._idle.is_set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request at an engine for the duration of the block."""
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()


class Generator:
    """Sends samples to engines.

    Args:
        config: `rollout`, `seed` and `deadlines` are read.
        version: the weight version that the engines serve now; an answer never names a newer one, or one older than its
            request.
        on_request: called with (engine, start, end) of every answered request, seconds since the epoch.
        adapter: adapter of its requests if there are several; otherwise empty. Each adapter has its own engine
            sessions.
        slots: makes the context in which a request is sent. None: limit to the number that the current engines run at
            once.

    Attributes:
        ready: cleared while the engines must not receive requests (a weight update).
        cached_tokens: prompt tokens that engines found in their prefix caches, over answered requests.
    """

    def __init__(
        self,
        config: RunConfig,
        engines: Engines,
        tokenizer: Tokenizer,
        model: ModelFacts,
        limits: EngineLimits,
        version: Callable[[], int],
        on_request: Callable[[str, float, float], None],
        adapter: str = "",
        slots: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    ) -> None:
        self._config, self._engines, self._tokenizer, self._model = config, engines, tokenizer, model
        self._version, self._on_request, self._adapter = version, on_request, adapter
        self._moe_layers = as_slice(model.moe_layer_ids)
        self._end_ids, self._stop = limits.end_ids | set(config.rollout.stop_token_ids), tuple(config.rollout.stop)
        self._endings = Endings(self._end_ids, self._stop, tokenizer)
        self._blank = begins_with_blank(tokenizer)
        self._slots = slots or partial(
            RequestSlots(lambda: config.rollout.concurrency * max(len(engines.clients), 1), {"": 1.0}).of, ""
        )
        self._run = uuid.uuid4().hex[:8]  # attached engines may still hold requests of another run
        self._numbers = itertools.count()
        self.cached_tokens = 0
        self.ready = asyncio.Event()
        self.ready.set()

    async def advance(
        self,
        sample: Sample,
        sampling: Sampling,
        session: str,
        traffic: Traffic,
        *,
        start: int,
        most: int | None = None,
        stop: tuple[str, ...] = (),
    ) -> tuple[int, Finish | None]:
        """Continue `sample` by one request.

        Args:
            session: requests of one session prefer one engine.
            traffic: the traffic to which the request belongs; if closed, the sample stays unchanged.
            start: first token of the turn that is continued.
            most: tokens to add; fewer if the sample has less room.
            stop: texts that end the turn, in addition to those of the configuration.

        Returns:
            Number of tokens added to the sample, and why the request ended; None if nothing was sent.

        Raises:
            EngineError: no engine is left, or the last one tried refused; the sample keeps its tokens.
        """
        async with self._slots():
            room = sampling.room(sample) if most is None else min(most, sampling.room(sample))
            if room <= 0:
                return 0, "length"
            if sampling.want_routes and sample.routes is None:
                sample.routes = Routes.empty(self._model.moe_layer_ids, self._model.top_k, self._model.num_experts)
            oldest = self._version()
            result = await self._answer(self._compose(sample, sampling, room, session, stop), traffic)
        if result is None:
            return 0, None
        self.cached_tokens += result.cached_tokens
        endings = self._endings if not stop else Endings(self._end_ids, self._stop + stop, self._tokenizer)
        which = f"group {sample.group_id}, response {sample.index}"
        with reading(EngineError, result.engine, f"{which}: an inconsistent answer", "read the engine's log"):
            settled = endings.settled(sample.tokens[start:], result)
            if len(settled.output_ids):
                versions = [version for version, _, _ in settled.versions]
                possible = oldest <= min(versions) and max(versions) <= self._version()
                assert possible, f"weight versions {versions}, when {oldest} to {self._version()} were served"
                sample.extend(
                    settled.output_ids,
                    log_probs=settled.log_probs,
                    versions=settled.versions,
                    engine=settled.engine,
                    routes=None if settled.routes is None else settled.routes[:, self._moe_layers],
                    supports=settled.supports,
                )
            sample.aborts += settled.finish == "abort"
            return len(settled.output_ids), settled.finish

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the model: token ids are below it."""
        return self._model.vocab_size

    def encode(self, text: str, after: int | None = None) -> list[int]:
        """Token ids of a text that follows the token `after`, if given."""
        text = whole_text(text)
        if after is None or not self._blank:
            return self._tokenizer.encode(text, special_tokens=False)
        return encode_after(self._tokenizer, after, text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self._tokenizer.decode(tokens)

    def _compose(
        self, sample: Sample, sampling: Sampling, room: int, session: str, stop: tuple[str, ...]
    ) -> GenerateRequest:
        """The request that continues `sample` by at most `room` tokens."""
        return GenerateRequest(
            rid=f"{self._run}-{session}-{sample.index}-{next(self._numbers)}",
            input_ids=sample.tokens,
            max_new_tokens=room,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop=self._stop + stop,
            stop_token_ids=tuple(self._config.rollout.stop_token_ids),
            seed=zlib.crc32(f"{self._config.seed}/{session}/{sample.index}/{len(sample)}".encode()) & 0x7FFFFFFF,
            want_routes=sampling.want_routes,
            routes_start=len(sample.routes) if sampling.want_routes and sample.routes is not None else 0,
            session_id=f"{self._adapter}/{session}" if self._adapter else session,
            adapter=self._adapter,
        )

    async def _answer(self, request: GenerateRequest, traffic: Traffic) -> GenerateResult | None:
        """Send a request and return the answer; if its engine dies, try another. None if `traffic` closed before it was
        sent. Raises EngineError if an engine refused or stays too busy, or none is left."""
        patience = time.monotonic() + self._config.deadlines.engine_request_s
        pauses = itertools.chain((0.1, 0.2, 0.5, 1.0, 2.0), itertools.repeat(5.0))
        while True:  # ends: every death leaves one engine less, and waiting for busy ones has a deadline
            await self.ready.wait()
            if not traffic.open:
                return None
            version = self._version()
            try:
                start = time.time()
                with traffic.request():  # the engine client enforces the deadline
                    result = await self._engines.generate(replace(request, cache_key=f"{self._run}-{version}"))
                self._on_request(result.engine, start, time.time())
                if not self._reused_older(result, version):
                    return result
            except EngineDied:
                if living(self._engines) == 0:
                    raise
            except EngineBusy:
                if time.monotonic() > patience:
                    raise
                await asyncio.sleep(next(pauses))

    def _reused_older(self, result: GenerateResult, sent: int) -> bool:
        """Whether the answer to a request of version `sent` was computed by newer weights on a cached prefix of older
        ones. The request was in transit or queued at the engine while the weights changed and the cache was kept."""
        kept = self._config.rollout.pause_mode == "in_place" and not self._config.syncs_adapters
        return kept and result.cached_tokens > 0 and bool(result.versions) and result.versions[0][0] > sent


def as_slice(layers: Sequence[int]) -> slice | NDArray[np.intp]:
    """Index that selects these layers: a slice, without a copy, if they are consecutive, as in most models."""
    if not layers:
        return slice(0, 0)
    span = range(layers[0], layers[-1] + 1)
    return slice(span.start, span.stop) if list(layers) == list(span) else np.asarray(layers, np.intp)


# A group's rollouts reach the engines through its gate, which is open while the group runs and its traffic is open.
# If it is closed, `generate` blocks until the group is continued.


class GroupGate:
    """Gate that blocks a group's `generate` calls while the group is interrupted.

    Attributes:
        admitted: the group runs; otherwise it rests.
        moved: set whenever a rollout of the group starts or stops waiting or working.
    """

    def __init__(self, traffic: Traffic, admitted: bool = False) -> None:
        self.traffic, self.admitted = traffic, admitted
        self.moved, self._next = asyncio.Event(), asyncio.Event()

    @property
    def open(self) -> bool:
        """Whether a request may be sent."""
        return self.admitted and self.traffic.open

    def admit(self) -> None:
        """Open the gate and wake the waiting rollouts."""
        self.admitted = True
        self._next.set()
        self._next = asyncio.Event()

    async def next_admission(self) -> None:
        """Wait until the group is continued."""
        await self._next.wait()

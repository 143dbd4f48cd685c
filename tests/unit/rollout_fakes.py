"""Engines, scorers and prompts that only pretend, to provoke orders of events that real ones show too rarely."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mslime.backends.sglang.client import EngineDied
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult, ScoreRequest
from mslime.config.errors import EngineError
from mslime.config.loader import build
from mslime.config.model_facts import ModelFacts
from mslime.config.schema import RunConfig
from mslime.data.sample import Sample
from mslime.data.source import open_prompts
from mslime.rollout.generation import EngineLimits
from mslime.rollout.service import RolloutService
from tests.fixtures.model_facts import model_facts
from tests.fixtures.service_of_one import ServiceOfOne
from tests.fixtures.supports import supports_of

LAYERS, MOE_LAYERS, TOP_K, EXPERTS = 4, (1, 3), 2, 8
MODEL = model_facts(max_positions=256, moe_layer_ids=MOE_LAYERS, num_experts=EXPERTS, top_k=TOP_K)


PASSES = 16
"""Passes of the event loop that make a tick: more than the service needs between two events."""


async def ticks(count: int) -> None:
    """Let the engines generate so many tokens. No clock is asked, so a busy machine changes nothing."""
    for _ in range(count * PASSES):
        await asyncio.sleep(0)


class FakeTokenizer:
    """One token per character."""

    eos_token_id = 0
    vocab_size = 200

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    special_ids = frozenset({0})

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def marks(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        return None

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return " ".join(str(i) for i in ids)

    def for_thread(self) -> Any:
        return self


class FakeSpacedTokenizer(FakeTokenizer):
    """Begins every text with a blank, as SentencePiece does."""

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        return super().encode(" " + text, special_tokens=special_tokens)


def support_at(position: int, version: int) -> list[int]:
    """Ids that `FakeSlowEngine` draws the token at a position from, under weights of a version."""
    return [100 + position, version, 50 + position % 7][: 2 + position % 2]


class FakeSlowEngine:
    """Generates one token a tick, until a turn has a length that depends on the prompt and the sample alone. A turn
    begins after the last token below 100.

    The token at position t is 100 + t, its log-prob -t/1000 - version, its experts (t + layer) % 8 and (t + 1) % 8, so
    that a test can tell what was kept and what was made again. A restricted draw is from `support_at` of its position.

    Attributes:
        lengths: (group number, sample index) -> response length.
        requests: everything that was asked, in order.
        at_work: of requests that are not answered yet, by id: versions of the tokens so far, and how many tokens are
            still to come.
    """

    def __init__(self, lengths: Callable[[str, int], int]) -> None:
        self.lengths = lengths
        self.version = 0
        self.clients: list[object] = [self]
        self.dead: dict[str, EngineError] = {}
        self.requests: list[GenerateRequest] = []
        self.at_work: dict[str, tuple[list[int], int]] = {}
        self.most_running = self.running = 0
        self.paused: str | None = None
        self.flushes = 0
        self._aborts = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._generate(request)
        finally:
            self.running -= 1
            self.at_work.pop(request.rid, None)

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        _, *group, index, _ = request.rid.split("-")
        start, aborts = len(request.input_ids), self._aborts
        turn = next((i for i in range(start, 0, -1) if request.input_ids[i - 1] < 100), 0)
        goal = turn + self.lengths("-".join(group), int(index))
        versions: list[int] = []
        while start + len(versions) < goal and len(versions) < request.max_new_tokens and aborts == self._aborts:
            await ticks(1)
            await self.before_token(request)
            if self.paused is None and aborts == self._aborts:
                versions.append(self.version)
            self.at_work[request.rid] = versions, goal - start - len(versions)
        done = "stop" if start + len(versions) == goal else "length"
        return self._result(request, versions, "abort" if aborts != self._aborts else done)

    async def before_token(self, request: GenerateRequest) -> None:
        """For those that die."""

    def _result(self, request: GenerateRequest, versions: list[int], finish: Any) -> GenerateResult:
        start, n = len(request.input_ids), len(versions)
        positions = np.arange(start, start + n)
        log_probs = (-positions / 1000 - np.asarray(versions)).astype(np.float32)
        edges = [i for i in range(n) if i == 0 or versions[i] != versions[i - 1]]
        spans = tuple((versions[a], a, b) for a, b in zip(edges, [*edges[1:], n], strict=True)) if n else ()
        routes = None
        if request.want_routes:
            t = np.arange(request.routes_start, start + n - 1)[:, None]
            first = (t + np.arange(LAYERS)) % EXPERTS
            routes = np.stack([first, np.broadcast_to((t + 1) % EXPERTS, first.shape)], -1).astype(np.int32)
            routes[:, [0, 2]] = 0  # dense layers
        ids = (100 + positions).astype(np.int32)
        kept = [support_at(start + i, versions[i]) for i in range(n)]
        supports = supports_of(kept) if request.restricted else None
        return GenerateResult(ids, log_probs, finish, spans, routes if n else None, supports, 0, "", "fake")

    async def abort(self, owner: str = "") -> None:
        self._aborts += 1

    def give_up(self, since: float) -> None: ...

    async def pause(self, mode: str) -> None:
        self.paused = mode

    async def resume(self) -> None:
        self.paused = None

    async def flush_cache(self) -> None:
        self.flushes += 1


class FakeDyingEngines(FakeSlowEngine):
    """Two engines, of which one dies at the `deaths`-th token, and the other at the second number, if there is one."""

    def __init__(self, lengths: Callable[[str, int], int], deaths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.clients = [self, self]
        self._deaths, self._tokens = list(deaths), 0

    async def before_token(self, request: GenerateRequest) -> None:
        self._tokens += 1
        if self._deaths and self._tokens >= self._deaths[0]:
            self._deaths.pop(0)
            name = f"fake {len(self.dead)}"
            self.dead[name] = EngineDied(name, request.rid, "was told to die", "do not tell it")
            raise self.dead[name]
        if len(self.dead) == 2:
            raise self.dead["fake 1"]


class FakeTeacher:
    """Servers of a teacher in whose opinion token t has log-prob -t/100; they fail when told to.

    Attributes:
        failures: errors to be raised by the next calls, one each.
        requests: everything that was asked, in order.
    """

    def __init__(self, failures: Sequence[EngineError] = (), servers: int = 1) -> None:
        self.failures, self.alive = list(failures), servers
        self.requests: list[ScoreRequest] = []

    def __len__(self) -> int:
        return self.alive

    async def score(self, request: ScoreRequest) -> NDArray[np.float32]:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.failures:
            error = self.failures.pop(0)
            self.alive -= isinstance(error, EngineDied)
            raise error
        t = np.arange(len(request.input_ids))
        return np.where(t < request.start, 0, -t / 100).astype(np.float32)


class FakeScorer:
    """Rewards by a function of the sample."""

    per_group = False

    def __init__(self, reward: Callable[[Sample], float | None] = lambda s: float(s.index % 2)) -> None:
        self.reward = reward
        self.scored = 0

    async def score(self, sample: Sample) -> float | None:
        self.scored += 1
        await asyncio.sleep(0)
        return self.reward(sample)

    async def score_group(self, samples: Sequence[Sample]) -> list[float | None]:
        return [await self.score(sample) for sample in samples]


def write_prompts(path: Path, count: int = 40) -> Path:
    """JSONL prompts `P0`, `P1`, ... with labels."""
    path.write_text("".join(json.dumps({"prompt": f"P{i}", "label": str(i)}) + "\n" for i in range(count)))
    return path


def run_config(directory: Path, **rollout: Any) -> RunConfig:
    """A small run over `prompts.jsonl` in `directory`; keywords go to `rollout`, `deadlines` to its own section."""
    deadlines = rollout.pop("deadlines", {"rollout_step_s": 20, "engine_control_s": 5})
    settings = {"groups_per_step": 4, "group_size": 2, "max_response_tokens": 64, **rollout}
    return build({
        "model": {"path": str(directory)},
        "data": {"prompts": [str(write_prompts(directory / "prompts.jsonl"))], "shuffle": False},
        "rollout": settings,
        "train": {"quadratic_tokens": 24576},
        "deadlines": deadlines,
    })  # fmt: skip


def make_service(
    config: RunConfig,
    engines: FakeSlowEngine,
    scorer: Any = None,
    version: int = 0,
    model: ModelFacts = MODEL,
    limits: EngineLimits | None = None,
    tokenizer: FakeTokenizer | None = None,
    **hooks: Any,
) -> ServiceOfOne:
    """A service over pretended engines, at `version`."""
    tokenizer = tokenizer or FakeTokenizer()
    source = open_prompts(config.data, config.seed, tokenizer)
    service = ServiceOfOne(
        config, engines, source, tokenizer, scorer or FakeScorer(), model, limits or EngineLimits(), **hooks
    )
    service.version = service.manager.tracker.version = engines.version = version
    return service


async def publish(service: RolloutService, engines: FakeSlowEngine, version: int) -> None:
    """What the loop does after a training step."""
    await service.pause_for_update()
    engines.version = version
    await service.resume_after_update(version)


def short(group: str, index: int) -> int:
    """Tokens of a response; for an engine's `lengths`."""
    return 3 + index


def uneven(group: str, index: int) -> int:
    """Every third group is ten times longer."""
    return (40 if int(group[1:]) % 3 == 2 else 4) + index

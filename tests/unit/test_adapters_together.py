"""Rollout services of several adapters over the same engines: named stand-ins of servers, and nothing is trained.

Whatever the order of events: every adapter's ledger accounts for each of its tokens, each token is of the version that
was its adapter's when it was sampled, and an adapter that stands still holds up no other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mslime.backends.sglang.client import EngineClient
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.serving_adapters import AdapterVersion
from mslime.config.loader import build
from mslime.config.schema import RunConfig
from mslime.data.sample import Sample
from mslime.data.source import open_prompts
from mslime.rollout.generation import EngineLimits
from mslime.rollout.request_slots import RequestSlots
from tests.fixtures.model_facts import model_facts
from tests.fixtures.service_of_one import ServiceOfOne
from tests.unit.fake_engine import FakeEngine
from tests.unit.rollout_fakes import FakeScorer, FakeTokenizer, write_prompts

MODEL = model_facts(200, max_positions=256)
TOKEN_S = 0.001


class InterruptibleEngine(FakeEngine):
    """Takes a moment for each token, and returns what it has of a request that is aborted.

    Attributes:
        served: (adapter's name at the engine, request id) of every request.
        loaded: adapters that it has now.
        running_of: request ids by adapter, now; most: the most that ran at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.served, self.loaded = list[tuple[str, str]](), set[str]()
        self.most = 0
        self._ends: dict[str, asyncio.Event] = {}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name, rid, asked = body["lora_path"], body["rid"], body["sampling_params"]["max_new_tokens"]
        assert name in self.loaded, f"{name} is not loaded"
        self.served.append((name, rid))
        end = self._ends[rid] = asyncio.Event()
        self.most = max(self.most, len(self._ends))
        made = 0
        while made < asked and not end.is_set():
            await asyncio.sleep(TOKEN_S)
            made += 1
        del self._ends[rid]
        assert name in self.loaded, f"{name} was unloaded while a request had it"
        answer = self.answer(body | {"sampling_params": {"max_new_tokens": made}})
        answer["meta_info"]["finish_reason"] = {"type": "abort" if made < asked else "length"}
        return web.json_response(answer)

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json()
        match request.path:
            case "/abort_request":
                assert not body.get("abort_all"), "requests of all adapters would stop"
                if body["rid"] in self._ends:
                    self._ends[body["rid"]].set()
            case "/load_lora_adapter":
                self.loaded.add(body["lora_name"])
            case "/unload_lora_adapter":
                self.loaded.discard(body["lora_name"])
            case _:
                pass
        return web.json_response({"success": True})


def config_of(directory: Path, name: str, **rollout: Any) -> RunConfig:
    directory = directory / name
    directory.mkdir()
    return build({
        "name": name,
        "model": {"path": str(directory)},
        "data": {"prompts": [str(write_prompts(directory / "prompts.jsonl"))], "shuffle": False},
        "rollout": {"groups_per_step": 2, "group_size": 2, "max_response_tokens": 12, **rollout},
        "lora": {"rank": 4, "sync": "adapter"},
        "train": {"replay": "off", "quadratic_tokens": 24576},
        "algorithm": {"correction": {"preset": "tis"}},
        "deadlines": {"rollout_step_s": 25, "engine_control_s": 5},
    })  # fmt: skip


class Adapter:
    """One adapter's service and what the loop does with it."""

    def __init__(self, config: RunConfig, pool: EnginePool, slots: RequestSlots, scorer: FakeScorer) -> None:
        self.name, self.config, self.pool = config.name, config, pool
        tokenizer: Any = FakeTokenizer()
        self.service = ServiceOfOne(
            config, pool, open_prompts(config.data, config.seed, tokenizer), tokenizer,
            scorer, MODEL, EngineLimits(), adapter=config.name, slots=partial(slots.of, config.name),
        )  # fmt: skip
        self.steps, self.samples = 0, list[Sample]()

    async def publish(self, version: int) -> None:
        adapter = AdapterVersion(f"{self.name}-v{version}", version, Path("unused"), self.name)
        await self.service.pause_for_update()
        await self.pool.load_adapter(adapter, self.config.adapters_alive)
        await self.service.resume_after_update(version)

    async def loop(self, steps: int, chance: random.Random) -> None:
        await self.publish(0)
        pending = 0.0
        for step in range(steps):
            batch = await self.service.take(step)
            moved = {
                fate: batch.metrics[f"ledger/{fate}_tokens"] for fate in ("trained", "masked", "dropped", "pending")
            }
            assert pending + batch.metrics["ledger/generated_tokens"] == sum(moved.values()), self.name
            pending = moved["pending"]
            assert all(g.source.startswith(str(self.config.model.path)) for g in batch.groups)
            self.samples += batch.samples
            self.steps = step + 1
            await asyncio.sleep(chance.choice((0, 0.002, 0.02)))  # the trainer
            await self.publish(step + 1)


async def together(
    directory: Path, rollouts: dict[str, dict[str, Any]], scorers: dict[str, FakeScorer], engines: int,
    work: Callable[[dict[str, Adapter], list[InterruptibleEngine]], Any],
) -> None:  # fmt: skip
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(InterruptibleEngine()) for _ in range(engines)]
        pool = EnginePool([EngineClient(f.url, f"e{i}", model=MODEL) for i, f in enumerate(fakes)], 6)
        stack.push_async_callback(pool.close)
        slots = RequestSlots(lambda: 6 * len(pool), dict.fromkeys(rollouts, 1.0))
        adapters = {
            name: Adapter(config_of(directory, name, **rollout), pool, slots, scorers.get(name, FakeScorer()))
            for name, rollout in rollouts.items()
        }
        try:
            await work(adapters, fakes)
        finally:
            for adapter in adapters.values():
                await adapter.service.close()


def versions_of(sample: Sample) -> list[int]:
    return [segment.version for segment in sample.segments if segment.trainable]


@pytest.mark.parametrize("seed", range(4))
def test_every_adapters_books_and_versions_are_exact(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"max_staleness": 1, "max_response_tokens": 60},
        {"max_staleness": 2, "pause_mode": "in_place", "max_response_tokens": 30},
        {"max_staleness": 1, "group_size": 3, "over_sampling": 1.5, "dynamic_filter": "zero_variance"},
        {"over_sampling": 2.0, "max_response_tokens": 40},
    ]
    chosen = dict(zip("abcd", chance.sample(kinds, 4), strict=True))

    async def work(adapters: dict[str, Adapter], fakes: list[InterruptibleEngine]) -> None:
        await asyncio.gather(*(each.loop(4, random.Random(seed + i)) for i, each in enumerate(adapters.values())))
        for name, adapter in adapters.items():
            staleness = adapter.config.rollout.max_staleness
            spans = [span for sample in adapter.samples if (span := versions_of(sample))]
            assert all(span == sorted(span) and span[0] >= 0 and span[-1] < 4 for span in spans)
            if staleness == 0 and adapter.config.rollout.over_sampling == 1:
                assert all(len(span) == 1 for span in spans), "on-policy"
            of_it = {(n, rid) for fake in fakes for n, rid in fake.served if n.startswith(f"{name}-v")}
            assert of_it and all(f"-{name}/" not in rid for _, rid in of_it)
        assert all(fake.most <= 6 for fake in fakes)
        served = [n for fake in fakes for n, _ in fake.served]
        assert {n.partition("-")[0] for n in served} == set(adapters)

    asyncio.run(asyncio.wait_for(together(tmp_path, chosen, {}, 1 + seed % 2, work), 60))


def test_an_adapter_whose_rewards_never_come_holds_up_no_other(tmp_path: Path) -> None:
    class Stuck(FakeScorer):
        async def score(self, sample: Sample) -> float | None:
            await asyncio.Event().wait()
            return None

    async def work(adapters: dict[str, Adapter], fakes: list[InterruptibleEngine]) -> None:
        stuck = asyncio.create_task(adapters["stuck"].loop(1, random.Random(0)))
        await adapters["quick"].loop(5, random.Random(0))
        assert not stuck.done() and adapters["quick"].steps == 5
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)

    kinds: dict[str, dict[str, Any]] = {"stuck": {"groups_per_step": 30, "max_staleness": 1}, "quick": {}}
    asyncio.run(asyncio.wait_for(together(tmp_path, kinds, {"stuck": Stuck()}, 1, work), 60))


@pytest.mark.slow
def test_an_adapter_whose_responses_never_end_holds_up_no_other(tmp_path: Path) -> None:
    async def work(adapters: dict[str, Adapter], fakes: list[InterruptibleEngine]) -> None:
        endless = asyncio.create_task(adapters["endless"].loop(1, random.Random(0)))
        while not fakes[0].served:
            await asyncio.sleep(0.01)
        await adapters["quick"].loop(4, random.Random(0))
        assert not endless.done() and adapters["quick"].steps == 4
        running = fakes[0]._ends
        assert len(running) == 6 - 2, "the other's places are kept for it"
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)

    kinds: dict[str, dict[str, Any]] = {
        "endless": {"groups_per_step": 30, "max_staleness": 1, "max_response_tokens": 200}, "quick": {},
    }  # fmt: skip
    global TOKEN_S
    before, TOKEN_S = TOKEN_S, 0.05
    try:
        asyncio.run(asyncio.wait_for(together(tmp_path, kinds, {}, 1, work), 60))
    finally:
        TOKEN_S = before

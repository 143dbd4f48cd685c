"""Prefixes in the engines' caches are those of the weights that a request is sent to."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from tests.unit.rollout_fakes import FakeSlowEngine, make_service, publish, run_config, ticks


class EngineWithCache(FakeSlowEngine):
    """Says that every prompt was in its cache."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return replace(await super().generate(request), cached_tokens=len(request.input_ids))


def keys_of(engine: FakeSlowEngine) -> list[str]:
    return [request.cache_key for request in engine.requests]


def test_a_request_names_the_weights_that_it_is_sent_to_and_the_run(tmp_path: Path) -> None:
    async def keys() -> list[set[str]]:
        engine = FakeSlowEngine(lambda group, index: 4)
        service = make_service(run_config(tmp_path), engine)
        found: list[set[str]] = []
        for step in range(3):
            before = len(engine.requests)
            await service.take(step)
            found.append(set(keys_of(engine)[before:]))
            await publish(service, engine, step + 1)
        await service.close()
        return found

    first, other = asyncio.run(keys()), asyncio.run(keys())
    assert [len(keys) for keys in first] == [1, 1, 1] and len(set.union(*first, *other)) == 6
    assert [key.rsplit("-")[-1] for keys in first for key in keys] == ["0", "1", "2"]


def test_the_body_of_a_request_has_its_key_and_none_without() -> None:
    assert GenerateRequest("a", [1], 2, cache_key="run-3").payload()["extra_key"] == "run-3"
    assert "extra_key" not in GenerateRequest("a", [1], 2).payload()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_what_began_on_a_prefix_of_older_weights_is_asked_again(tmp_path: Path, mode: Any) -> None:
    """Requests wait at the engine while the weights change: `in_place` keeps the cache, `retract` has flushed it."""
    engine = EngineWithCache(lambda group, index: 6)
    service = make_service(run_config(tmp_path, max_staleness=1, pause_mode=mode, groups_per_step=2), engine)
    taking = asyncio.create_task(service.take(0))
    await until_asked(engine, 8)
    await publish(service, engine, 1)
    await taking
    batch = await service.take(1)
    for sample in batch.samples:
        assert [s.version for s in sample.segments] == [None, 1]
    waited = [request for request in engine.requests if request.cache_key.endswith("-0")]
    again = [request for request in engine.requests[len(waited) :] if request.rid in {w.rid for w in waited}]
    assert len(waited) == 8 and len(again) == (8 if mode == "in_place" else 0)
    assert {request.cache_key.rsplit("-")[-1] for request in again} <= {"1"}
    await service.close()


async def test_a_response_that_crosses_an_update_in_place_is_kept(tmp_path: Path) -> None:
    engine = EngineWithCache(lambda group, index: 40)
    service = make_service(run_config(tmp_path, max_staleness=1, pause_mode="in_place", groups_per_step=2), engine)
    taking = asyncio.create_task(service.take(0))
    await until_asked(engine, 8)
    await ticks(10)
    await publish(service, engine, 1)
    batch = await taking
    for sample in batch.samples:
        assert [s.version for s in sample.segments] == [None, 0, 1]
    assert len({request.rid for request in engine.requests}) == len(engine.requests), "nothing was asked twice"
    await service.close()
    return service


async def until_asked(engine: FakeSlowEngine, count: int) -> None:
    while len(engine.requests) < count:
        await asyncio.sleep(0)

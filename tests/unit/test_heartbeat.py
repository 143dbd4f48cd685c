"""Engines that hang are dead before their requests are due; engines that live are left alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from mslime.backends.sglang.client import EngineClient, EngineDied
from mslime.backends.sglang.engine_pool import MISSED, EnginePool
from tests.fixtures.model_facts import model_facts
from tests.unit.fake_engine import LAYERS, TOP_K, VOCABULARY, FakeEngine
from tests.unit.test_sglang_pool import request

SILENCE_S = 0.4


def watched(work: Callable[[EnginePool, list[FakeEngine]], Awaitable[None]]) -> None:
    """Two engines, e0 and e1, in a pool that watches them."""

    async def run() -> None:
        async with FakeEngine() as first, FakeEngine() as second:
            model = model_facts(VOCABULARY, num_layers=LAYERS, top_k=TOP_K)
            clients = [EngineClient(fake.url, f"e{i}", model=model) for i, fake in enumerate((first, second))]
            pool = EnginePool(clients, 8, SILENCE_S)
            try:
                await asyncio.wait_for(work(pool, [first, second]), 20)
            finally:
                await pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("deceived", [False, True])
def test_an_engine_that_hangs_is_dead_and_its_requests_fail_at_once(deceived: bool) -> None:
    """Also where a detokenizer hangs: the scheduler still says that it has aborted the question."""

    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        await pool.resume()
        fakes[0].delay_s, fakes[0].hangs, fakes[0].deceived = 15.0, True, deceived
        with pytest.raises(EngineDied, match="no sign of life for 0.4 s"):
            await asyncio.gather(*(pool.generate(request(i)) for i in range(4)))
        assert deceived or fakes[0].asked == MISSED
        assert list(pool.dead) == ["e0"] and {(await pool.generate(request(9))).engine} == {"e1"}

    watched(work)


def test_an_engine_that_is_slow_and_shows_signs_of_life_is_left_alone() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        await pool.resume()
        for fake in fakes:
            fake.delay_s = 4 * SILENCE_S
        await asyncio.gather(*(pool.generate(request(i)) for i in range(4)))
        assert not pool.dead and all(fake.beats >= 3 for fake in fakes)

    watched(work)


def test_one_missed_heartbeat_is_none_when_the_next_one_comes() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        await pool.resume()
        for _ in range(4):
            fakes[0].hangs, asked = True, fakes[0].asked
            while fakes[0].asked == asked:
                await asyncio.sleep(0.01)
            fakes[0].hangs, beats = False, fakes[0].beats
            while fakes[0].beats == beats:
                await asyncio.sleep(0.01)
        assert not pool.dead

    watched(work)


def test_who_answers_requests_is_asked_nothing() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        await pool.resume()
        begun, late = time.monotonic(), 0
        for i in range(60):
            await asyncio.gather(pool.generate(request(2 * i)), pool.generate(request(2 * i + 1)))
            await asyncio.sleep(SILENCE_S / 30)
            begun, last = time.monotonic(), begun
            late += begun - last >= SILENCE_S / (MISSED + 1) / 2  # on a crowded machine an answer may be late
        assert not pool.dead and sum(fake.beats for fake in fakes) <= 4 * late

    watched(work)


def test_paused_engines_are_asked_nothing_and_may_be_silent() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        await pool.resume()
        await pool.pause("abort")
        for fake in fakes:
            fake.hangs = True
        await asyncio.sleep(2 * SILENCE_S)
        assert not pool.dead and sum(fake.beats for fake in fakes) == 0
        for fake in fakes:
            fake.hangs = False
        await pool.resume()
        await asyncio.sleep(SILENCE_S)
        assert not pool.dead and all(fake.beats for fake in fakes)

    watched(work)


def test_an_engine_that_joined_is_watched_too() -> None:
    async def work(pool: EnginePool, fakes: list[FakeEngine]) -> None:
        async with FakeEngine() as third:
            await pool.admit(
                EngineClient(third.url, "e2", model=model_facts(VOCABULARY, num_layers=LAYERS, top_k=TOP_K))
            )
            await pool.begin_update()
            await pool.resume()
            third.hangs = True
            while not pool.dead:
                await asyncio.sleep(0.02)
            assert list(pool.dead) == ["e2"]

    watched(work)

"""The engine pool: balance, session affinity, limits, and engines that die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from mslime.backends.sglang.client import EngineClient, EngineDied
from mslime.backends.sglang.engine_pool import EnginePool, UpdateMembers
from mslime.backends.sglang.generating import GenerateRequest
from mslime.config.errors import EngineError, WeightSyncError
from mslime.engine_plugin.wire import CANNOT
from tests.fixtures.model_facts import model_facts
from tests.unit.fake_engine import LAYERS, TOP_K, VOCABULARY, FakeEngine

UPDATE: dict[str, Callable[[EnginePool], Awaitable[Any]]] = {
    "/begin_weight_update": lambda pool: pool.begin_update(),
    "/weights_checker": lambda pool: pool.compare({}),
    "/end_weight_update": lambda pool: pool.end_update(),
    "/update_weight_version": lambda pool: pool.stamp(3),
}


def client_of(engine: FakeEngine, name: str) -> EngineClient:
    return EngineClient(engine.url, name, model=model_facts(VOCABULARY, num_layers=LAYERS, top_k=TOP_K))


@asynccontextmanager
async def pool_of(engines: int = 2, limit: int = 64) -> AsyncIterator[tuple[EnginePool, list[FakeEngine]]]:
    """A pool over fake engines `e0`, `e1` and so on, and these."""
    async with AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(FakeEngine()) for _ in range(engines)]
        pool = EnginePool([client_of(fake, f"e{i}") for i, fake in enumerate(fakes)], limit)
        stack.push_async_callback(pool.close)
        yield pool, fakes


def paths(engine: FakeEngine) -> list[str]:
    """What it was asked, in order."""
    return [path for path, _ in engine.seen]


def kill(pool: EnginePool, name: str, error: EngineError) -> None:
    """As a request does that finds the connection broken."""
    next(slot for slot in pool._slots if slot.client.name == name).kill(error)


def request(index: int, session: str = "") -> GenerateRequest:
    return GenerateRequest(f"r{index}", [1, 2], 2, session_id=session)


async def test_requests_go_to_the_least_busy_engine() -> None:
    async with pool_of(engines=3) as (pool, fakes):
        for fake in fakes:
            fake.delay_s = 0.2
        await asyncio.gather(*(pool.generate(request(i)) for i in range(12)))
        assert [len(fake.seen) for fake in fakes] == [4, 4, 4]


async def test_a_session_stays_on_its_engine() -> None:
    async with pool_of() as (pool, fakes):
        first = await pool.generate(request(0, "s"))
        fakes[int(first.engine[1])].delay_s = 0.3
        busy = [asyncio.create_task(pool.generate(request(i, "s"))) for i in range(1, 6)]
        assert {(await task).engine for task in busy} == {first.engine}


async def test_a_session_moves_when_its_engine_dies() -> None:
    async with pool_of() as (pool, _):
        first = (await pool.generate(request(0, "s"))).engine
        kill(pool, first, EngineError(first, "exit status 1", "ended", "read the log"))
        assert (await pool.generate(request(1, "s"))).engine != first


async def test_no_more_requests_run_on_an_engine_than_allowed() -> None:
    async with pool_of(engines=1, limit=3) as (pool, fakes):
        fakes[0].delay_s = 0.05
        await asyncio.gather(*(pool.generate(request(i)) for i in range(10)))
        assert fakes[0].most_running == 3


async def test_a_dead_engine_fails_running_and_waiting_requests_at_once() -> None:
    async with pool_of(engines=1, limit=2) as (pool, fakes):
        fakes[0].delay_s = 3600.0
        running = [asyncio.create_task(pool.generate(request(i))) for i in range(4)]
        while fakes[0].running < 2:
            await asyncio.sleep(0.01)
        kill(pool, "e0", EngineError("e0", "exit status -9", "the server ended", "read e0.log"))
        failures = await asyncio.gather(*running, return_exceptions=True)
        assert [type(f) for f in failures] == [EngineError] * 4
        assert {f.value for f in failures} == {"exit status -9"}


async def test_an_engine_that_has_requests_and_answers_none_is_given_up_and_others_are_not() -> None:
    async with pool_of() as (pool, fakes):
        fakes[0].delay_s = 20.0
        hangs = asyncio.create_task(pool.generate(request(0)))
        await asyncio.sleep(0.1)
        since = time.monotonic()
        fakes[1].delay_s = 0.1
        await pool.generate(request(1))
        busy = asyncio.create_task(pool.generate(request(2)))
        await asyncio.sleep(0.02)
        for slot in pool._slots:  # a heartbeat was answered, which is no answer to a request
            slot.answered = time.monotonic()
        pool.give_up(since)
        with pytest.raises(EngineDied, match="no request stopped"):
            await hangs
        assert (await busy).engine == "e1" and list(pool.dead) == ["e0"]


async def test_a_broken_connection_marks_the_engine_dead_and_the_others_go_on() -> None:
    async with pool_of() as (pool, fakes):
        fakes[0].drop_connections = True
        with pytest.raises(EngineDied):
            await pool.generate(request(0))
        engines = {(await pool.generate(request(i))).engine for i in range(1, 5)}
        assert list(pool.dead) == ["e0"] and engines == {"e1"} and len(pool) == 1


async def test_a_refused_request_does_not_kill_its_engine() -> None:
    async with pool_of() as (pool, _):
        with pytest.raises(EngineError, match="vocabulary"):
            await pool.generate(GenerateRequest("a", [VOCABULARY], 1))
        assert len(pool) == 2


async def test_without_a_live_engine_the_first_death_is_reported() -> None:
    with pytest.raises(EngineError, match="exit status 3"):
        async with pool_of(engines=1) as (pool, _):
            kill(pool, "e0", EngineError("e0", "exit status 3", "the server ended", "read e0.log"))
            await pool.generate(request(0))


async def test_control_calls_reach_every_live_engine() -> None:
    async with pool_of(engines=3) as (pool, fakes):
        kill(pool, "e2", EngineError("e2", "exit status 1", "ended", "read the log"))
        await pool.pause("retract")
        await pool.stamp(4)
        await pool.flush_cache()
        await pool.resume()
        await pool.abort()
        asked = [
            f"/{name}" for name in ("pause_generation", "update_weight_version", "flush_cache", "continue_generation")
        ]
        assert [paths(fake) for fake in fakes] == [[*asked, "/abort_request"]] * 2 + [[]]


async def test_a_failing_control_call_is_raised_after_all_have_answered() -> None:
    async with pool_of() as (pool, fakes):
        fakes[0].broken.add("/pause_generation")
        with pytest.raises(EngineError, match="told to fail"):
            await pool.pause("retract")
        assert [len(fake.seen) for fake in fakes] == [1, 1]


async def test_a_cancelled_request_frees_its_place() -> None:
    async with pool_of(engines=1, limit=1) as (pool, fakes):
        fakes[0].delay_s = 5.0
        task = asyncio.create_task(pool.generate(request(0)))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        fakes[0].delay_s = 0.0
        assert pool._slots[0].assigned == 0 and (await pool.generate(request(1))).engine == "e0"


async def test_a_weight_update_begins_compares_ends_and_is_stamped_on_every_engine() -> None:
    async with pool_of() as (pool, fakes):
        for fake in fakes:
            fake.sums = {"a": "1 7", "b": "2 8"}
        await pool.begin_update()
        assert await pool.compare({"a": "1 7", "b": "2 8"}, strict=True) == 4
        await pool.end_update()
        await pool.stamp(7)
        assert [paths(fake) for fake in fakes] == [list(UPDATE)] * 2
        assert {fake.model["weight_version"] for fake in fakes} == {"7"}


@pytest.mark.parametrize("why", ["copies are not recorded", None])
async def test_an_engine_that_cannot_say_what_it_holds_is_left_alone_unless_it_must(why: str | None) -> None:
    async with pool_of() as (pool, fakes):
        fakes[0].sums, fakes[1].sums = {"a": "1 7"}, None if why is None else {CANNOT: why}
        assert await pool.compare({"a": "1 7"}) == 1
        with pytest.raises(WeightSyncError) as caught:
            await pool.compare({"a": "1 7"}, strict=True)
        assert (caught.value.field, caught.value.value) == ("weights.check", fakes[1].url) and len(pool) == 2
        assert (why or "path_entry") in str(caught.value) and "weights.verify: probe" in caught.value.hint


@pytest.mark.parametrize("wrong", [[1], [0, 1]])
async def test_all_engines_whose_tensors_differ_are_named_and_live(wrong: list[int]) -> None:
    async with pool_of() as (pool, fakes):
        for i, fake in enumerate(fakes):
            fake.sums = {"a": "1 7" if i in wrong else "5 7"}
        with pytest.raises(WeightSyncError) as caught:
            await pool.compare({"a": "5 7"})
        named = [i for i, fake in enumerate(fakes) if f"{fake.url}: a" in str(caught.value)]
        assert caught.value.field == "weights.check" and named == wrong and len(pool) == 2


async def test_an_engine_that_gets_no_requests_any_more_takes_part_in_no_update() -> None:
    """Also when it lives, and only a connection broke: it comes back as others do, checked."""
    async with pool_of() as (pool, fakes):
        kill(pool, "e1", EngineError("e1", "/generate", "the connection broke", "read e1.log"))
        await pool.begin_update()
        await pool.end_update()
        await pool.stamp(3)
        assert paths(fakes[0]) == ["/begin_weight_update", "/end_weight_update", "/update_weight_version"]
        assert not fakes[1].seen


async def test_an_engine_that_is_gone_takes_part_in_no_update_any_more() -> None:
    async with pool_of() as (pool, fakes):
        kill(pool, "e1", EngineError("e1", "exit status 1", "the server ended\nits last words", "read e1.log"))
        await fakes[1].__aexit__(None, None, None)
        left = UpdateMembers((fakes[0].url,), {"e1": "exit status 1: the server ended"})
        assert [await pool.begin_update(), await pool.begin_update()] == [left, left]
        await pool.end_update()
        await pool.stamp(3)
        assert paths(fakes[0]) == ["/begin_weight_update"] * 2 + ["/end_weight_update", "/update_weight_version"]


async def test_an_engine_whose_death_is_noticed_by_the_update_is_left_out_of_it() -> None:
    async with pool_of() as (pool, fakes):
        await fakes[0].__aexit__(None, None, None)
        serving = await pool.begin_update()
        assert list(serving.gone) == list(pool.dead) == ["e0"] and serving.urls == (fakes[1].url,)
        assert {(await pool.generate(request(i))).engine for i in range(3)} == {"e1"}


async def test_an_engine_that_is_gone_when_all_are_paused_is_no_failure_of_the_others() -> None:
    async with pool_of() as (pool, fakes):
        await fakes[0].__aexit__(None, None, None)
        await pool.pause("abort")
        assert paths(fakes[1]) == ["/pause_generation"]


async def test_an_update_that_broke_off_is_ended_and_begun_again_by_those_that_are_left() -> None:
    async with pool_of() as (pool, fakes):
        await pool.begin_update()
        fakes[0].broken.add("/end_weight_update")  # refuses, and lives
        await fakes[1].__aexit__(None, None, None)
        serving = await pool.restart_update()
        assert list(serving.gone) == ["e1"] and len(serving.urls) == 1
        assert paths(fakes[0]) == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]


async def test_an_engine_that_does_not_answer_the_end_of_an_update_is_not_waited_for_a_second_time() -> None:
    """Two deadlines, one after the other, are longer than the driver waits for the engines to begin again."""
    async with pool_of() as (pool, fakes):
        await pool.begin_update()

        async def silent() -> None:
            raise EngineDied("engine", fakes[1].url, "no answer within 40 s", "look at it")

        pool.clients[1].end_weight_update = silent  # type: ignore[method-assign]
        serving = await pool.restart_update()
        assert list(serving.gone) == ["e1"] and len(serving.urls) == 1
        assert paths(fakes[1]) == ["/begin_weight_update"]


async def test_an_engine_that_dies_when_all_was_sent_is_no_failure_of_the_others() -> None:
    async with pool_of() as (pool, fakes):
        await pool.begin_update()
        await fakes[1].__aexit__(None, None, None)
        fakes[0].sums = {"a": "1 7"}
        assert await pool.compare({"a": "1 7"}) == 1
        await pool.end_update()
        await pool.stamp(1)
        await pool.resume()
        assert list((await pool.begin_update()).gone) == ["e1"]


@pytest.mark.parametrize("path", UPDATE)
async def test_an_engine_that_refuses_a_step_of_an_update_is_dead_and_the_others_go_on(path: str) -> None:
    async with pool_of() as (pool, fakes):
        fakes[1].broken.add(path)
        for step in UPDATE.values():
            await step(pool)
        ((name, error),) = pool.dead.items()
        assert name == "e1" and isinstance(error, EngineDied) and path in str(error)


@pytest.mark.parametrize("path", UPDATE)
async def test_a_step_of_an_update_that_all_refuse_is_an_error_and_nobodys_death(path: str) -> None:
    async with pool_of() as (pool, fakes):
        for fake in fakes:
            fake.broken.add(path)
        with pytest.raises(EngineError, match=path):
            await UPDATE[path](pool)
        assert pool.dead == {}


async def test_an_engine_that_is_left_out_gets_no_requests_and_says_why() -> None:
    async with pool_of() as (pool, fakes):
        pool.mark_dead({fakes[0].url, "http://elsewhere"}, "it refused bucket 3 twice")
        assert list(pool.dead) == ["e0"] and "it refused bucket 3 twice" in pool.dead["e0"].brief
        assert {(await pool.generate(request(i))).engine for i in range(3)} == {"e1"}


async def test_an_engine_that_is_back_gets_weights_and_then_requests_under_its_old_name() -> None:
    async with pool_of() as (pool, fakes), FakeEngine() as again:
        await pool.generate(request(0, "s"))
        await fakes[1].__aexit__(None, None, None)
        await pool.begin_update()
        await pool.admit(client_of(again, "e1"))
        before = await asyncio.gather(*(pool.generate(request(i)) for i in range(1, 5)))
        assert {r.engine for r in before} == {"e0"} and not again.seen
        serving = await pool.restart_update()
        assert serving.urls == (fakes[0].url, again.url) and not serving.gone
        after = await asyncio.gather(*(pool.generate(request(i)) for i in range(1, 5)))
        assert {r.engine for r in after} == {"e0", "e1"}
        await again.__aexit__(None, None, None)
        with pytest.raises(EngineDied):  # it may die again
            await asyncio.gather(*(pool.generate(request(i)) for i in range(5, 9)))
        assert list(pool.dead) == ["e1"] and len(pool) == 1


async def test_an_engine_that_is_back_is_not_taken_for_the_one_that_died_under_its_name() -> None:
    """On shared GPUs whoever is dead is ended before the trainer wakes, which is before the next update."""
    async with pool_of() as (pool, _):
        kill(pool, "e1", EngineError("e1", "exit status 1", "the server ended", "read its log"))
        assert list(pool.missing) == ["e1"]
        async with FakeEngine() as again:
            await pool.admit(client_of(again, "e1"))
            assert not pool.missing and list(pool.dead) == ["e1"], "it has no requests before it has weights"
            await pool.begin_update()
            assert not pool.missing and not pool.dead


async def test_a_new_engine_is_one_of_them_from_the_next_update_on() -> None:
    async with pool_of() as (pool, fakes), FakeEngine() as third:
        await pool.admit(client_of(third, "e2"))
        await pool.pause("abort")
        assert not third.seen, "it is paused already"
        assert (await pool.begin_update()).urls == (fakes[0].url, fakes[1].url, third.url)
        await pool.resume()
        answers = await asyncio.gather(*(pool.generate(request(i)) for i in range(6)))
        assert {answer.engine for answer in answers} == {"e0", "e1", "e2"}


async def test_a_pool_whose_engines_are_gone_goes_on_with_one_that_was_admitted() -> None:
    async with pool_of() as (pool, fakes):
        for name in ("e0", "e1"):
            kill(pool, name, EngineError(name, "exit status 1", "the server ended", "read its log"))
        assert pool.no_engine_alive
        with pytest.raises(EngineError, match="e0"):
            await pool.pause("abort")
        await pool.admit(client_of(fakes[1], "e1"))
        assert not pool.no_engine_alive
        await pool.abort()
        await pool.pause("abort")
        with pytest.raises(EngineError, match="e0"):
            await pool.generate(request(0))
        assert (await pool.begin_update()).urls == (fakes[1].url,)
        assert (await pool.generate(request(1))).engine == "e1"


async def test_an_engine_that_leaves_ends_its_requests_and_gets_no_others() -> None:
    async with pool_of() as (pool, fakes):
        session = (await pool.generate(request(0, "s"))).engine
        await pool.retire(session)
        leaves = next(fake for fake, name in zip(fakes, ("e0", "e1"), strict=True) if name == session)
        assert leaves.seen[-1][0] == "/abort_request"
        engines = {(await pool.generate(request(i, "s"))).engine for i in range(1, 4)}
        await pool.pause("abort")
        assert leaves.seen[-1][0] == "/pause_generation", "what it still has is interrupted with the others"
        serving = await pool.begin_update()
        assert [client.name for client in pool.clients] == sorted({"e0", "e1"} - {session})
        assert engines == {"e0", "e1"} - {session} and len(serving.urls) == 1 and not serving.gone


async def test_an_update_without_engines_says_what_the_first_died_of() -> None:
    with pytest.raises(EngineError, match="e0"):
        async with pool_of() as (pool, fakes):
            kill(pool, "e1", EngineError("e1", "exit status 1", "the server ended", "read e1.log"))
            for fake in fakes:
                await fake.__aexit__(None, None, None)
            await pool.begin_update()

"""Places at the engines that adapters share: nobody waits for another's requests longer than the gate says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mslime.rollout.request_slots import FairGate, RequestSlots


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Requests:
    """Requests of adapters, each of which ends when it is told to."""

    def __init__(self, slots: RequestSlots) -> None:
        self.slots, self.inside = slots, list[str]()
        self._ends: list[tuple[str, asyncio.Event, asyncio.Task[None]]] = []

    def begin(self, name: str, count: int = 1) -> None:
        for _ in range(count):
            end = asyncio.Event()
            self._ends.append((name, end, asyncio.create_task(self._run(name, end))))

    async def _run(self, name: str, end: asyncio.Event) -> None:
        async with self.slots.of(name):
            self.inside.append(name)
            try:
                await end.wait()
            finally:
                self.inside.remove(name)

    def finish(self, name: str) -> None:
        index = next(i for i, (n, e, t) in enumerate(self._ends) if n == name and not e.is_set() and not t.done())
        self._ends[index][1].set()

    async def close(self) -> None:
        for _, _, task in self._ends:
            task.cancel()
        await asyncio.gather(*(task for _, _, task in self._ends), return_exceptions=True)


@asynccontextmanager
async def requests_in(slots: RequestSlots) -> AsyncIterator[Requests]:
    """Requests to a slots, of which none is left at the end."""
    requests = Requests(slots)
    try:
        yield requests
    finally:
        await requests.close()
    assert requests.inside == [] and set(slots._running.values()) == {0}


async def test_requests_that_never_end_leave_another_adapter_its_share() -> None:
    async with requests_in(RequestSlots(lambda: 12, {"slow": 1, "fast": 1})) as requests:
        requests.begin("slow", 99)
        await settled()
        share = FairGate(12, {"slow": 1, "fast": 1}).share("fast")
        assert requests.inside.count("slow") == 12 - share and share == 3
        for _ in range(9):
            requests.begin("fast")
            await settled()
            assert requests.inside.count("fast") == 1, "it never waits"
            requests.finish("fast")
            await settled()


async def test_an_adapter_that_is_trained_gives_its_share_to_the_others() -> None:
    async with requests_in(RequestSlots(lambda: 12, {"a": 1, "b": 1})) as requests:
        requests.begin("a", 99)
        await settled()
        assert requests.inside.count("a") == 12 - 3
        requests.slots.leave("b")
        await settled()
        assert requests.inside.count("a") == 12
        requests.begin("b")  # its last evaluation
        await settled()
        assert requests.inside.count("b") == 1
        requests.slots.leave("a")
        await settled()
        assert requests.inside.count("a") == 12, "the last one keeps all"


async def test_room_follows_the_engines_that_live() -> None:
    alive = [1]

    async with requests_in(RequestSlots(lambda: 4 * alive[0], {"a": 1, "b": 1})) as requests:
        requests.begin("a", 99)
        await settled()
        assert len(requests.inside) == 4 - 1
        alive[0] = 2
        requests.finish("a")
        await settled()
        assert len(requests.inside) == 8 - 2


@pytest.mark.parametrize("seed", range(20))
async def test_places_are_given_back_whatever_ends_a_request(seed: int) -> None:
    """At random: begun, ended, cancelled while waiting, cancelled inside, cancelled just when admitted."""
    chance, weights = random.Random(seed), {"a": 1.0, "b": 2.0, "c": 5.0}

    async with requests_in(RequestSlots(lambda: 9, weights)) as requests:
        for _ in range(200):
            name = chance.choice(list(weights))
            match chance.randrange(4):
                case 0 | 1:
                    requests.begin(name, chance.randint(1, 3))
                case 2 if name in requests.inside:
                    requests.finish(name)
                case _ if requests._ends:
                    chance.choice(requests._ends)[2].cancel()
                case _:
                    pass
            if chance.random() < 0.5:
                await settled()
            assert len(requests.inside) <= 9
        await settled()
        waiting = {n: len(w) for n, w in requests.slots._waiting.items()}
        assert all(requests.inside.count(n) >= 1 for n, count in waiting.items() if count), "one always has a place"

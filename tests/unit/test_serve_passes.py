"""Gradient passes of several clients that wait for the trainer share one: who is served when, and who fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from mslime.config.errors import TrainerError
from mslime.config.serve import LossChoice
from mslime.data.client_batch import Datum
from mslime_plugins.serve.backend import PassAsk, PassResult
from mslime_plugins.serve.passes import GradientPasses
from tests.fixtures.fake_serve import FakeTrainer


def ask(name: str) -> PassAsk:
    one = np.ones(2, np.int32)
    column = np.ones(2, np.float32)
    return PassAsk(name, [Datum(one, one, column, column, column)], LossChoice("cross_entropy"))


Work = Callable[[FakeTrainer, GradientPasses, asyncio.Lock], Awaitable[None]]


def with_passes(work: Work, together: bool = True) -> FakeTrainer:
    """`work` with a trainer that takes a moment for everything, and knows a, b, c and d."""
    trainer = FakeTrainer(slow_s=0.01, levels={name: float(at) for at, name in enumerate("abcd")})

    async def run() -> None:
        turn = asyncio.Lock()
        await work(trainer, GradientPasses(trainer, turn, together), turn)

    asyncio.run(asyncio.wait_for(run(), 20))
    return trainer


def loss_of(passed: PassResult | BaseException) -> float:
    assert isinstance(passed, PassResult), passed
    return passed.loss


@pytest.mark.parametrize("together", [True, False])
def test_what_waits_when_the_trainer_becomes_free_goes_through_it_at_once(together: bool) -> None:
    async def work(trainer: FakeTrainer, passes: GradientPasses, turn: asyncio.Lock) -> None:
        found = await asyncio.gather(*(passes.add(ask(name)) for name in "abcd"))
        assert len({each.log_probs[0][0] for each in found}) == 4, "each has its own"
        assert (await passes.add(ask("b"))).loss == 4.0

    alone = [("pass", name) for name in "abcd"]
    calls = with_passes(work, together).calls
    assert calls == [*([("pass", "a"), ("together", "b c d")] if together else alone), ("pass", "b")]


def test_who_fails_in_a_shared_pass_fails_alone() -> None:
    async def work(trainer: FakeTrainer, passes: GradientPasses, turn: asyncio.Lock) -> None:
        trainer.fail_in_pass = "c"
        a, b, c, d = await asyncio.gather(*(passes.add(ask(name)) for name in "abcd"), return_exceptions=True)
        assert isinstance(c, TrainerError) and [loss_of(each) for each in (b, d)] == [-1.0, -3.0]
        assert loss_of(a) == 2.0

    with_passes(work)


def test_what_befalls_a_whole_pass_is_told_to_all_in_it_and_the_next_goes_on() -> None:
    async def work(trainer: FakeTrainer, passes: GradientPasses, turn: asyncio.Lock) -> None:
        trainer.fail = "together"
        found = await asyncio.gather(*(passes.add(ask(name)) for name in "abc"), return_exceptions=True)
        assert isinstance(found[0], PassResult) and all(isinstance(each, TrainerError) for each in found[1:])
        assert loss_of(await passes.add(ask("c"))) == 6.0

    with_passes(work)


def test_other_work_keeps_its_place_in_the_line() -> None:
    """A pass is never later for being joined, and what asked before it is not passed over."""

    async def work(trainer: FakeTrainer, passes: GradientPasses, turn: asyncio.Lock) -> None:
        async def free() -> None:
            async with turn:
                await trainer.free("a")

        await asyncio.gather(passes.add(ask("b")), free(), passes.add(ask("c")), passes.add(ask("d")))

    assert with_passes(work).calls == [("pass", "b"), ("free", "a"), ("together", "c d")]


def test_a_client_that_goes_does_not_take_the_pass_of_others_with_it() -> None:
    async def work(trainer: FakeTrainer, passes: GradientPasses, turn: asyncio.Lock) -> None:
        async def waits(name: str) -> PassResult:
            return await asyncio.shield(asyncio.ensure_future(passes.add(ask(name))))

        tasks = [asyncio.create_task(waits(name)) for name in "abc"]
        await asyncio.sleep(0.005)
        tasks[1].cancel()  # it leads the pass that c shares
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[1], asyncio.CancelledError) and loss_of(found[2]) == -2.0

    assert with_passes(work).calls == [("pass", "a"), ("together", "b c")]

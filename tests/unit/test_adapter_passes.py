"""Passes of several adapters that wait for the trainer share one: who is served when, and who fails. Without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mslime.backends.megatron.step.client_steps import RankPassResult
from mslime.config.errors import ConfigError, TrainerError, UserError
from mslime.config.resolved import policy_spec
from mslime.config.serve import LossChoice
from mslime.data.client_batch import ClientShard, Datum, PassResult
from mslime.run import adapter_ranks
from mslime.run.adapter_ranks import AdapterRanks, AdapterTrainer, PassWork, TrainWork
from mslime.run.ranks import RankGroup
from mslime.run.trainer_turn import Offer, TrainerTurn
from mslime.threads import in_thread
from tests.fixtures.least import least

LOSS = LossChoice("cross_entropy")
RANKS = 2


class FakeActor:
    """A rank whose passes find the adapter's number as the loss. `fail` are adapters, or `joint`, that fail on it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls, self.fail = calls, dict[str, Exception]()
        self.names = list[str]()

    def create(self, name: str, config: object, stacked: bool) -> None:
        self.calls.append(f"create {name}")
        self.names.append(name)

    def free(self, name: str) -> None:
        self.calls.append(f"free {name}")
        self.names.remove(name)

    def ask(self, name: str, verb: str, *given: Any) -> Any:
        self.calls.append(f"{verb} {name}")
        if name not in self.names:
            raise ConfigError("adapters.name", name, "there are none", "")
        if name in self.fail:
            raise self.fail[name]
        return self._found(name, given[0])

    def attempt(self, method: str, *given: Any) -> Any:
        try:
            return getattr(self, method)(*given)
        except UserError as error:
            return error

    def joint_forward_backward(self, asked: list[PassWork]) -> dict[str, Any]:
        self.calls.append(f"joint {' '.join(each.adapter for each in asked)}")
        if "joint" in self.fail:
            raise self.fail["joint"]
        return {each.adapter: self.fail.get(each.adapter) or self._found(each.adapter, each.shards) for each in asked}

    def _found(self, name: str, part: ClientShard) -> RankPassResult:
        return RankPassResult(float(self.names.index(name)), np.zeros(len(part.targets), np.float32))


class Handle:
    """A Ray actor's handle; what its calls return is there at once."""

    def __init__(self, it: FakeActor) -> None:
        self.it = it

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(self.it, method))


class Ranks(AdapterRanks):
    def __init__(self, *, together: bool, survives: bool) -> None:
        lora = {"rank": 4, "together": together}
        config = least(lora=lora, cluster={"trainer_ranks": RANKS})
        self.spec, self._limits, self._together = policy_spec(config), config.deadlines, together
        self.role, self._check, self._submitting = "trainer", lambda: None, threading.Lock()
        self.turn, self._survives, self._adapter, self._failures = TrainerTurn(), survives, None, []
        self.calls: list[str] = []
        self.actors = [FakeActor(self.calls), *(FakeActor([]) for _ in range(RANKS - 1))]
        self._actors = self._first = [Handle(actor) for actor in self.actors]

    def trainers(self, names: str) -> dict[str, AdapterTrainer]:
        made = {name: self.create(name, self.spec) for name in names}
        self.calls.clear()
        return made


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def every(self: RankGroup, what: str, deadline_s: float, work: Callable[..., Any], on_wait: object = None) -> Any:
        return list(self.submit(work).values())

    monkeypatch.setattr(RankGroup, "all", every)
    monkeypatch.setattr(adapter_ranks, "ray", SimpleNamespace(put=lambda it: it))
    yield


def data() -> list[Datum]:
    ids, column = np.ones(2, np.int32), np.ones(2, np.float32)
    return [Datum(ids, ids, column, column, column)] * 3


def waiting(turn: TrainerTurn, works: list[Callable[[], Any]]) -> list[Future[Any]]:
    """All of these stand in line for the turn, in this order, before the first one gets it."""
    futures: list[Future[Any]] = []
    with turn.held():
        for work in works:
            futures.append(in_thread(work))
            while len(turn._line) < len(futures):
                time.sleep(0.002)
    for future in futures:
        future.exception(20)
    return futures


def passes(ranks: Ranks, trainers: dict[str, AdapterTrainer], names: str) -> list[Any]:
    """Losses, or errors, of passes that wait at the same time."""

    def of(name: str) -> Callable[[], PassResult]:
        def work() -> PassResult:
            return trainers[name].forward_backward(data(), LOSS)

        return work

    found = waiting(ranks.turn, [of(name) for name in names])
    return [future.exception() or future.result().loss for future in found]


@pytest.mark.parametrize("together", [True, False])
def test_what_waits_when_the_trainer_becomes_free_goes_through_it_at_once(together: bool) -> None:
    ranks = Ranks(together=together, survives=True)
    trainers = ranks.trainers("abcd")
    assert passes(ranks, trainers, "abcd") == [0.0, 1.0, 2.0, 3.0]
    found = trainers["b"].forward_backward(data(), LOSS)
    assert found.loss == 1.0 and [len(each) for each in found.log_probs] == [2, 2, 2]
    alone = [f"forward_backward {name}" for name in "abcd"]
    assert ranks.calls == [*(["joint a b c d"] if together else alone), "forward_backward b"]


def test_who_fails_in_a_shared_pass_fails_alone() -> None:
    ranks = Ranks(together=True, survives=True)
    trainers = ranks.trainers("abc")
    error = TrainerError("loss", "nan", "is not finite", "")
    for actor in ranks.actors:
        actor.fail["b"] = error
    assert passes(ranks, trainers, "abc") == [0.0, error, 2.0]
    with pytest.raises(TrainerError, match="not finite"):
        trainers["b"].forward_backward(data(), LOSS)
    assert ranks.failure is None and passes(ranks, trainers, "ac") == [0.0, 2.0]


def test_what_befalls_a_whole_pass_is_told_to_all_in_it_and_the_next_goes_on() -> None:
    ranks = Ranks(together=True, survives=True)
    trainers = ranks.trainers("abc")
    error = TrainerError("trainer", "", "out of memory", "")
    for actor in ranks.actors:
        actor.fail["joint"] = error
    assert passes(ranks, trainers, "abc") == [error] * 3
    assert trainers["c"].forward(data(), LOSS).loss == 2.0 and ranks.failure is None


@pytest.mark.parametrize("where", ["joint", "b"])
def test_where_some_ranks_refuse_and_others_do_not_the_ranks_are_given_up(where: str) -> None:
    ranks = Ranks(together=True, survives=True)
    trainers = ranks.trainers("abc")
    ranks.actors[1].fail[where] = TrainerError("loss", "nan", "is not finite", "")
    found = passes(ranks, trainers, "abc")
    assert ranks.failure is not None and "1 of 2 ranks" in str(ranks.failure) and found == [ranks.failure] * 3


def test_ranks_of_a_run_are_given_up_by_the_first_mistake() -> None:
    """There nobody waits for those that may hang in a collective meanwhile."""
    ranks = Ranks(together=False, survives=False)
    trainers = ranks.trainers("a")
    ranks.actors[0].fail["a"] = error = TrainerError("loss", "nan", "is not finite", "")
    assert passes(ranks, trainers, "a") == [error] and ranks.failure is error


def test_other_work_keeps_its_place_in_the_line() -> None:
    """A pass is never later for being joined, and what asked before it is not passed over."""
    ranks = Ranks(together=True, survives=True)
    trainers = ranks.trainers("abcd")

    def on(name: str) -> Callable[[], Any]:
        return lambda: trainers[name].forward_backward(data(), LOSS)

    def free() -> None:
        ranks.free("a")

    for future, name in zip([*waiting(ranks.turn, [free, on("b"), on("c")])][1:], "bc", strict=True):
        assert future.result().loss == float("bcd".index(name))
    assert ranks.calls == ["free a", "joint b c"]
    with pytest.raises(ConfigError, match="there are none"):
        trainers["a"].forward_backward(data(), LOSS)


def test_steps_of_one_kind_share_a_pass_and_no_others() -> None:
    ranks = Ranks(together=True, survives=True)
    trainers = ranks.trainers("ab")
    step, joined = Offer(TrainWork("c", [], 1, ())), list[Any]()

    def train() -> None:
        with ranks.turn.held(offer=step):
            joined.append(step.taken)

    waiting(ranks.turn, [lambda: trainers["a"].forward_backward(data(), LOSS), train,
                         lambda: trainers["b"].forward_backward(data(), LOSS)])  # fmt: skip
    assert ranks.calls == ["joint a b"] and joined == [False]

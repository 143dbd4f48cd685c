"""Threads that share ranks give all of them their work in one order: it is made of collectives."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mslime.config.resolved import policy_spec
from mslime.run.ranks import RankGroup
from mslime.run.ray_cluster import ActorProcess
from mslime.run.trainers import CriticActor
from tests.fixtures.least import least


class FakeActor:
    """An actor that only notes what it is given."""

    def __init__(self, given: list[str]) -> None:
        self.given = given


def test_two_threads_are_in_the_same_order_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[str]] = [[], []]
    placed = SimpleNamespace(remote=lambda spec, process, rank, path: FakeActor(orders[rank]))
    made = SimpleNamespace(options=lambda **_: placed)
    monkeypatch.setattr("mslime.run.ranks.remote_class", lambda actor, **_: made)
    config = least(cluster={"trainer_ranks": 2, "device": "cpu"})
    process = ActorProcess("info", config.cluster)
    group = RankGroup(CriticActor, policy_spec(config), process, lambda rank: {}, Path("logs"))
    first_began, second_done = threading.Event(), threading.Event()

    def first(actor: Any, rank: int) -> Any:
        actor.given.append("first")
        first_began.set()
        if rank == 0:
            second_done.wait(0.3)  # in vain, where threads take turns

    def second() -> None:
        first_began.wait(10)
        group.submit(lambda actor, _: actor.given.append("second"))
        second_done.set()

    other = threading.Thread(target=second)
    other.start()
    group.submit(first)
    other.join()
    assert orders == [["first", "second"]] * 2

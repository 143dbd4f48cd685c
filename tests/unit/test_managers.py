"""Managers in processes of their own, without the processes: who has which engine, and whose failure is told how."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError

from mslime.backends.sglang.server import EngineAddress
from mslime.config.errors import TrainerError
from mslime.control import managers
from mslime.control.managers import ManagerGroup

ENGINES = [EngineAddress(f"engine{i}", f"http://e:{i}") for i in range(5)]


class FakeMethod:
    """Of an actor: notes what it was called with, and answers by a function."""

    def __init__(self, name: str, actor: FakeActor) -> None:
        self._name, self._actor = name, actor

    async def remote(self, *args: Any) -> Any:
        self._actor.calls.append((self._name, *args))
        return self._actor.answer(self._name, args)


class FakeActor:
    """A manager's actor, whose process may have died."""

    def __init__(self, index: int) -> None:
        self.index, self.calls, self.dead = index, list[tuple[Any, ...]](), False
        names = ("meet", "open", "ask", "ask_engines", "stop")
        self.meet, self.open, self.ask, self.ask_engines, self.stop = (FakeMethod(name, self) for name in names)

    def answer(self, name: str, args: tuple[Any, ...]) -> Any:
        if self.dead:
            raise RayActorError()
        if args[0] == "compare":
            return 2 + self.index
        return 100 + self.index if name == "meet" else None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> tuple[ManagerGroup, list[FakeActor]]:
    made: list[FakeActor] = []

    def make(run: object, index: int, log: str) -> FakeActor:
        made.append(FakeActor(index))
        return made[-1]

    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=make))
    monkeypatch.setattr(managers, "remote_class", lambda cls: remote)
    monkeypatch.setattr(managers, "beside_the_driver", dict)
    run = cast("Any", SimpleNamespace(config=SimpleNamespace(rollout=SimpleNamespace(managers=2))))
    return ManagerGroup(run, Path("logs"), ENGINES), made


def names(share: Sequence[EngineAddress]) -> list[str]:
    return [address.name for address in share]


def test_engines_are_divided_and_the_first_to_refuse_an_input_speaks_for_all(
    group: tuple[ManagerGroup, list[FakeActor]],
) -> None:
    several, actors = group
    assert asyncio.run(several.start([])) == 100
    assert [names(actor.calls[0][1]) for actor in actors] == [["engine0", "engine2", "engine4"], ["engine1", "engine3"]]
    assert [actor.calls[1] for actor in actors] == [("open", 100, [])] * 2


def test_each_manager_compares_its_own_engines(group: tuple[ManagerGroup, list[FakeActor]]) -> None:
    several, actors = group
    assert asyncio.run(several.compare({"a": "1 7"}, strict=True)) == 5
    assert [actor.calls[0][1:] for actor in actors] == [("compare", {"a": "1 7"}, True, None, "")] * 2


def test_a_manager_that_died_is_named_after_the_others_have_answered(
    group: tuple[ManagerGroup, list[FakeActor]],
) -> None:
    several, actors = group
    actors[0].dead = True
    with pytest.raises(TrainerError, match=r"rollout manager 0.*the process died(.|\n)*logs/manager0.log"):
        asyncio.run(several.stamp(3))
    assert actors[1].calls == [("ask_engines", "stamp", 3)]

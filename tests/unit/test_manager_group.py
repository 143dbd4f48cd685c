"""Which manager is asked about which engine, when there are several. The managers only pretend."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mslime.backends.sglang.server import EngineAddress
from mslime.config.errors import ConfigError, EngineError
from mslime.control.managers import ManagerGroup


class FakeManager:
    """Answers what it was given, and writes down what it is asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.asked = answers, list[tuple[str, Any]]()

    async def engines(self, verb: str, *args: Any) -> Any:
        return self.answers[verb](*args)

    async def side(self, verb: str, *args: Any) -> Any:
        self.asked += [(verb, arg.name if isinstance(arg, EngineAddress) else arg) for arg in args]
        if isinstance(answer := self.answers.get(verb), Exception):
            raise answer
        return answer


def engine(index: int, url: str = "") -> EngineAddress:
    return EngineAddress(f"engine{index}", url or f"http://e{index}")


def group_of(
    *shares: list[EngineAddress], answers: list[dict[str, Any]] | None = None
) -> tuple[Any, list[FakeManager]]:
    managers = [FakeManager(given) for given in answers or [{} for _ in shares]]
    group: Any = object.__new__(ManagerGroup)
    group._managers, group._shares = managers, [*shares]
    return group, managers


def test_an_engine_comes_back_where_it_was_and_a_new_one_where_there_are_fewest() -> None:
    group, (first, second) = group_of([engine(0), engine(2)], [engine(1)])
    asyncio.run(group.greet(engine(2, "http://again")))
    asyncio.run(group.greet(engine(3)))
    assert (first.asked, second.asked) == (
        [("greet", "engine2"), ("greet", False)],
        [("greet", "engine3"), ("greet", False)],
    )
    assert [[e.url for e in share] for share in group._shares] == [
        ["http://e0", "http://again"], ["http://e1", "http://e3"],
    ]  # fmt: skip


def test_an_engine_that_lacks_something_is_nobodys() -> None:
    lacks = EngineError("engine2", "handshake", "it lacks routes", "start it with them")
    group, _ = group_of([engine(0)], [engine(1)], answers=[{"greet": lacks}, {}])
    with pytest.raises(EngineError, match="lacks routes"):
        asyncio.run(group.greet(engine(2)))
    assert [len(share) for share in group._shares] == [1, 1]


def test_an_engine_leaves_its_manager_which_keeps_one() -> None:
    group, (first, second) = group_of([engine(0), engine(2)], [engine(1)])
    asyncio.run(group.retire("engine0"))
    asyncio.run(group.retire("engine9"))  # was never met
    assert (first.asked, second.asked) == ([("retire", "engine0")], [])
    for name in ("engine1", "engine2"):
        with pytest.raises(ConfigError, match="only engine of one of several"):
            asyncio.run(group.retire(name))
    assert [[e.name for e in share] for share in group._shares] == [["engine2"], ["engine1"]]


def test_one_manager_without_engines_strands_the_run() -> None:
    died = EngineError("engine1", "exit status 1", "the server ended", "read its log")
    answers = [{"dead": {}, "stranded": False}, {"dead": {"engine1": died}, "stranded": True}]
    group, _ = group_of([engine(0)], [engine(1)], answers=answers)
    assert asyncio.run(group.stranded()) and asyncio.run(group.dead()) == {"engine1": died}
    answers[1]["stranded"] = False
    assert not asyncio.run(group.stranded())


def test_what_the_engines_of_all_managers_say_of_a_probe() -> None:
    answers = [{"probe": lambda request: {"http://e0": request}}, {"probe": lambda request: {"http://e1": request}}]
    group, _ = group_of([engine(0)], [engine(1)], answers=answers)
    assert asyncio.run(group.probe("text")) == {"http://e0": "text", "http://e1": "text"}

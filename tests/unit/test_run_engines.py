"""Which manager is asked about which engine, and whose failure is raised. The managers are fakes of this process."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from mslime.backends.sglang.server_process import EngineAddress
from mslime.config.errors import ConfigError, EngineError
from mslime.rollout.service import LocalHandle
from mslime.run.rollout_process import ManagerEngines
from mslime.run.run_engines import RunEngines


class FakeManager:
    """Has the engines of a manager; answers what it was given, and writes down what it is asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.asked = answers, list[tuple[Any, ...]]()

    def __getattr__(self, method: str) -> Any:
        async def answer(*args: Any) -> Any:
            self.asked.append((method, *(arg.name if isinstance(arg, EngineAddress) else arg for arg in args)))
            await asyncio.sleep(0)
            if isinstance(found := self.answers.get(method), Exception):
                raise found
            return found

        return answer


def engine(index: int, url: str = "") -> EngineAddress:
    return EngineAddress(f"engine{index}", url or f"http://e{index}")


def engines_of(
    *shares: list[EngineAddress], answers: list[dict[str, Any]] | None = None
) -> tuple[RunEngines, list[FakeManager], list[ManagerEngines]]:
    managers = [FakeManager(given) for given in answers or [{} for _ in shares]]
    asked = [cast("Any", LocalHandle(manager)) for manager in managers]
    members = [ManagerEngines(each, each, share) for each, share in zip(asked, shares, strict=True)]
    return RunEngines(members), managers, members


def test_an_engine_comes_back_where_it_was_and_a_new_one_where_there_are_fewest() -> None:
    engines, (first, second), members = engines_of([engine(0), engine(2)], [engine(1)])
    asyncio.run(engines.admit(engine(2, "http://again")))
    asyncio.run(engines.admit(engine(3)))
    assert (first.asked, second.asked) == ([("admit", "engine2")], [("admit", "engine3")])
    assert [[e.url for e in member.engines] for member in members] == [
        ["http://e0", "http://again"], ["http://e1", "http://e3"],
    ]  # fmt: skip


def test_an_engine_that_lacks_something_is_no_managers() -> None:
    lacks = EngineError("engine2", "handshake", "it lacks routes", "start it with them")
    engines, _, members = engines_of([engine(0)], [engine(1)], answers=[{"admit": lacks}, {}])
    with pytest.raises(EngineError, match="lacks routes"):
        asyncio.run(engines.admit(engine(2)))
    assert [len(member.engines) for member in members] == [1, 1]


def test_an_engine_leaves_its_manager_which_keeps_one() -> None:
    engines, (first, second), members = engines_of([engine(0), engine(2)], [engine(1)])
    asyncio.run(engines.retire("engine0"))
    asyncio.run(engines.retire("engine9"))  # was never met
    assert (first.asked, second.asked) == ([("retire", "engine0")], [])
    for name in ("engine1", "engine2"):
        with pytest.raises(ConfigError, match="only engine of its rollout manager"):
            asyncio.run(engines.retire(name))
    assert [member.names for member in members] == [["engine2"], ["engine1"]]


def test_the_only_manager_may_lose_its_only_engine() -> None:
    engines, (only,), members = engines_of([engine(0)])
    asyncio.run(engines.retire("engine0"))
    assert only.asked == [("retire", "engine0")] and members[0].engines == []


def test_one_manager_without_engines_strands_the_run() -> None:
    died = EngineError("engine1", "exit status 1", "the server ended", "read its log")
    answers = [{"dead": {}, "no_engine_alive": False}, {"dead": {"engine1": died}, "no_engine_alive": True}]
    engines, _, _ = engines_of([engine(0)], [engine(1)], answers=answers)
    assert asyncio.run(engines.no_engine_alive()) and asyncio.run(engines.dead()) == {"engine1": died.brief}
    answers[1]["no_engine_alive"] = False
    assert not asyncio.run(engines.no_engine_alive())


def test_the_answers_of_all_managers_are_added_up() -> None:
    answers = [{"probe": {"http://e0": 1}, "compare": 2}, {"probe": {"http://e1": 2}, "compare": 3}]
    engines, managers, _ = engines_of([engine(0)], [engine(1)], answers=answers)
    assert asyncio.run(engines.probe(cast("Any", "text"))) == {"http://e0": 1, "http://e1": 2}
    assert asyncio.run(engines.compare({"a": "1 7"}, True)) == 5
    assert [each.asked for each in managers] == [[("probe", "text"), ("compare", {"a": "1 7"}, True, None, "")]] * 2


def test_a_failure_of_one_manager_is_raised_after_the_others_have_answered() -> None:
    died = EngineError("engine0", "stamp", "the process died", "read its log")
    engines, (_, second), _ = engines_of([engine(0)], [engine(1)], answers=[{"stamp": died}, {}])
    with pytest.raises(EngineError, match="the process died"):
        asyncio.run(engines.stamp(3))
    assert second.asked == [("stamp", 3)]

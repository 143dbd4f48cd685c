"""Calls to objects of other processes, without the processes: names, deadlines, and whose failure is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from mslime.backends.sglang.server_process import EngineAddress
from mslime.config.errors import WorkerError
from mslime.config.schema import DeadlineConfig
from mslime.run import ray_calls, rollout_process
from mslime.run.ray_calls import HandleActor, PendingCall, RemoteHandle, verb
from mslime.run.rollout_process import ManagerProcesses

DEADLINES = DeadlineConfig(engine_control_s=7, rollout_step_s=50)


class Work(HandleActor):
    """An actor, and the object in it."""

    def __init__(self) -> None:
        self.objects = {"work": self}

    @verb("double {0}")
    async def double(self, value: int, *, more: int = 0) -> int:
        return 2 * value + more

    @verb("wait for a step", "rollout_step_s", more_s=60, interruptible=True)
    async def wait(self) -> None: ...


class FakeActor:
    """In the place of a Ray actor: the answer of a call is its "reference"."""

    def __init__(self, host: HandleActor, dead: bool = False) -> None:
        self._host, self._dead = host, dead

    @property
    def ask(self) -> FakeActor:
        return self

    async def remote(self, *args: Any, **options: Any) -> Any:
        if self._dead:
            raise RayActorError()
        return await self._host.ask(*args, **options)


def test_a_call_reaches_the_method_of_the_named_object() -> None:
    work = RemoteHandle[Work](FakeActor(Work()), "work", "who", "who.log", DEADLINES)
    assert asyncio.run(work.ask(Work.double, 4, more=1)) == 9


def test_a_process_that_died_is_named_with_its_log() -> None:
    work = RemoteHandle[Work](FakeActor(Work(), dead=True), "work", "manager 3", "manager3.log", DEADLINES)
    with pytest.raises(WorkerError, match=r"work: double.*\n?.*manager 3(.|\n)*process died(.|\n)*manager3.log"):
        asyncio.run(work.ask(Work.double, 4))


@pytest.mark.parametrize(
    ("method", "args", "what", "limit_s", "checked"),
    [(Work.double, (4,), "double 4", 37, False), (Work.wait, (), "wait for a step", 110, True)],
)
def test_a_verb_says_what_is_waited_for_and_how_long(
    method: Any, args: tuple[int, ...], what: str, limit_s: float, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[tuple[Any, ...]] = []

    def call(ref: Any, who: str, what: str, limit_s: float, log: str, on_wait: Callable[[], None] | None) -> int:
        waited.append((who, what, limit_s, log, on_wait is check))
        return 8

    def check() -> None: ...

    class FakeHandle:
        class ask:
            remote = staticmethod(lambda *args: args)

    monkeypatch.setattr(ray_calls, "call", call)
    monkeypatch.setattr(PendingCall, "done", False)
    work = RemoteHandle[Work](FakeHandle, "work", "who", "who.log", DEADLINES, check)
    pending = work.begin(method, *args)
    assert pending.ref == ("work", method.__name__, *args)
    assert work.wait(pending) == 8
    assert work.within(3.0).call(method, *args) == 8
    assert waited == [("who", what, limit_s, "who.log", checked), ("who", what, 3.0, "who.log", checked)]


def test_what_has_ended_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_calls, "call", lambda *args: args[-1])
    monkeypatch.setattr(PendingCall, "done", True)
    work = RemoteHandle[Work](None, "work", "who", "who.log", DEADLINES, lambda: None)
    found: Any = work.wait(PendingCall(None, ray_calls._VERBS[Work.wait], "wait"))
    assert found is None, "no check is handed on"


def test_engines_are_divided_and_the_first_to_refuse_an_input_limits_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class FakeManager(HandleActor):
        def __init__(self, index: int) -> None:
            self.index, self.asked, self.objects = index, list[Any](), {"process": self}

        async def connect(self, engines: list[EngineAddress]) -> int:
            self.asked.append([engine.name for engine in engines])
            return 100 + self.index

        async def open(self, refused_input: int, teachers: list[EngineAddress]) -> None:
            self.asked.append(refused_input)

    class FakeClass:
        def options(self, **_: Any) -> FakeClass:
            return self

        def remote(self, run: Any, index: int, log: str) -> FakeActor:
            made.append(FakeManager(index))
            return FakeActor(made[-1])

    monkeypatch.setattr(rollout_process, "remote_class", lambda cls: FakeClass())
    monkeypatch.setattr(rollout_process, "beside_the_driver", dict)

    class FakeRun:
        class config:
            class rollout:
                managers = 2

            deadlines = DEADLINES

    engines = [EngineAddress(f"engine{i}", f"http://e:{i}") for i in range(5)]
    several = ManagerProcesses(FakeRun, Path("logs"), engines)  # type: ignore[arg-type]
    assert asyncio.run(several.start([])) == 100
    assert [each.asked for each in made] == [[["engine0", "engine2", "engine4"], 100], [["engine1", "engine3"], 100]]

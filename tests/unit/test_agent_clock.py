"""An agent that asks nothing any more is noticed by a timer, which runs while no turn is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import RolloutError
from mslime.config.rollout import AgentLimits
from mslime.rollout.agents import session
from mslime.rollout.agents.session import AgentClock
from tests.unit.rollout_fakes import FakeSlowEngine, make_service, run_config
from tests.unit.test_chat_session import LIMITS, QUESTION, SYSTEM, Chat


class Alarm:
    """A timer of the fake loop."""

    def __init__(self, at: float, ring: Callable[[], None]) -> None:
        self.at, self.ring, self.cancelled = at, ring, False

    def cancel(self) -> None:
        self.cancelled = True


class Time:
    """A clock and a loop's timers that a test moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.alarms = 1000.0, list[Alarm]()
        monkeypatch.setattr(session.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(session.asyncio, "get_running_loop", lambda: self)

    def call_later(self, seconds: float, work: Callable[..., None], *given: Any) -> Alarm:
        self.alarms.append(Alarm(self.now + seconds, lambda: work(*given)))
        return self.alarms[-1]

    def move_to(self, now: float) -> None:
        self.now = now
        for alarm in list(self.alarms):
            if not alarm.cancelled and alarm.at <= now:
                alarm.cancelled = True
                alarm.ring()


def made(moves: Time, ends: bool = True, **limits: float) -> AgentClock:
    watch = AgentClock(AgentLimits(**limits), lambda: ends)
    watch.begin()
    return watch


@pytest.mark.parametrize(("limits", "last", "rings", "told"), [
    ({"idle_s": 60, "wall_s": 600}, 1100, 1160, "rollout.limits.idle_s = 60"),
    ({"idle_s": 60, "wall_s": 600}, 1570, 1600, "rollout.limits.wall_s = 600"),
    ({"idle_s": 60, "wall_s": 600}, 1650, 1710, "rollout.limits.idle_s = 60"),
], ids=["nothing is asked", "the whole passes first", "the whole passed while a reply was generated"])  # fmt: skip
def test_the_limit_that_passes_first_ends_the_rollout(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, float], last: float, rings: float, told: str
) -> None:
    moves = Time(monkeypatch)
    watch = made(moves, **limits)
    moves.now = last
    watch.run()
    moves.move_to(rings - 0.5)
    assert not watch.expired
    moves.move_to(rings)
    assert watch.expired == told


def test_no_time_runs_while_a_turn_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Time(monkeypatch)
    watch = made(moves, idle_s=60, wall_s=600)
    watch.run()
    watch.run()
    watch.stop()
    moves.move_to(5000)
    assert not watch.expired, "neither the first alarm nor the second is left"


def test_an_agent_has_its_time_again_where_the_function_generates_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Time(monkeypatch)
    watch = made(moves, ends=False, idle_s=60, wall_s=90)
    watch.run()
    for now in (1060, 1090, 1150):  # idle, the whole, idle again
        moves.move_to(now)
        assert not watch.expired and [a.at for a in moves.alarms if not a.cancelled]


def test_a_request_that_comes_too_late_is_told_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Time(monkeypatch)
    watch = made(moves, idle_s=60, wall_s=600)
    moves.now = 1061
    assert watch.passed(alone=True) == ("idle_s", 60) and watch.passed(alone=False) is None
    moves.now = 1601
    assert watch.passed(alone=False) == ("wall_s", 600)


async def test_a_session_lets_the_time_run_between_its_turns_only() -> None:
    chat = Chat("a", "b", limits=LIMITS)
    watch = chat.session._clock
    assert watch._alarm is None
    await chat.ask(SYSTEM, QUESTION)
    assert watch._alarm is not None
    chat.engine.gate.clear()
    task = asyncio.create_task(chat.ask(QUESTION))
    await chat.engine_waits(2)
    assert watch._alarm is None, "a reply that waits costs the agent nothing"
    chat.engine.gate.set()
    await task
    assert watch._alarm is not None
    await chat.close()
    assert watch._alarm is None


@pytest.mark.parametrize("limit", ["idle_s", "wall_s"])
async def test_a_function_that_waits_for_a_dead_agent_ends_by_the_limits_name(
    tmp_path: Path, limit: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rollout of three waits for ever: it fails the run, or is dropped, and the others count."""
    settings = {"function": "tests.unit.user_agents:waits_for_a_dead_agent", "group_size": 3,
                "renderer": "tests.unit.user_agents:plain", "limits": {limit: 0.5}}  # fmt: skip
    told = rf"waited for an agent that sends no more requests \(rollout.limits.{limit} = 0.5\)"
    service = make_service(run_config(tmp_path, **settings), FakeSlowEngine(lambda group, index: 9))
    with pytest.raises(RolloutError, match=f"'group 1, response 0': {told}"):
        await service.take(0)
    await service.close()
    service = make_service(run_config(tmp_path, on_error="drop", **settings), FakeSlowEngine(lambda group, index: 9))
    batch = await service.take(0)
    assert {g.group_id: g.numbers for g in batch.groups}[1] == [1, 2]
    assert batch.metrics["rollout/failed_rollouts"] == 1 and f"rollout.limits.{limit}" in capfd.readouterr().out
    await service.close()

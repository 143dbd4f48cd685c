"""Environments in processes: what one does wrong, and what that does to the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mslime.config.errors import ConfigError
from mslime.rollout import worker_process
from mslime.rollout.environments import EnvironmentTask, Step
from mslime.rollout.environments.environment_pool import (
    EnvironmentFailedError,
    EnvironmentLostError,
    EnvironmentPool,
    OpenEnvironment,
)
from mslime.rollout.environments.protocol import EnvironmentJob

USER = "tests.unit.user_environments"
TASK = EnvironmentTask("Go.", None, {}, 0, 0, False, 5)


def within(
    work: Callable[[EnvironmentPool], Awaitable[Any]], kind: str = "Counting", workers: int = 1, *,
    limit_s: float = 20.0, memory_mib: float | None = None, **options: Any,
) -> Any:  # fmt: skip
    """What `work` makes of a pool of environments."""

    async def run() -> Any:
        pool = EnvironmentPool(EnvironmentJob(f"{USER}:{kind}", options, limit_s, memory_mib), workers)
        try:
            return await work(pool)
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(run(), 100))


async def begun(pool: EnvironmentPool, alone: bool = False) -> OpenEnvironment:
    environment = await pool.open(alone)
    await environment.reset(TASK)
    return environment


def notes(path: Path) -> list[str]:
    """What was called, in order."""
    return [line.rsplit(" ", 2)[0] for line in path.read_text().splitlines()]


def test_an_episode_is_played_on_one_thread_and_closed(tmp_path: Path):
    async def work(pool: EnvironmentPool) -> list[Any]:
        environment = await pool.open()
        first = await environment.reset(TASK)
        steps = [await environment.step("2"), await environment.step("1")]
        await environment.close()
        return [first, *steps]

    first, *steps = within(work, notes=str(tmp_path / "notes"))
    assert first == "Count to 3."
    assert steps == [Step("At 2.", 1.0, False), Step("At 3.", 1.0, True)]
    assert notes(tmp_path / "notes") == ["made", "reset", "step 2", "step 1", "close"]
    assert len({line.split()[-1] for line in (tmp_path / "notes").read_text().splitlines()}) == 1, "one thread"


def test_many_environments_share_few_processes_evenly_and_keep_apart(tmp_path: Path):
    async def work(pool: EnvironmentPool) -> list[Step]:
        opened = await asyncio.gather(*(begun(pool) for _ in range(12)))
        steps = await asyncio.gather(*(e.step(str(i)) for i, e in enumerate(opened)))
        await asyncio.gather(*(e.close() for e in opened))
        return steps

    steps = within(work, workers=2, notes=str(tmp_path / "notes"))
    assert [s.observation for s in steps] == [f"At {i}." for i in range(12)]
    made = [line.split()[1] for line in (tmp_path / "notes").read_text().splitlines() if line.startswith("made")]
    assert sorted(made.count(process) for process in set(made)) == [6, 6]


def test_methods_may_be_async_and_close_may_be_missing():
    async def work(pool: EnvironmentPool) -> list[Any]:
        environment = await pool.open()
        said = [await environment.reset(TASK), await environment.step("3")]
        await environment.close()
        return said

    first, step = within(work, "AsyncCounting")
    assert first == [{"role": "user", "content": "Count to 3."}]
    assert step == Step("At 3.", None, True, 7.0, {"sum": 3.0})


@pytest.mark.parametrize(("action", "said"), [
    ("raise", r"step raised ValueError: the group_gate is stuck \(.*user_environments.py:"),
    ("hang", r"step took longer than 0\.5 s"),
    ("stop", "step raised RuntimeError: StopIteration"),
    ("number", "step returned reward = 'one', which is not a finite number"),
    ("nan", "step returned reward = nan, which is not a finite number"),
    ("pair", r"step returned \('', 1.0\), which is neither a Step nor"),
    ("object", "step returned <object object at"),
    ("role", "step returned the message .*; expected .* with a role of system, user, tool"),
])  # fmt: skip
def test_what_an_environment_does_wrong_is_its_own_failure_and_others_go_on(tmp_path: Path, action: str, said: str):
    async def work(pool: EnvironmentPool) -> None:
        broken, other = await begun(pool), await begun(pool)
        with pytest.raises(EnvironmentFailedError, match=f"{USER}:Breaks: {said}"):
            await broken.step(action)
        assert (await other.step("2")).observation == "At 2."
        for environment in (broken, other):
            await environment.close()

    within(work, "Breaks", limit_s=0.5, notes=str(tmp_path / "notes"))
    assert notes(tmp_path / "notes").count("close") == 2, "the broken one is closed as well"


@pytest.mark.parametrize(("action", "said"), [
    ("exit", "step returned no answer: its process ended with exit code 7"),
    ("hold", "step took longer than 0.5 s and blocked its process"),
    ("memory", "step needed more memory than the 512 MiB of its process"),
])  # fmt: skip
@pytest.mark.slow
def test_where_another_one_may_be_to_blame_nobody_is_until_it_is_alone(action: str, said: str):
    async def work(pool: EnvironmentPool) -> None:
        suspect = await begun(pool)
        with pytest.raises(EnvironmentLostError, match=said):
            await suspect.step(action)
        await suspect.close()
        alone = await begun(pool, alone=True)
        beside = await begun(pool)
        with pytest.raises(EnvironmentFailedError, match=said):
            await alone.step(action)
        await alone.close()
        assert (await beside.step("2")).observation == "At 2.", "it shares no process with the one that is tried alone"

    within(work, "Breaks", limit_s=0.5, memory_mib=512)


def test_environments_that_shared_a_process_which_ended_are_lost_without_blame():
    async def work(pool: EnvironmentPool) -> None:
        culprit, other = await begun(pool), await begun(pool)
        with pytest.raises(EnvironmentLostError) as one:
            await culprit.step("exit")
        with pytest.raises(EnvironmentLostError, match="its process had ended") as two:
            await other.step("1")
        assert one.value.suspect and not two.value.suspect, "it was in no call, so it begins among others again"
        await asyncio.gather(culprit.close(), other.close())
        again = await begun(pool)
        assert (await again.step("1")).observation == "At 1."

    within(work, "Breaks")


def test_environments_that_are_tried_alone_wait_for_each_other():
    """One crash may concern hundreds, each of which would start a process at that moment."""

    async def work(pool: EnvironmentPool) -> None:
        first = await begun(pool, alone=True)
        second = asyncio.create_task(begun(pool, alone=True))
        shared = await begun(pool)
        assert not second.done() and len(pool._all) == 2
        await asyncio.gather(first.close(), shared.close())
        await (await second).close()

    within(work)


def test_a_process_that_starts_too_slowly_is_fatal_only_where_none_has_started(monkeypatch: pytest.MonkeyPatch):
    async def work(pool: EnvironmentPool) -> None:
        environment = await begun(pool)
        monkeypatch.setattr(worker_process, "START_SECONDS", 0.0)
        for _ in range(2):
            with pytest.raises(EnvironmentFailedError, match="took over 0 s"):
                await pool.open(alone=True)
        assert (await environment.step("1")).observation == "At 1."
        pool._size = 2
        assert (await pool.open())._home is environment._home, "there is one, which does for two"

    within(work)


def test_a_process_in_which_one_hangs_takes_no_further_ones_and_ends_with_its_last(tmp_path: Path):
    async def work(pool: EnvironmentPool) -> tuple[bool, bool]:
        hanging, other = await begun(pool), await begun(pool)
        home = hanging._home
        with pytest.raises(EnvironmentFailedError):
            await hanging.step("hang")
        await hanging.close()
        newer = await begun(pool)
        assert newer._home is not home
        assert (await other.step("1")).observation == "At 1."
        alive = home.alive
        await other.close()
        return alive, home.alive

    assert within(work, "Breaks", limit_s=0.5) == (True, False)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_a_call_that_nobody_waits_for_any_more_does_not_keep_an_environment_from_being_closed(
    tmp_path: Path, method: str
):
    async def work(pool: EnvironmentPool) -> None:
        environment = await (pool.open() if method == "reset" else begun(pool))
        call = asyncio.create_task(environment.reset(TASK) if method == "reset" else environment.step("1"))
        await asyncio.sleep(0)
        call.cancel()
        await environment.close()

    within(work, notes=str(tmp_path / "notes"))
    said = notes(tmp_path / "notes")
    assert said[0] == "made" and said[-1] == "close"


def test_a_closing_that_nobody_waits_for_any_more_goes_on(tmp_path: Path):
    """As when a run stops: its rollouts are cancelled while they close, then the pool is closed."""

    async def work(pool: EnvironmentPool) -> None:
        for environment in [await begun(pool) for _ in range(8)]:
            closing = asyncio.create_task(environment.close())
            await asyncio.sleep(0)
            closing.cancel()

    within(work, notes=str(tmp_path / "notes"))
    assert notes(tmp_path / "notes").count("close") == 8


def test_a_close_that_raises_is_told_and_harms_nothing(capsys: pytest.CaptureFixture[str]):
    async def work(pool: EnvironmentPool) -> Step:
        await (await begun(pool)).close()
        return await (await begun(pool)).step("1")

    assert within(work, "Breaks", method="close").observation == "At 1."
    assert "an environment was not closed: tests.unit.user_environments:Breaks: close raised" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "options", "field", "rule"), [
    ("Missing", {}, "rollout.environment", "has no function 'Missing'"),
    ("NoStep", {}, "rollout.environment", "has no method step"),
    ("OldReset", {}, "rollout.environment", "it is called with (self, task)"),
    ("Counting", {"size": 3}, "rollout.environment_options", "cannot be constructed with (size=3)"),
    ("made_by_a_function", {}, "rollout.environment", "is not a class"),
])  # fmt: skip
def test_a_class_that_cannot_be_used_is_refused_when_its_process_starts(
    kind: str, options: dict[str, Any], field: str, rule: str
):
    async def work(pool: EnvironmentPool) -> None:
        await pool.open()

    with pytest.raises(ConfigError) as caught:
        within(work, kind, **options)
    assert caught.value.field == field and rule in caught.value.rule

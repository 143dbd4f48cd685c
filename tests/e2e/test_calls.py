"""Errors of failed remote calls, on real Ray."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import ray

from mslime.config.data import EvalSetConfig
from mslime.config.errors import ConfigError, TrainerError, WorkerError, sync_error
from mslime.config.loader import build
from mslime.config.schema import DeadlineConfig
from mslime.rollout.manager import Manager
from mslime.run.ray_calls import HandleActor, RemoteHandle, call, gather
from mslime.run.ray_cluster import Cluster, _start_ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with patch.dict(os.environ):  # Ray sets some of its own, which runs of later tests must not inherit
        _start_ray({"num_cpus": 2, "include_dashboard": False})  # again where a crowded machine is too slow for Ray
        yield
        ray.shutdown()


@pytest.mark.parametrize("kind", [AttributeError, KeyError, ValueError])
def test_a_crash_in_another_process_comes_with_its_traceback(cluster: None, kind: type[Exception]) -> None:
    @ray.remote
    def crash() -> None:
        raise kind("the words of the cause")

    with pytest.raises(TrainerError, match="rank 3") as error:
        call(crash.remote(), "rank 3", "train", 60, "rank3.log")
    message = str(error.value)
    assert "in crash" in message and "the words of the cause" in message and "rank3.log" in message


def test_a_users_mistake_in_another_process_is_raised_as_it_is(cluster: None) -> None:
    @ray.remote
    def refuse() -> None:
        raise ConfigError("train.lr", -1, "must be positive", "set 1e-6")

    with pytest.raises(ConfigError, match="train.lr"):
        call(refuse.remote(), "rank 3", "train", 60)


def test_a_rank_that_died_is_named_before_one_that_lost_it(cluster: None) -> None:
    """The loss is known at once, the death a moment later."""

    @ray.remote(max_retries=0)
    def lose() -> None:
        raise sync_error("exchange", "trainer rank 0", "another trainer rank is gone")

    @ray.remote
    class Rank:
        def die(self) -> None:
            time.sleep(1)
            os._exit(1)

    with pytest.raises(WorkerError, match="trainer rank 1"):
        gather({"trainer rank 0": lose.remote(), "trainer rank 1": Rank.remote().die.remote()}, "weights", 60, {})


def test_a_ray_of_the_caller_s_own_is_left_alone(cluster: None) -> None:
    config = build({"model": {"path": "m"}, "data": {"prompts": ["p"]}, "cluster": {"device": "cpu"}})
    with pytest.raises(ConfigError, match="already connected to a Ray cluster"), Cluster(config, engines=False):
        pass
    assert ray.is_initialized()


def test_rows_that_nobody_waits_for_any_more_are_given_up_by_their_manager(cluster: None) -> None:
    """Another manager's engine has died, and the evaluation will begin again."""

    @ray.remote
    class FakeManagerActor(HandleActor):
        def __init__(self) -> None:
            self.begun, self.given_up = asyncio.Event(), asyncio.Event()
            self.objects = {"rollout": self}

        async def answer_rows(self, *args: object, **options: object) -> None:
            self.begun.set()
            try:
                await asyncio.sleep(600)
            finally:
                self.given_up.set()

        async def has_begun(self) -> bool:
            return await self.begun.wait()

        async def told(self) -> bool:
            return await asyncio.wait_for(self.given_up.wait(), 30)

    async def main() -> bool:
        actor = FakeManagerActor.remote()
        manager = RemoteHandle[Manager](actor, "rollout", "rollout manager 0", "manager0.log", DeadlineConfig())
        rows = asyncio.create_task(manager.ask(Manager.answer_rows, EvalSetConfig(name="held_out", path="p")))
        assert await actor.has_begun.remote()
        rows.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rows
        return await actor.told.remote()

    assert asyncio.run(main())

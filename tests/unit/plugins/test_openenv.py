"""The adapter of OpenEnv's protocol, against a server that only pretends: it speaks what openenv-core 0.3.0 speaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from mslime.rollout.environments import EnvironmentTask, Step
from mslime_plugins.environments import openenv as adapter
from mslime_plugins.environments.openenv import OpenEnv, ServerError


class FakeOpenEnvServer:
    """Counts up to 3, by `add` of an action. It refuses connections beyond `capacity`, as openenv-core does: with an
    error before anything is asked.

    Attributes:
        resets: what was handed to reset. closed: connections that said so.
    """

    def __init__(self, capacity: int = 8) -> None:
        self.capacity, self.open, self.closed, self.refused = capacity, 0, 0, 0
        self.resets: list[Any] = []

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.capacity:
            self.refused += 1
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.open += 1
        total = 0
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            asked = json.loads(message.data)
            if asked["type"] == "close":
                self.closed += 1
                break
            if asked["type"] == "reset":
                self.resets.append(asked["data"])
            elif asked["data"] == {"add": "break"}:
                break
            elif asked["data"] == {"add": "raise"}:
                await socket.send_json({"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}})
                continue
            elif not str(asked["data"].get("add")).isdigit():
                await socket.send_json({"type": "error", "data": {"message": "add: int", "code": "VALIDATION_ERROR"}})
                continue
            else:
                total += int(asked["data"]["add"])
            observation = {"total": total, "text": f"At {total}."}
            reward = None if asked["type"] == "reset" else 1.0
            await socket.send_json(
                {"type": "observation", "data": {"observation": observation, "reward": reward, "done": total >= 3}}
            )
        self.open -= 1
        return socket


TASK = EnvironmentTask("Go.", None, {}, 5, 0, False, 5)


def beside(fake: FakeOpenEnvServer, work: Callable[[str], Awaitable[Any]]) -> Any:
    """What `work` makes of the server's URL."""

    async def run() -> Any:
        app = web.Application()
        app.router.add_get("/ws", fake.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            return await work(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_an_episode_is_a_connection_with_reset_steps_and_close():
    fake = FakeOpenEnvServer()

    async def work(url: str) -> list[Any]:
        episode = OpenEnv([url], "add", "text", reset={"size": 4})
        said = [await episode.reset(TASK), await episode.step("2"), await episode.step("1")]
        await episode.close()
        return said

    assert beside(fake, work) == ["At 0.", Step("At 2.", 1.0, False), Step("At 3.", 1.0, True)]
    assert fake.closed == 1 and fake.resets[0]["size"] == 4


def test_rollouts_of_a_prompt_get_one_seed_and_others_another():
    fake = FakeOpenEnvServer()
    tasks = [
        EnvironmentTask("", None, metadata, group, index, evaluation, 7 * index)
        for metadata, group, index, evaluation in [
            ({}, 1, 0, False), ({}, 1, 1, False), ({}, 2, 0, False), ({}, 1, 0, True), ({"seed": 3}, 1, 0, False),
        ]
    ]  # fmt: skip

    async def work(url: str) -> None:
        for task in tasks:
            episode = OpenEnv(url, "add", "text")
            await episode.reset(task)
            await episode.close()

    beside(fake, work)
    first, same, other, evaluated, given = (r["seed"] for r in fake.resets)
    assert first == same and len({first, other, evaluated}) == 3 and given == 3


def test_the_model_may_say_the_whole_action_and_read_the_whole_observation():
    async def work(url: str) -> list[Any]:
        episode = OpenEnv(url, action_field=None)
        said = [await episode.reset(TASK), await episode.step('{"add": 3}')]
        said += [await episode.step("add 3"), await episode.step("[3]"), await episode.step('{"add": "x"}')]
        await episode.close()
        return said

    first, right, no_json, no_object, refused = beside(FakeOpenEnvServer(), work)
    assert json.loads(first) == {"total": 0, "text": "At 0."}
    assert right.done and json.loads(right.observation)["total"] == 3
    assert no_json.observation.startswith("Invalid action: Expecting value") and no_json.reward == 0.0
    assert no_object.observation == "Invalid action: it is not a JSON object"
    assert refused.observation == "Invalid action: VALIDATION_ERROR: add: int" and not refused.done


def test_what_breaks_at_the_server_is_an_error():
    async def work(url: str) -> None:
        episode = OpenEnv(url, "add", "words")
        with pytest.raises(ValueError, match="has no field 'words'; its fields: text, total"):
            await episode.reset(TASK)
        await episode.close()
        episode = OpenEnv(url, "add", "text")
        await episode.reset(TASK)
        with pytest.raises(ServerError, match="EXECUTION_ERROR: boom"):
            await episode.step("raise")
        with pytest.raises(ConnectionError, match="the server ended the connection"):
            await episode.step("break")
        await episode.close()

    beside(FakeOpenEnvServer(), work)


def test_a_server_that_is_full_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(adapter, "WAIT_S", 0.0)
    fake = FakeOpenEnvServer(capacity=1)

    async def work(url: str) -> str:
        first, second = OpenEnv(url, "add", "text"), OpenEnv(url, "add", "text")
        await first.reset(TASK)
        waiting = asyncio.create_task(second.reset(TASK))
        while not fake.refused:
            await asyncio.sleep(0)
        await first.close()
        said = await waiting
        await second.close()
        return said

    assert beside(fake, work) == "At 0." and fake.refused >= 1


@pytest.mark.parametrize("said", ["{", "[" * 100_000, "5", '{"a": ' * 3000])
def test_an_action_that_is_no_object_is_a_mistake_of_the_model(said: str) -> None:
    with pytest.raises(ValueError, match=r"nested too deep|not a JSON object|Expecting|delimiter"):
        OpenEnv("http://x", action_field=None).action(said)

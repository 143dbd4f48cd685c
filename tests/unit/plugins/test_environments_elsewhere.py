"""Environments that call a model server: what a rollout asks of theirs, and what it makes of the answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web

from mslime import network
from mslime.config.errors import ConfigError, RolloutError
from mslime.config.rollout import AgentLimits, RolloutConfig
from mslime.data.sample import Sample, SampleStatus, check_invariants
from mslime.rollout import function_contract
from mslime.rollout.agents.app import ModelEndpoint
from mslime.rollout.function_contract import check_rollout
from mslime.rollout.turns import Agents
from mslime.rollout.workflow import Engine, Episode, Task
from mslime_plugins.environments import nemo_gym
from mslime_plugins.environments.nemo_gym import NAME, NemoGym
from mslime_plugins.environments.verifiers import Verifiers, episode_of

answers: dict[str, Any] = {}
"""What the fake servers answer beside the reward, and what they were asked."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_contract, "LONGEST_BLOCK_S", 60.0)
    answers.clear()


async def said(base_url: str, key: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base_url}/{route}", json=body, headers={"Authorization": f"Bearer {key}"}) as response,
    ):
        return await response.json()


class FakeServer:
    """An HTTP server on loopback with one route."""

    route = "/run"
    url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.post(self.route, self._run)])
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _run(self, request: web.Request) -> web.Response:
        asked = answers["asked"] = await request.json()
        return web.json_response(await self.play(asked), status=answers.get("status", 200))

    async def play(self, asked: dict[str, Any]) -> Any:
        raise NotImplementedError


class FakeVerifiersServer(FakeServer):
    """`tools/serve_verifiers.py` with an agent of two turns for all environments."""

    async def play(self, asked: dict[str, Any]) -> Any:
        messages: list[Any] = [{"role": "user", "content": asked["task"]["prompt"]}]
        for follow_up in ("Sure?", None):
            reply = await said(
                asked["base_url"], asked["key"], "chat/completions", {"messages": messages, "model": "m"}
            )
            messages.append(reply["choices"][0]["message"])
            messages += [{"role": "user", "content": follow_up}] if follow_up else []
        right = messages[-1]["content"] == asked["task"]["answer"]
        return {"reward": float(right), "metrics": {"turns": 2.0, "odd": None}, "error": "", **answers.get("told", {})}


class FakeGym(FakeServer):
    """An agent server of NeMo Gym and its model server, with the schemas that nemo-gym 0.4.0 documents.

    The model server is `openai_model`'s: it sends what it gets to `policy_base_url`, with a key and a model of its own.
    """

    policy_base_url = ""

    async def play(self, asked: dict[str, Any]) -> Any:
        params = asked["responses_create_params"]
        for follow_up in (*(("Sure?",) if "follow_up" in answers else ()), None):
            sent = {**params, "model": "policy_model"}
            response = await said(self.policy_base_url, "policy_api_key", "responses", sent)
            if follow_up:
                more = [*response["output"], {"role": "user", "content": follow_up}]
                params = {**params, "input": [*params["input"], *more]}
        text = "".join(part["text"] for item in response["output"] if item["type"] == "message"
                       for part in item["content"])  # fmt: skip
        return {**asked, "response": response, "reward": float(text == asked["answer"]), "parsed": 1, "note": "x"}


async def by_verifiers(task: Task, engine: Engine) -> Episode:
    async with FakeVerifiersServer() as server:
        return await Verifiers(server.url, {"max_tokens": 9})(task, engine)


async def by_a_server_that_is_gone(task: Task, engine: Engine) -> Episode:
    async with FakeVerifiersServer() as server:
        pass
    return await Verifiers([server.url])(task, engine)


async def by_gym(task: Task, engine: Engine) -> Episode:
    gym = NemoGym("", 0, relay_key="policy_api_key")
    async with FakeGym() as server:
        gym._url = server.url

        async def find_relay() -> None:
            while not gym.relay.port:
                await asyncio.sleep(0)
            server.policy_base_url = f"http://127.0.0.1:{gym.relay.port}/v1"

        finding = asyncio.create_task(find_relay())
        found = await gym(task, engine)
        await finding
        stranger = NemoGym(server.url, 0, relay_key="k").relay
        async with stranger.serving(await engine.endpoint()):
            url = f"http://127.0.0.1:{stranger.port}/v1"
            refused = await said(url, "k", "responses", {"input": "x", "metadata": {}})
        assert refused["error"]["message"].startswith(f"metadata.{NAME} names no running rollout")
        assert (await engine.endpoint()).key not in json.dumps(answers["asked"]), "a Gym writes down what it is asked"
        return found


def rolled(function: str, metadata: dict[str, Any], *replies: str) -> list[Sample]:
    samples = check_rollout(f"{__name__}:{function}", replies, metadata=metadata)
    for sample in samples:
        check_invariants(sample)
    return samples


def trained(sample: Sample) -> str:
    return "".join(chr(t) for t in sample.tokens[sample.loss_mask])


def test_an_episode_of_verifiers_is_recorded_by_the_rollouts_endpoint_and_scored_there() -> None:
    task = {"prompt": "2 + 3?", "answer": "5", "idx": 7}
    (sample,) = rolled("by_verifiers", {"task": task}, "4", "5")
    assert trained(sample) == "4\0" + "5\0" and sample.reward == 1.0 and sample.scores["user/turns"] == 2.0
    assert answers["asked"]["task"] == task and answers["asked"]["sampling"] == {"max_tokens": 9}
    (wrong,) = rolled("by_verifiers", {"task": task}, "4", "6")
    assert wrong.reward == 0.0


@pytest.mark.parametrize(("function", "told", "said_of_it"), [
    ("by_verifiers", {"told": {"error": "HarnessError: it broke"}}, "HarnessError: it broke"),
    ("by_verifiers", {"told": {"reward": None}}, "reward None"),
    ("by_verifiers", {"status": 500}, "answered 500"),
    ("by_a_server_that_is_gone", {}, "ClientConnector"),
])  # fmt: skip
def test_what_goes_wrong_at_the_server_fails_the_rollout_in_words(
    function: str, told: dict[str, Any], said_of_it: str
) -> None:
    answers.update(told)
    with pytest.raises(RolloutError, match=said_of_it):
        rolled(function, {"task": {"prompt": "2 + 3?", "answer": "5"}}, "4", "5")


def one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout's second turn is refused."""

    def limited(settings: RolloutConfig, renderer: Any) -> Agents:
        return Agents(settings.model_copy(update={"limits": AgentLimits(turns=1)}), renderer)

    monkeypatch.setattr(function_contract, "Agents", limited)


@pytest.mark.parametrize("function", ["by_verifiers", "by_gym"])
def test_an_agent_that_breaks_for_want_of_room_ends_its_rollout_as_truncated(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second request is refused, and what its server makes of that is an error of its own."""
    asked = {"input": [{"role": "user", "content": "2 + 3?"}]}
    row = {"task": {"prompt": "2 + 3?", "answer": "5"}, "responses_create_params": asked, "answer": "5"}
    answers["follow_up"] = "Sure?"
    one_turn(monkeypatch)
    (sample,) = rolled(function, row, "4", "5")
    assert sample.status is SampleStatus.TRUNCATED and trained(sample) == "4\0" and sample.reward is None


def test_rows_without_a_task_name_the_command_that_makes_them() -> None:
    with pytest.raises(RolloutError, match="serve_verifiers.py tasks"):
        rolled("by_verifiers", {}, "4")
    with pytest.raises(RolloutError, match="responses_create_params"):
        rolled("by_gym", {}, "4")


def test_an_episode_of_a_gym_finds_its_rollout_by_its_metadata_and_brings_back_the_reward() -> None:
    row = {"responses_create_params": {"input": [{"role": "user", "content": "2 + 3?"}]}, "answer": "5", "level": 3}
    (sample,) = rolled("by_gym", row, "5")
    assert trained(sample) == "5\0" and sample.reward == 1.0
    assert {n: v for n, v in sample.scores.items() if n.startswith("user/")} == {"user/parsed": 1.0}
    assert answers["asked"]["responses_create_params"]["metadata"][NAME]


@pytest.mark.parametrize("reward", [True, float("nan"), "1", None])
def test_a_reward_is_a_finite_number(reward: object) -> None:
    assert repr(reward) in episode_of({"reward": reward}).failed


@pytest.mark.parametrize(("body", "headers", "status"), [
    (b"{", {}, 400), (b"[[],[]]", {}, 400), (b'{"metadata": [1]}', {}, 400), (b"[" * 10_000, {}, 400),
    (b"{}", {"Authorization": "Bearer other"}, 401), (b"{}", {"Authorization": "Bearer \xfc"}, 401),
    (b"{}", {"Content-Type": "text/plain"}, 415), (b"{}", {"Host": "evil.example"}, 421), (b" " * 30_000, {}, 413),
    (b"no gzip", {"Content-Encoding": "gzip"}, 400), (b'{"metadata": {"mslime_rollout": "%s"}}', {}, 502),
])  # fmt: skip
async def test_the_gyms_relay_refuses_what_is_no_request_of_a_gym(
    body: bytes, headers: dict[str, str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYM_KEY", "k")
    monkeypatch.setattr(nemo_gym, "MOST_BYTES", 20_000)

    relay = NemoGym("", 0, relay_key="env:GYM_KEY").relay
    sent = {"Content-Type": "application/json", "Authorization": "Bearer k", **headers}
    gone = f"http://127.0.0.1:{network.free_port()}"
    async with relay.serving(ModelEndpoint(gone, f"{gone}/v1", "key", "m")) as name, aiohttp.ClientSession() as http:
        url = f"http://127.0.0.1:{relay.port}/v1/responses"
        async with http.post(url, data=body.replace(b"%s", name.encode()), headers=sent) as response:
            assert response.status == status, await response.text()
            said = await response.json()
            assert said.get("detail") or said["error"]["message"]


def test_there_is_no_relay_without_a_key() -> None:
    with pytest.raises(TypeError, match="relay_key"):
        NemoGym("", 0)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="relay_key is empty"):
        NemoGym("", 0, relay_key="")
    with pytest.raises(ConfigError, match="GYM_KEY_THAT_IS_NOT_SET"):
        NemoGym("", 0, relay_key="env:GYM_KEY_THAT_IS_NOT_SET")

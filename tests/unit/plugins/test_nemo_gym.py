"""The adapter with servers of the real nemo-gym package, in a Python of its own, against a rollout's endpoint."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from mslime.config.errors import RolloutError
from mslime.data.sample import SampleStatus, check_invariants
from mslime.network import free_port
from mslime.rollout import function_contract
from mslime.rollout.agents.app import ModelEndpoint
from mslime.rollout.function_contract import check_rollout
from mslime_plugins.environments.nemo_gym import NemoGym
from tests.unit.plugins.test_environments_elsewhere import FakeServer, one_turn

SCRIPT = Path(__file__).parents[3] / "tests/fixtures/nemo_gym_env/sums.py"
ADD = {"type": "function", "name": "add", "description": "adds", "strict": True, "parameters": {
    "type": "object", "properties": {"numbers": {"type": "array", "items": {"type": "integer"}}},
    "required": ["numbers"]}}  # fmt: skip
CALL = '<tool_call>{"name": "add", "arguments": {"numbers": [2, 3]}}</tool_call>'

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


def newer_python() -> str:
    """A Python of 3.12 or 3.13, which nemo-gym 0.4.0 needs: on the path, or of pyenv's; empty where there is none."""
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.1[23].*/bin/python")
    for candidate in (shutil.which("python3.12"), shutil.which("python3.13"), *map(str, sorted(of_pyenv))):
        if candidate and not subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode:
            return candidate
    return ""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has nemo-gym: of MSLIME_NEMO_GYM_PYTHON, else of a new environment."""
    if given := os.environ.get("MSLIME_NEMO_GYM_PYTHON"):
        return Path(given)
    found = newer_python()
    if not found:
        pytest.skip("nemo-gym 0.4.0 needs Python 3.12 or 3.13, and there is none")
    home = tmp_path_factory.mktemp("nemo_gym")
    subprocess.run([found, "-m", "venv", home], check=True)
    subprocess.run([home / "bin/pip", "install", "-q", "nemo-gym==0.4.0"], check=True)
    return home / "bin/python"


@pytest.fixture(scope="module")
def rollout(python: Path) -> Iterator[NemoGym]:
    """Of an agent server whose model server asks the rollout's relay."""
    agent, model, resources, relay = (free_port() for _ in range(4))
    command = [python, SCRIPT, str(agent), str(model), str(resources), f"http://127.0.0.1:{relay}/v1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any(line.startswith("serving sums") for line in process.stdout), "the servers ended"
        yield NemoGym(f"http://127.0.0.1:{agent}", relay, relay_key="policy_api_key")
    finally:
        process.terminate()
        process.wait(30)


playing = list[NemoGym]()


async def play(task: Any, engine: Any) -> Any:
    return await playing[0](task, engine)


@pytest.fixture(autouse=True)
def named(rollout: NemoGym, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_contract, "LONGEST_BLOCK_S", 60.0)
    playing[:] = [rollout]


def row(question: str, answer: str | None) -> dict[str, Any]:
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": question}]
    told = {"responses_create_params": {"input": messages, "tools": [ADD]}}
    return told if answer is None else {**told, "answer": answer}


@pytest.mark.parametrize(("replies", "reward"), [((f"so {CALL}", "5"), 1.0), ((CALL, "6"), 0.0), (("5",), 1.0)])
def test_an_episode_of_the_package_is_trained_as_it_was_sampled(replies: tuple[str, ...], reward: float) -> None:
    (sample,) = check_rollout(f"{__name__}:play", replies, metadata=row("2 + 3?", "5"))
    check_invariants(sample)
    assert "".join(chr(t) for t in sample.tokens[sample.loss_mask]) == "".join(f"{reply}\0" for reply in replies)
    assert sample.reward == reward and sample.scores["user/tools_called"] == len(replies) - 1
    assert sample.scores["rollout/new_sequence/first"] == 1.0 and sample.scores["rollout/turns"] == len(replies)


def test_a_gyms_own_failure_is_a_failure_of_the_rollout_with_its_words() -> None:
    with pytest.raises(RolloutError, match=r"(?s)answered 500.*Field required"):
        check_rollout(f"{__name__}:play", ["5"], metadata=row("2 + 3?", None))


def test_an_agent_that_is_refused_for_want_of_room_ends_as_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    one_turn(monkeypatch)
    (sample,) = check_rollout(f"{__name__}:play", [CALL, "5"], metadata=row("2 + 3?", "5"))
    assert sample.status is SampleStatus.TRUNCATED and sample.reward is None


class FakeRollouts(FakeServer):
    """The endpoints of many rollouts: each answers with its own key, after all have asked."""

    route = "/v1/responses"

    def __init__(self, count: int) -> None:
        self._gate = asyncio.Barrier(count)

    async def _run(self, request: web.Request) -> web.Response:
        await self._gate.wait()
        key = request.headers["Authorization"].removeprefix("Bearer ")
        text = {"type": "output_text", "text": key, "annotations": []}
        said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}
        return web.json_response({
            "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": [said],
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
        })  # fmt: skip

    def engine(self, key: str) -> Any:
        return FakeEngine(ModelEndpoint(self.url, f"{self.url}/v1", key, "m"))


class FakeEngine:
    def __init__(self, endpoint: ModelEndpoint) -> None:
        self._endpoint = endpoint

    async def endpoint(self) -> ModelEndpoint:
        return self._endpoint


class FakeTask:
    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata


def test_rollouts_under_way_at_once_share_the_gyms_model_server_and_get_their_own_replies(rollout: NemoGym) -> None:
    async def play_all(count: int) -> list[float | None]:
        async with FakeRollouts(count) as rollouts:
            calls = [
                rollout(FakeTask(row("which are you?", f"key{i}")), rollouts.engine(f"key{i}"))  # type: ignore[arg-type]
                for i in range(count)
            ]
            return [episode.reward for episode in await asyncio.gather(*calls)]

    assert asyncio.run(play_all(16)) == [1.0] * 16

"""Agents and SDKs that nobody here wrote, each in an environment of its own, against a rollout's endpoint.

A client is a script in `tests/clients/programs`, told the endpoint's `url`, `openai_url` and key. It prints what was
said last. What the model saw must be what is trained, in as many sequences as docs/coding_agents.md says. The words are
scripted; the rest is mslime's. An environment lies in <environment>/programs/NAME, or where MSLIME_TEST_PROGRAMS says,
and is made again when its packages change.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.agents import coding
from mslime.data.sample import Sample
from mslime.rollout.agents.app import ModelEndpoint, ModelServer
from tests.unit.plugins.test_nemo_gym import newer_python
from tests.unit.test_chat_session import Chat

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]
PROGRAMS = Path(__file__).parents[1] / "clients/programs"
BESIDE = Path(os.environ.get("MSLIME_TEST_PROGRAMS", Path(sys.prefix) / "programs"))


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD = "<think>hm</think>" + call("add", a=1, b=2)
EDIT = "a.txt\n```\n<<<<<<< SEARCH\nhello\n=======\nthree\n>>>>>>> REPLACE\n```\n"


def field(**values: str) -> str:
    """As dspy writes what it asks for."""
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in values.items()) + "[[ ## completed ## ]]"


@dataclass(frozen=True)
class Client:
    """Attributes:
    packages: of pip; of npm, where the first begins with `npm:`.
    texts: that the model says. sequences: that they are trained in. room: tokens of the context.
    """

    packages: str
    texts: tuple[str, ...] = (ADD, "three")
    sequences: int = 1
    room: int = 150_000


CLIENTS = {
    "ag2.py": Client("ag2[openai]==1.2.1"),
    "ai_sdk.mjs": Client("npm: ai@6.0.326 @ai-sdk/openai@3.0.141 zod@4"),
    "aider.sh": Client("aider-chat==0.86.2", (EDIT,)),
    "anthropic.py": Client("anthropic==2.14.0"),
    "autogen.py": Client("autogen-agentchat==0.7.5 autogen-ext[openai]==0.7.5"),
    "claude_code.py": Client(
        "claude-agent-sdk==0.2.189", (call("Bash", command="cat a.txt", description="x"), "three")
    ),
    "codex.sh": Client("npm: @openai/codex@0.171.0", (call("exec_command", cmd="cat a.txt"), "three")),
    "crewai.py": Client("crewai==1.15.30 litellm==1.110.2"),
    "dspy.py": Client(
        "dspy==3.4.1",
        (
            field(next_thought="add", next_tool_name="add", next_tool_args='{"a": 1, "b": 2}'),
            field(next_thought="done", next_tool_name="finish", next_tool_args="{}"),
            field(reasoning="added", answer="three"),
        ),
        sequences=3,
    ),
    "google_adk.py": Client("google-adk==2.13.0 litellm==1.110.2"),
    "harbor.py": Client("harbor==0.26.0", ("one", "three"), sequences=2),
    "inspect_ai.py": Client("inspect-ai==0.3.285 openai==3.57.0", ("three",)),
    "langchain_anthropic.py": Client("langchain==1.5.2 langchain-anthropic==1.7.10"),
    "langgraph.py": Client("langchain==1.5.2 langgraph==1.2.24 langchain-openai==1.7.4"),
    "litellm.py": Client("litellm==1.110.2", room=4000),
    "lm_eval.sh": Client("lm-eval[api]==0.4.13", ("three",)),
    "mini_swe_agent.py": Client(
        "mini-swe-agent==2.4.6",
        (
            "I look." + call("bash", command="cat a.txt"),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo three"),
        ),
    ),
    "openai_agents.py": Client("openai-agents==0.24.0 openai==3.57.0"),
    "pydantic_ai.py": Client("pydantic-ai-slim[openai]==2.68.0"),
    "qwen_code.sh": Client(
        "npm: @qwen-code/qwen-code@0.15.10",
        (call("run_shell_command", command="cat a.txt", is_background=False), "three"),
    ),
    "smolagents.py": Client("smolagents[openai]==1.26.0", (ADD, call("final_answer", answer="three")), sequences=2),
}


def environment(name: str) -> Path:
    """Where a client's packages are: a directory with `bin`. They are installed where they are not."""
    packages, place = CLIENTS[name].packages, BESIDE / name
    installed = place / "installed"
    if installed.exists() and installed.read_text() == packages:
        return place
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if packages.startswith("npm:"):
        if shutil.which("npm") is None:
            pytest.fail(f"{name} needs Node with npm")
        command = ["npm", "install", "--prefix", str(place), "--no-audit", "--no-fund", *packages.split()[1:]]
        ran(command)
        (place / "bin").symlink_to(place / "node_modules/.bin")
    else:
        ran([newer_python() or sys.executable, "-m", "venv", str(place)])
        ran([str(place / "bin/python"), "-m", "pip", "install", "-q", "--no-input", "--no-compile", *packages.split()])
    installed.write_text(packages)
    return place


def ran(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"


def command_of(name: str, place: Path) -> list[str]:
    if name.endswith(".py"):
        return [str(place / "bin/python"), "-P", str(PROGRAMS / name)]
    if name.endswith(".sh"):
        return ["bash", "-eu", "-o", "pipefail", str(PROGRAMS / name)]
    shutil.copy(PROGRAMS / name, place)  # Node looks for packages where a script lies
    return ["node", str(place / name)]


class FakeEngine:
    """What a rollout function may ask for: the endpoint of a rollout."""

    def __init__(self, endpoint: ModelEndpoint) -> None:
        self._endpoint = endpoint

    async def endpoint(self) -> ModelEndpoint:
        return self._endpoint


async def said(command: list[str], place: Path, home: Path) -> str:
    """The last line that it prints; it must end well."""
    own = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(home), "LITELLM_LOCAL_MODEL_COST_MAP": "True",
           "CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "MSWEA_CONFIGURED": "true"}  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, cwd=home, env=own, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode == 0, (out.decode()[-1500:], errors.decode()[-3000:])
    return out.decode().strip().splitlines()[-1]


def check(chat: Chat, sequences: int) -> None:
    """All texts were said to the client, each is trained where it was sampled, and nothing else is."""
    assert not chat.engine.texts, f"never asked for: {chat.engine.texts}"
    chat.engine.check()
    assert all(turn.delivered for turn in chat.session.turns)
    trained: list[Sample] = chat.engine.trained()
    assert len(trained) == sequences, chat.session.reasons
    assert sum(int(s.loss_mask.sum()) for s in trained) == sum(len(reply) for _, _, reply in chat.engine.saw)


def converse(chat: Chat, work: Any) -> Any:
    async def all_of_it() -> Any:
        server = ModelServer()
        endpoint, session = await server.open(chat.session)
        try:
            return await work(endpoint)
        finally:
            await server.end(session)
            await chat.close()
            await server.close()

    return asyncio.run(asyncio.wait_for(all_of_it(), 300))


@pytest.mark.parametrize("name", CLIENTS)
def test_what_a_program_of_others_is_told_is_trained_as_it_was_sampled(name: str, tmp_path: Path) -> None:
    client, place = CLIENTS[name], environment(name)
    chat = Chat(*client.texts, room=client.room)
    (tmp_path / "a.txt").write_text("hello\n")
    command = command_of(name, place)

    async def work(at: ModelEndpoint) -> str:
        return await said([*command, at.url, at.openai_url, at.key], place, tmp_path)

    last = converse(chat, work)
    assert "three" in last
    check(chat, client.sequences)


def test_the_example_with_claude_code_rewards_what_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    (claude,) = environment("claude_code.py").glob("lib/*/site-packages/claude_agent_sdk/_bundled/claude")
    monkeypatch.setattr(coding, "COMMAND", (str(claude), *coding.COMMAND[1:]))
    write = call("Bash", command="cp a.txt answer.txt", description="x")
    chat = Chat(write, "three", room=150_000)

    class FakeTask:
        text, metadata, label = "copy a.txt to answer.txt", {"files": {"a.txt": "hello\n"}}, "hello"

    found = converse(chat, lambda at: coding.fix(FakeTask(), FakeEngine(at)))  # type: ignore[arg-type]
    assert found.reward == 1.0, found
    check(chat, 1)

"""Clients of two versions, and an agents SDK, in processes of their own: two turns with a tool, whole and as a stream.

What they are told is what the scripted engine said, and the two turns are one sequence of the very tokens it saw.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from mslime.rollout.agents.app import ModelServer
from tests.unit.test_chat_session import CALL, Chat

ROOT = Path(__file__).parents[2]
LISTED = ROOT / "requirements/test-clients.txt"
PINNED = dict(line.split("==") for line in LISTED.read_text().split() if "==" in line)
BESIDE = Path(os.environ.get("MSLIME_TEST_CLIENTS", Path(sys.prefix) / "clients"))
APIS, STREAMS = ("chat", "responses", "messages"), ("", "+stream")


@pytest.fixture
def beside() -> Path:
    """Where the packages of the second version are."""
    if not (BESIDE / "openai").is_dir():
        pytest.skip(f"there are no clients in {BESIDE}: bash scripts/install.sh --dev installs them")
    return BESIDE


def converse(ways: list[str], path: list[Path]) -> dict[str, Any]:
    """What the agent program says of its conversations, each of which was with a rollout of its own."""

    async def work() -> dict[str, Any]:
        server, chats, given = ModelServer(), list[Chat](), list[str]()
        for way in ways:
            chat = Chat("<think>hm</think>" + CALL, "three")
            chats.append(chat)
            endpoint, _ = await server.open(chat.session)
            given += [way, endpoint.url, endpoint.key]
        try:
            found = await run_agent(given, path)
        finally:
            await server.close()
        for way, chat in zip(ways, chats, strict=True):
            check(way, chat, found[way])
        return found

    return asyncio.run(asyncio.wait_for(work(), 240))


async def run_agent(given: list[str], path: list[Path]) -> dict[str, Any]:
    """The program in a process of its own, which finds packages in `path` first."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.clients.agent", *given, env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return json.loads(out)


def check(way: str, chat: Chat, told: dict[str, Any]) -> None:
    """One sequence, in which both replies are trained, of the tokens that the engine saw and said."""
    assert told == {"arguments": {"a": 1, "flag": False}, "text": "three"}, way
    a, b = chat.session.forest.turns
    assert b.parent is a and a.sample is b.sample and a.delivered and b.delivered, (way, chat.session.reasons)
    (_, prompt, said), (_, before, last) = chat.engine.saw
    tokens = a.sample.tokens.tolist()
    assert tokens == before + last and tokens[: a.end] == prompt + said, way
    assert a.sample.loss_mask.nonzero()[0].tolist() == [*range(a.start, a.end), *range(b.start, b.end)], way
    chat.engine.check()


@pytest.mark.slow
def test_two_turns_with_the_clients_of_the_environment() -> None:
    found = converse([api + stream for api in APIS for stream in STREAMS], [])
    assert found["versions"] == {name: version(name) for name in ("openai", "anthropic")}


@pytest.mark.nightly
def test_two_turns_with_clients_of_another_version(beside: Path) -> None:
    versions = converse([api + stream for api in APIS for stream in STREAMS], [beside])["versions"]
    assert versions == {name: PINNED[name] for name in versions}
    assert all(theirs.split(".")[0] != version(name).split(".")[0] for name, theirs in versions.items())


@pytest.mark.nightly
def test_two_turns_with_an_agents_sdk(beside: Path) -> None:
    converse([api + stream for api in ("sdk", "sdk_responses") for stream in STREAMS], [beside])

"""Test a rollout function against its contract, without a model: for use in user tests.

from mslime.rollout.function_contract import check_workflow

def test_my_agent():
    sample = check_workflow("my_project.rollouts:agent", replies=["<calc>2+3</calc>", "5"])
    assert sample.response.endswith("5")
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mslime.backends.sglang.generating import GenerateRequest, GenerateResult
from mslime.config.errors import EngineError, RolloutError
from mslime.config.loader import build
from mslime.config.model_facts import ModelFacts
from mslime.data.sample import Sample
from mslime.data.source import Prompt
from mslime.rollout.agents.call_forms import object_call
from mslime.rollout.agents.messages import Tools
from mslime.rollout.agents.renderer import Parsed
from mslime.rollout.generation import EngineLimits, Generator, GroupGate, Sampling, Traffic
from mslime.rollout.group_tracker import new_group
from mslime.rollout.turns import Agents, Rollout
from mslime.rollout.workflow import SETTING, load_workflow

LONGEST_BLOCK_S = 1.0
Messages = Sequence[Mapping[str, Any]]


class _Characters:
    """A tokenizer whose tokens are characters; 0 ends a turn."""

    eos_token_id, vocab_size, special_ids = 0, 0x110000, frozenset({0})

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in ids if i)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        return "".join(f"{m['content']}\n" for m in messages)

    def marks(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> None:
        return None

    def for_thread(self) -> _Characters:
        return self


class _Plain:
    """A renderer for them: one line per message; tool calls are JSON between `<tool_call>` and `</tool_call>`."""

    name, stop_ids = "plain", frozenset({0})

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        return [ord(c) for m in messages for c in f"{m['role']}: {m['content']}\n"]

    def extend(self, before: Sequence[int], sampled: int, new: Sequence[Mapping[str, Any]], tools: Tools) -> list[int]:
        return [*before, ord("\n"), *self.render(new, tools)]

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Tools) -> Parsed:
        text = self.spell(sampled)
        found = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
        calls = tuple(object_call(call, f"<tool_call>{call}</tool_call>") for call in found)
        return Parsed(re.sub(r"<tool_call>.*?</tool_call>", "", text, flags=re.DOTALL), calls=calls)

    def spell(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids if i)


class _Script:
    """An engine that returns scripted replies in turn, each interrupted in its middle, as by a weight update."""

    def __init__(self, replies: Sequence[str]) -> None:
        self.clients: list[object] = [self]
        self.dead: dict[str, EngineError] = {}
        self.version, self.sampled = 0, list[int]()
        self._replies: Iterator[str] = iter(replies)
        self._rest = dict[str, list[int]]()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        await asyncio.sleep(0)
        sequence = request.rid.rpartition("-")[0]
        now, finish = self._rest.pop(sequence, None), "stop"
        if now is None:
            reply, finish = [ord(c) for c in next(self._replies, "")], "abort"
            now, self._rest[sequence] = reply[: len(reply) // 2], [*reply[len(reply) // 2 :], 0]
        now = now[: request.max_new_tokens]
        if len(now) == request.max_new_tokens:
            finish = "length"
            self._rest.pop(sequence, None)
        spans, self.version = ((self.version, 0, len(now)),) if now else (), self.version + (finish == "abort")
        self.sampled += now
        log_probs = np.full(len(now), -1.0, np.float32)
        return GenerateResult(np.asarray(now, np.int32), log_probs, finish, spans, None, None, 0, "", "script")


def check_workflow(
    function: str,
    replies: Sequence[str] = ("A reply.",),
    *,
    prompt: str | Messages = "What is 2 + 3?",
    label: Any = "5",
    metadata: Mapping[str, Any] | None = None,
    tools: Tools | None = None,
) -> Sample:
    """Call a rollout function once on a fake engine; tokens are characters. See `check_rollout`.

    Returns:
        The finished sample, not scored; of several sequences the one that a per-sample reward would score.
    """
    return check_rollout(function, replies, prompt=prompt, label=label, metadata=metadata, tools=tools)[-1]


def check_rollout(
    function: str,
    replies: Sequence[str] = ("A reply.",),
    *,
    prompt: str | Messages = "What is 2 + 3?",
    label: Any = "5",
    metadata: Mapping[str, Any] | None = None,
    tools: Tools | None = None,
) -> list[Sample]:
    """Call a rollout function once on a fake engine; tokens are characters.

    Args:
        function: `module:function`.
        replies: the engine's replies by turn, each interrupted once in its middle; empty turns after the last.
        prompt: a text, or chat messages, which then become `task.messages`.
        label, metadata, tools: of the task.

    Returns:
        The finished samples, not scored.

    Raises:
        ConfigError: the function was not found or cannot be called.
        RolloutError: it raised, changed its sample in a forbidden way, blocked other rollouts, or left metadata that
            cannot be saved.
    """
    messages = None if isinstance(prompt, str) else [dict(m) for m in prompt]
    tokens = [ord(c) for c in prompt] if isinstance(prompt, str) else _Plain().render(prompt, tools or ())
    offered = None if tools is None else [dict(t) for t in tools]
    row = Prompt(tokens, label, dict(metadata or {}), "made up", messages=messages, tools=offered)
    return asyncio.run(_tried(function, replies, row))


async def _tried(function: str, replies: Sequence[str], row: Prompt) -> list[Sample]:
    workflow, tokenizer, script = load_workflow(function), _Characters(), _Script(replies)
    config = build({"model": {"path": "."}, "data": {"prompts": ["p.jsonl"]}, "rollout": {"function": function}})
    model = ModelFacts(
        vocab_size=_Characters.vocab_size, max_positions=1 << 20, num_layers=0, moe_layer_ids=(), num_experts=0, top_k=0
    )
    generator = Generator(
        config, script, tokenizer, model, EngineLimits(), lambda: script.version, lambda *request: None
    )
    group = new_group(0, row, 1)
    group_gate, sampling = (
        GroupGate(Traffic(open=True), admitted=True),
        Sampling.for_training(config.rollout, config.train.replay, model, EngineLimits()),
    )
    agents = Agents(config.rollout, _Plain)
    rollout = Rollout(group, 0, "g0", function, generator, sampling, group_gate, agents)
    watch = asyncio.create_task(_longest_block())
    await asyncio.sleep(0)
    try:
        await rollout.play(workflow, rollout.task(config.seed, evaluation=False))
    finally:
        await agents.close()
        watch.cancel()
        (blocked,) = await asyncio.gather(watch)
    where = f"{SETTING} {function}"
    if blocked > LONGEST_BLOCK_S:
        raise RolloutError(where, f"{blocked:.1f} s", "blocked the event loop that all rollouts share",
                           "await long operations, or run them with asyncio.to_thread")  # fmt: skip
    trained = [token for s in group.samples for token in s.tokens[s.loss_mask].tolist()]
    assert not Counter(trained) - Counter(script.sampled), "trained tokens are the engine's, each once"
    return group.samples


async def _longest_block() -> float:
    """Measure, until cancelled, the longest time in seconds for which the event loop was blocked."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return max(longest, time.monotonic() - last)

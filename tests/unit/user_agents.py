"""Rollout functions that chat, as users write them: in the function itself, and through the clients of others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import anthropic
import openai

from examples.proposer_solver import agents as proposer_solver
from mslime.data.sample import Sample
from mslime.rollout.agents.renderer import Parsed, ParsedCall, Renderer
from mslime.rollout.agents.template import TemplateRenderer
from mslime.rollout.function_contract import _Plain
from mslime.rollout.workflow import Engine, Episode, Task
from tests.fixtures import chat_templates

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {}}},
    }
]


def answer(call: Any) -> dict[str, Any]:
    """What the tool says to a call, in chat completions' form."""
    numbers = json.loads(call.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": str(sum(numbers.values()))}


async def calculates(task: Task, engine: Engine) -> None:
    messages: list[Any] = [*(task.messages or [{"role": "user", "content": task.text}])]
    while True:
        reply = await engine.chat(messages, TOOLS)
        messages.append(reply.message)
        if not reply.calls:
            return
        messages += [answer(call) for call in reply.calls]


async def with_openai(task: Task, engine: Engine) -> Episode:
    endpoint = await engine.endpoint()
    async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": task.text}]
        while True:
            got = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=TOOLS)
            said = got.choices[0].message
            messages.append(said)
            if not said.tool_calls:
                return Episode(reward=1.0, metrics={"length": len(messages)})
            for call in said.tool_calls:
                assert call.type == "function"
                total = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})


async def sends_what_is_no_token(task: Task, engine: Engine) -> None:
    endpoint = await engine.endpoint()
    async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key, max_retries=0) as client:
        for prompt in ([5, 2_000_000_000], [*map(ord, "ask"), *map(ord, "x\0"), 2_000_000_000]):
            try:
                await client.completions.create(model="m", prompt=prompt)
            except openai.BadRequestError as error:
                assert "is not a token id of this model" in str(error)
            else:
                raise AssertionError("was answered")
            await client.completions.create(model="m", prompt=[*map(ord, "ask")])


async def appends_what_is_no_token(task: Task, engine: Engine) -> None:
    sample = engine.new_sample()
    engine.append(sample, [5, task.label])


async def with_anthropic(task: Task, engine: Engine) -> None:
    endpoint = await engine.endpoint()
    async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key) as client:
        await client.messages.create(model="any", max_tokens=99, messages=[{"role": "user", "content": task.text}])


async def proposes_and_solves(task: Task, engine: Engine) -> list[Sample]:
    """Two agents at once, whose conversations are sequences of one rollout."""
    replies = await asyncio.gather(
        *(engine.chat([{"role": "user", "content": f"{who}: {task.text}"}]) for who in ("propose", "solve"))
    )
    return [reply.sample for reply in replies]


async def until_it_is_full(task: Task, engine: Engine) -> None:
    """An agent that dies of what it is told: that nothing fits any more."""
    endpoint = await engine.endpoint()
    async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key, max_retries=2) as client:
        messages: list[Any] = [{"role": "user", "content": task.text}]
        while True:
            got = await client.chat.completions.create(model="any", messages=messages)
            messages += [got.choices[0].message, {"role": "user", "content": "more " * 300_000}]


async def leaves_early(task: Task, engine: Engine) -> None:
    """A client that is gone before the reply, and a reply that is received."""
    endpoint = await engine.endpoint()
    async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key, max_retries=0) as client:
        question: list[Any] = [{"role": "user", "content": task.text}]
        await client.chat.completions.create(model="any", messages=question)
        lost = asyncio.create_task(client.chat.completions.create(model="any", messages=question))
        await asyncio.sleep(0)
        lost.cancel()


async def asks_nonsense(task: Task, engine: Engine) -> None:
    await engine.chat([{"role": "assistant", "content": "Sure"}])


async def dies(task: Task, engine: Engine) -> None:
    await engine.chat([{"role": "user", "content": task.text}])
    raise KeyError("no such tool")


async def waits_for_a_dead_agent(task: Task, engine: Engine) -> None:
    """An agent that dies after its first reply, in one rollout of the step."""
    await engine.chat([{"role": "user", "content": "hello"}])
    if task.group_id == 1 and task.index == 0:
        await asyncio.Event().wait()


def plain(tokenizer: Any, thinking: Any) -> Renderer:
    """Tokens are characters."""
    return _Plain()


class CallsThenAnswers(TemplateRenderer):
    """For models that say anything at all: their first reply is a call of the tool, whatever it says."""

    def __init__(self, tokenizer: Any, thinking: Any) -> None:
        tokenizer.chat_template = chat_templates.HERMES
        super().__init__(tokenizer, thinking)

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Any) -> Parsed:
        named = [tool["function"]["name"] for tool in tools]
        if named != ["add"] or "<tool_response>" in self.spell(prompt):
            return super().parse(sampled, prompt, tools)
        return Parsed("", calls=(ParsedCall("add", '{"a":2,"b":3}', ""),))


async def two_long_turns_with_openai(task: Task, engine: Engine) -> None:
    """A call, its result, and an answer."""
    endpoint = await engine.endpoint()
    async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key, max_retries=0) as client:
        asked: Any = {"model": endpoint.model, "tools": TOOLS, "max_tokens": 300, "temperature": 0.1}
        messages: list[Any] = [{"role": "user", "content": task.text}]
        said = (await client.chat.completions.create(messages=messages, **asked)).choices[0].message
        assert said.tool_calls
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "5"}
        await client.chat.completions.create(messages=[*messages, said, result], **asked)


class CallsTwice(TemplateRenderer):
    """For models that say anything at all: their first two replies are calls of the calculator."""

    def parse(self, sampled: Sequence[int], prompt: Sequence[int], tools: Any) -> Parsed:
        if not tools or tools[0]["function"]["name"] != "multiply" or self.spell(prompt).count("<tool>") > 1:
            return super().parse(sampled, prompt, tools)
        return Parsed("", calls=(ParsedCall("multiply", '{"a":2,"b":3}', ""),))


async def solves_whatever_is_proposed(task: Task, engine: Engine) -> Episode:
    """Proposer and solvers, for models that say anything at all: every proposal will do."""
    proposer_solver.valid = lambda digits, first: True
    return await proposer_solver.propose_and_solve(task, engine)


async def rewards_each_reply(task: Task, engine: Engine) -> Episode:
    """Four APIs, five replies; each is worth what it says, and names the response by the id that its client shows."""
    endpoint = await engine.endpoint()
    ask: list[Any] = [{"role": "user", "content": task.text}]
    async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
        two = await client.chat.completions.create(model="any", messages=ask, n=2)
        third = await client.responses.create(model="any", input="third")
        fourth = await client.completions.create(model="any", prompt="fourth")
    async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key) as client:
        fifth = await client.messages.create(
            model="any", max_tokens=99, messages=[{"role": "user", "content": "fifth"}]
        )
    said = [(two.id, c.index, c.message.content) for c in two.choices]
    said += [(third.id, 0, third.output_text), (fourth.id, 0, fourth.choices[0].text)]
    said += [(fifth.id, 0, "".join(block.text for block in fifth.content if block.type == "text"))]
    return Episode(reward=0.0, step_rewards=[(name, i, float(text or "nan")) for name, i, text in said])


async def rewards_what_was_not_said(task: Task, engine: Engine) -> Episode:
    endpoint = await engine.endpoint()
    async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
        got = await client.completions.create(model="any", prompt="once")
    return Episode(step_rewards=[(got.id, 1, 1.0)])


async def rewards_a_reply_of_a_branch(task: Task, engine: Engine) -> Episode:
    """Two replies to one history. The second begins a branch, which alone is returned; it has the reply before them."""
    before, _, second = await three_replies(engine)
    return Episode([second.sample], reward=0.0, step_rewards=[(f"chatcmpl-{before.reply.echo}", 0, 0.5)])


async def rewards_a_reply_that_is_not_returned(task: Task, engine: Engine) -> Episode:
    _, first, second = await three_replies(engine)
    return Episode([second.sample], reward=0.0, step_rewards=[(f"chatcmpl-{first.reply.echo}", 0, 0.5)])


async def rewards_a_reply_that_was_cut(task: Task, engine: Engine) -> Episode:
    before, _, _ = await three_replies(engine)
    engine.cut(before.sample, before.end - 1)
    return Episode([before.sample], reward=0.0, step_rewards=[(f"chatcmpl-{before.reply.echo}", 0, 0.5)])


async def three_replies(engine: Any) -> Sequence[Any]:
    """The turns of a reply and of two to the same history that goes on from it."""
    endpoint = await engine.endpoint()
    async with openai.AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
        messages: list[Any] = [{"role": "user", "content": "first"}]
        got = await client.chat.completions.create(model="any", messages=messages)
        messages += [got.choices[0].message, {"role": "user", "content": "again"}]
        for _ in range(2):
            await client.chat.completions.create(model="any", messages=messages)
    turns: Sequence[Any] = engine._chats._begun.turns
    return turns

"""An agent that adds by a tool, in two turns: through OpenAI's clients, Anthropic's, or the OpenAI agents SDK.

    python -m tests.clients.agent HOW URL KEY...

Each HOW, a name of `WAYS` and perhaps +stream, is followed by the address and key of the rollout that it talks to. It
prints a line of JSON: the versions of the packages, and of each conversation what the tool was given and what was said
last. It runs in a process of its own, since a process has one version of a package.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

QUESTION, ANSWER = "what is 1 and 2?", "3"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "flag": {"type": "boolean"}}}
Said = dict[str, Any]
"""{arguments: of the call, text: of the last reply}"""


async def chat(url: str, key: str, stream: bool) -> Said:
    """OpenAI's chat completions."""
    openai: Any = importlib.import_module("openai")
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]

    async def ask() -> Any:
        asked = {"model": "m", "messages": messages, "tools": tools}
        if not stream:
            return (await client.chat.completions.create(**asked)).choices[0].message.model_dump()
        said: Any = {"role": "assistant", "content": "", "tool_calls": []}
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            for delta in (choice.delta for choice in chunk.choices):
                said["content"] += delta.content or ""
                for call in delta.tool_calls or ():
                    if call.id:
                        said["tool_calls"].append({"id": call.id, "type": "function", "function": {
                            "name": call.function.name, "arguments": ""}})  # fmt: skip
                    said["tool_calls"][call.index]["function"]["arguments"] += call.function.arguments or ""
        return said

    first = await ask()
    call = first["tool_calls"][0]
    messages += [first, {"role": "tool", "tool_call_id": call["id"], "content": ANSWER}]
    return {"arguments": json.loads(call["function"]["arguments"]), "text": (await ask())["content"]}


async def responses(url: str, key: str, stream: bool) -> Said:
    """OpenAI's responses."""
    openai: Any = importlib.import_module("openai")
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    tools = [{"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": False}]
    history: list[Any] = [{"role": "user", "content": QUESTION}]

    async def ask() -> Any:
        if not stream:
            return await client.responses.create(model="m", input=history, tools=tools)
        async with client.responses.stream(model="m", input=history, tools=tools) as events:
            return await events.get_final_response()

    first = await ask()
    call = next(item for item in first.output if item.type == "function_call")
    history += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": ANSWER}]
    return {"arguments": json.loads(call.arguments), "text": (await ask()).output_text}


async def messages(url: str, key: str, stream: bool) -> Said:
    """Anthropic's messages."""
    anthropic: Any = importlib.import_module("anthropic")
    client = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0, timeout=120)
    history: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]

    async def ask() -> Any:
        asked = {"model": "m", "max_tokens": 400, "messages": history, "tools": tools}
        if not stream:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as events:
            return await events.get_final_message()

    first = await ask()
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": ANSWER}
    history += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    return {"arguments": call.input, "text": (await ask()).content[-1].text}


async def sdk(url: str, key: str, stream: bool, by_responses: bool = False) -> Said:
    """The agents SDK, which calls the tool by itself."""
    agents: Any = importlib.import_module("agents")
    openai: Any = importlib.import_module("openai")
    agents.set_tracing_disabled(True)
    given: list[Any] = []

    @agents.function_tool
    def add(a: int, flag: bool) -> str:
        """adds"""
        given.append({"a": a, "flag": flag})
        return ANSWER

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)
    kind = agents.OpenAIResponsesModel if by_responses else agents.OpenAIChatCompletionsModel
    agent = agents.Agent(name="adder", tools=[add], model=kind(model="m", openai_client=client))
    if not stream:
        return {"text": (await agents.Runner.run(agent, QUESTION)).final_output, "arguments": given[0]}
    running = agents.Runner.run_streamed(agent, QUESTION)
    async for _ in running.stream_events():
        pass
    return {"text": running.final_output, "arguments": given[0]}


async def sdk_responses(url: str, key: str, stream: bool) -> Said:
    """The agents SDK by OpenAI's responses."""
    return await sdk(url, key, stream, by_responses=True)


WAYS: dict[str, Callable[[str, str, bool], Awaitable[Said]]] = {
    "chat": chat, "responses": responses, "messages": messages, "sdk": sdk, "sdk_responses": sdk_responses,
}  # fmt: skip
PACKAGES = ("openai", "anthropic")


async def main(arguments: list[str]) -> dict[str, Any]:
    """Hold every conversation that is asked for: WAY or WAY+stream, URL and KEY."""
    found: dict[str, Any] = {"versions": {name: version(name) for name in PACKAGES}}
    for how, url, key in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        name, _, stream = how.partition("+")
        found[how] = await WAYS[name](url, key, bool(stream))
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1:]))))

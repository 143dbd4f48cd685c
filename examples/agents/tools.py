"""Rollouts that chat: an agent loop inside the function, and an agent that uses only OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from mslime.rollout.workflow import Engine, Task

NUMBERS = {"type": "array", "items": {"type": "number"}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers.",
            "parameters": {"type": "object", "properties": {"numbers": NUMBERS}, "required": ["numbers"]},
        },
    }
]


def add(call_id: str, arguments: str) -> dict[str, Any]:
    """Result of the tool, or the error in the call: the model may try again."""
    try:
        result = str(sum(json.loads(arguments)["numbers"]))
    except (ValueError, KeyError, TypeError) as error:
        result = f"error: {error}"
    return {"role": "tool", "tool_call_id": call_id, "content": result}


def question(task: Task) -> list[Any]:
    """The row's messages, or its text as a user message."""
    return [*(task.messages or [{"role": "user", "content": task.text}])]


async def with_tools(task: Task, engine: Engine) -> None:
    """Chat with the tool for at most eight replies."""
    messages = question(task)
    for _ in range(8):
        reply = await engine.chat(messages, TOOLS)
        if not reply.calls:
            break
        messages += [reply.message, *(add(call.id, call.arguments) for call in reply.calls)]


async def with_openai(task: Task, engine: Engine) -> None:
    """The same over HTTP, as an external agent would do it."""
    endpoint = await engine.endpoint()
    async with AsyncOpenAI(base_url=endpoint.openai_url, api_key=endpoint.key) as client:
        messages = question(task)
        for _ in range(8):
            got = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=TOOLS)
            reply = got.choices[0].message
            if not reply.tool_calls:
                break
            messages += [reply, *(add(c.id, c.function.arguments) for c in reply.tool_calls if c.type == "function")]

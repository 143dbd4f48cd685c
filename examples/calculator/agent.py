"""An agent with a calculator: the model calls it for a product of two numbers, reads the result, and replies."""

from __future__ import annotations

import json
from typing import Any

from mslime.rollout.workflow import Engine, Episode, Task

MOST_REPLIES = 3
NUMBER = {"type": "integer"}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "The product of two whole numbers.",
            "parameters": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]},
        },
    }
]


def multiply(arguments: str) -> str:
    """Result of the calculator, or the error in the arguments: a model may write anything."""
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        return f"error: {type(error).__name__}"


async def with_calculator(task: Task, engine: Engine) -> Episode:
    """Chat for at most three replies. The reward is 1 if the last one is exactly the product, else 0."""
    messages: list[Any] = [*(task.messages or [{"role": "user", "content": task.text}])]
    answer, called = "", False
    for _ in range(MOST_REPLIES):
        reply = await engine.chat(messages, TOOLS)
        answer = reply.text
        if not reply.calls:
            break
        called = True
        results = [(call.id, multiply(call.arguments)) for call in reply.calls]
        messages += [reply.message, *({"role": "tool", "tool_call_id": i, "content": text} for i, text in results)]
    right = float(answer == task.label)
    return Episode(reward=right, metrics={"called": called} | ({"right_when_called": right} if called else {}))

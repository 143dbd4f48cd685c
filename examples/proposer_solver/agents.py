"""Two agents that use only OpenAI's client: one proposes a list of digits, the others sort it.

Both are the model in training. They share a reward: a correctly sorted list is worth more, the longer it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai

from mslime.rollout.workflow import Engine, Episode, Task

SOLVERS, LONGEST = 2, 10


def client_of(url: str, key: str) -> openai.AsyncOpenAI:
    """A client for one rollout. It loads no certificates, because the server is local and has none: loading takes 50 ms
    and would block all other rollouts.
    """
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=url, api_key=key, http_client=http)


async def ask(client: openai.AsyncOpenAI, messages: Sequence[Any], replies: int = 1) -> list[str]:
    """Send messages, and return `replies` replies of the model."""
    got = await client.chat.completions.create(model="the one that is trained", messages=list(messages), n=replies)
    return [choice.message.content or "" for choice in got.choices]


def valid(digits: str, first: str) -> bool:
    """Whether a proposal is a list of up to LONGEST digits that begins as requested and continues."""
    return digits.startswith(first) and digits.isascii() and digits.isdigit() and len(first) < len(digits) <= LONGEST


def right(answer: str, digits: str) -> bool:
    """Whether an answer is the digits in ascending order."""
    return answer == "".join(sorted(digits))


def worth(digits: str, answers: Sequence[str]) -> float:
    """Reward of a rollout: the share of right answers, times the length of the list over the longest."""
    return sum(right(answer, digits) for answer in answers) / len(answers) * len(digits) / LONGEST


async def propose_and_solve(task: Task, engine: Engine) -> Episode:
    """Propose a list that begins with the row's label, and let solvers sort it. Held-out rows use one solver."""
    messages = task.messages or ()
    endpoint = await engine.endpoint()
    async with client_of(endpoint.openai_url, endpoint.key) as client:
        (reply,) = await ask(client, messages)
        if messages[0]["content"].startswith("sort "):
            return Episode(reward=float(reply == task.label))
        if not valid(reply, task.label):
            return Episode(reward=0.0, metrics={"valid": 0.0})
        answers = await ask(client, [{"role": "user", "content": f"sort {reply}"}], SOLVERS)
    solved = sum(right(answer, reply) for answer in answers) / SOLVERS
    return Episode(reward=worth(reply, answers), metrics={"valid": 1.0, "length": len(reply), "solved": solved})

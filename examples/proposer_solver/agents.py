"""Two agents that know OpenAI's client only: one proposes a list of digits, the others sort it.

Both are the model that is trained. They play together: a list that was sorted right is worth more, the longer it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai

from mslime.rollout.workflow import Engine, Episode, Task

SOLVERS, LONGEST = 2, 10


def client_of(url: str, key: str) -> openai.AsyncOpenAI:
    """A client for one rollout. It loads no certificates, since the server is on this machine and has none: that would
    take 50 ms, for which all other rollouts would wait."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=url, api_key=key, http_client=http)


async def ask(client: openai.AsyncOpenAI, messages: Sequence[Any], replies: int = 1) -> list[str]:
    """What the model replies to messages, so many times."""
    got = await client.chat.completions.create(model="the one that is trained", messages=list(messages), n=replies)
    return [choice.message.content or "" for choice in got.choices]


def valid(digits: str, first: str) -> bool:
    """Whether a proposal is a list of up to LONGEST digits that begins as asked and goes on."""
    return digits.startswith(first) and digits.isascii() and digits.isdigit() and len(first) < len(digits) <= LONGEST


def right(answer: str, digits: str) -> bool:
    """Whether an answer is the digits in ascending order."""
    return answer == "".join(sorted(digits))


def worth(digits: str, answers: Sequence[str]) -> float:
    """Of a rollout: the share of answers that are right, times the length of the list over the longest."""
    return sum(right(answer, digits) for answer in answers) / len(answers) * len(digits) / LONGEST


async def propose_and_solve(task: Task, engine: Engine) -> Episode:
    """A proposal that begins with the row's label, and the solvers' answers to it. Held-out rows are for one solver."""
    messages = task.messages or ()
    endpoint = await engine.endpoint()
    async with client_of(endpoint.openai_url, endpoint.key) as client:
        (said,) = await ask(client, messages)
        if messages[0]["content"].startswith("sort "):
            return Episode(reward=float(said == task.label))
        if not valid(said, task.label):
            return Episode(reward=0.0, metrics={"valid": 0.0})
        answers = await ask(client, [{"role": "user", "content": f"sort {said}"}], SOLVERS)
    solved = sum(right(answer, said) for answer in answers) / SOLVERS
    return Episode(reward=worth(said, answers), metrics={"valid": 1.0, "length": len(said), "solved": solved})

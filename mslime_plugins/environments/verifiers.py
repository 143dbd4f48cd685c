"""Environments of `verifiers` 0.4, which call a model server and are played where they are installed.

`tools/serve_verifiers.py` plays an episode there, against the rollout's endpoint. This run samples every token, so
verifiers' own token records are not needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import aiohttp

from mslime.rollout.workflow import Engine, Episode, Task


class Verifiers:
    """A rollout function: one episode of a `serve_verifiers.py` environment per rollout.

        rollout = Verifiers("http://127.0.0.1:8700")      # rollout.function: my_project.rollouts:rollout

    Args:
        url: of the server; of several, rollouts are spread over them.
        sampling: verifiers' sampling settings for the agent's requests. The run's settings take precedence
            (docs/agents.md).
    """

    def __init__(self, url: str | list[str], sampling: Mapping[str, Any] | None = None) -> None:
        self._urls = [url] if isinstance(url, str) else list(url)
        self._sampling = dict(sampling or {})

    async def __call__(self, task: Task, engine: Engine) -> Episode:
        """Play one episode. The row's metadata has the task, as written by `serve_verifiers.py tasks`."""
        if "task" not in task.metadata:
            raise ValueError("the row's metadata has no task: make rows with `serve_verifiers.py tasks`")
        endpoint = await engine.endpoint()
        request = {
            "base_url": endpoint.openai_url, "key": endpoint.key, "model": endpoint.model,
            "task": task.metadata["task"], "sampling": self._sampling,
        }  # fmt: skip
        return episode_of(await answer_of(f"{self._urls[task.seed % len(self._urls)].rstrip('/')}/run", request))


# Requests and answers of environment servers that play episodes against a rollout's endpoint.

CONNECT_S = 30.0
MOST_FAILURE = 500
"""Most characters of an error in a message."""


async def answer_of(url: str, body: Mapping[str, Any]) -> dict[str, Any] | str:
    """A server's answer to a request that takes as long as an episode; else an error text."""
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, json=body) as response,
        ):
            if response.status != 200:
                return f"{url} answered {response.status}: {(await response.text())[:MOST_FAILURE]}"
            answer = await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return f"{url}: {type(error).__name__}: {error}"[:MOST_FAILURE]
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else f"{url} answered {answer!r:.80}"


def episode_of(answer: dict[str, Any] | str) -> Episode:
    """The episode of an answer {"reward", "metrics", "error"}; a failed one if it has none."""
    if isinstance(answer, str):
        return Episode(failed=answer)
    if answer.get("error"):
        return Episode(failed=str(answer["error"])[:MOST_FAILURE])
    reward = answer.get("reward")
    if not is_number(reward):
        return Episode(failed=f"the server returned the reward {reward!r:.40}")
    metrics = {name: float(number) for name, number in dict(answer.get("metrics") or {}).items() if is_number(number)}
    return Episode(reward=float(cast("float", reward)), metrics=metrics)


def is_number(found: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)

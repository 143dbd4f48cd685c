"""Environments of `verifiers` 0.4, which call a model server of their own: they are played where they are installed.

`tools/serve_verifiers.py` plays an episode there, against the endpoint of the rollout that asks. Every token of it is
one that this run sampled, so nothing of what verifiers records of tokens is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import aiohttp

from mslime.rollout.workflow import Engine, Episode, Task

CONNECT_S = 30.0
MOST_FAILURE = 500
"""Characters of an error that are told."""


class Verifiers:
    """A rollout function: an episode of the environment that a `serve_verifiers.py` has, for each rollout.

        rollout = Verifiers("http://127.0.0.1:8700")      # rollout.function: my_project.rollouts:rollout

    Args:
        url: of the server; of several, rollouts are spread over them.
        sampling: verifiers' sampling settings for the agent's requests. Those of the run win (docs/agents.md).
    """

    def __init__(self, url: str | list[str], sampling: Mapping[str, Any] | None = None) -> None:
        self._urls = [url] if isinstance(url, str) else list(url)
        self._sampling = dict(sampling or {})

    async def __call__(self, task: Task, engine: Engine) -> Episode:
        """See `mslime.rollout.workflow`. The row's metadata has the task, as `serve_verifiers.py tasks` writes it."""
        if "task" not in task.metadata:
            raise ValueError("the row's metadata has no task: make rows with `serve_verifiers.py tasks`")
        endpoint = await engine.endpoint()
        asked = {
            "base_url": endpoint.openai_url, "key": endpoint.key, "model": endpoint.model,
            "task": task.metadata["task"], "sampling": self._sampling,
        }  # fmt: skip
        return episode_of(await asked_of(f"{self._urls[task.seed % len(self._urls)].rstrip('/')}/run", asked))


async def asked_of(url: str, body: Mapping[str, Any]) -> dict[str, Any] | str:
    """What a server answers to a request that takes as long as an episode; else a text that says what went wrong."""
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
    """The episode that an answer {"reward", "metrics", "error"} tells of; a failed one where it tells none."""
    if isinstance(answer, str):
        return Episode(failed=answer)
    if answer.get("error"):
        return Episode(failed=str(answer["error"])[:MOST_FAILURE])
    reward = answer.get("reward")
    if not is_number(reward):
        return Episode(failed=f"the server told the reward {reward!r:.40}")
    metrics = {name: float(number) for name, number in dict(answer.get("metrics") or {}).items() if is_number(number)}
    return Episode(reward=float(cast("float", reward)), metrics=metrics)


def is_number(found: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)

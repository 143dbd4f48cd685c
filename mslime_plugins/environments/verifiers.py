"""Environments of `verifiers` 0.4, which call a model server and are played where they are installed.

`tools/serve_verifiers.py` plays an episode there, against the rollout's endpoint. This run samples every token, so
verifiers' own token records are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mslime.rollout.workflow import Engine, Episode, Task
from mslime_plugins.environments.elsewhere import asked_of, episode_of


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
        asked = {
            "base_url": endpoint.openai_url, "key": endpoint.key, "model": endpoint.model,
            "task": task.metadata["task"], "sampling": self._sampling,
        }  # fmt: skip
        return episode_of(await asked_of(f"{self._urls[task.seed % len(self._urls)].rstrip('/')}/run", asked))

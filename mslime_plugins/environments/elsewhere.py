"""Requests and answers of environment servers that play episodes against a rollout's endpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import aiohttp

from mslime.rollout.workflow import Episode

CONNECT_S = 30.0
MOST_FAILURE = 500
"""Most characters of an error in a message."""


async def asked_of(url: str, body: Mapping[str, Any]) -> dict[str, Any] | str:
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

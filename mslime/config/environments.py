"""Environments of users: which class, and what one of its episodes may take."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mslime.config.base import Seconds, Section

Credit = Literal["auto", "episode", "steps"]
"""What the rewards of an environment's steps are beside the episode's reward."""

TurnsOf = Literal["text", "chat"]
"""What an episode is made of."""

TIMED_ADVANTAGES = ("reinforce_pp", "gae")
"""Advantages that read when a reward came."""


class EnvironmentLimitsConfig(Section):
    """What an episode in an environment may take, and the processes that environments live in."""

    turns: int = Field(
        default=16, ge=1, description="Turns of the model; an episode that is not done then ends as it stands."
    )
    call_s: Seconds = Field(
        default=60, description="Seconds for one call of the environment: what takes longer has failed."
    )
    episode_s: Seconds | None = Field(
        default=None,
        description="Seconds of all calls of an episode to its environment, without the model's time; then the "
        "episode ends as it is. null: no limit.",
    )
    workers: int = Field(
        default=2, ge=1, le=65536, description="Processes that environments live in, each with as many as are needed."
    )
    memory_mib: float | None = Field(
        default=4096,
        gt=0,
        description="Memory that a process may take beyond what it holds when the class is imported; null: no limit.",
    )

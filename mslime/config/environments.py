"""Environments of users: which class, and what one of its episodes may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mslime.config.base import Section
from mslime.config.choices import check_choice
from mslime.config.errors import ConfigError

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig

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
    call_s: float = Field(
        default=60, le=1e9, gt=0, description="Seconds for one call of the environment: what takes longer has failed."
    )
    episode_s: float | None = Field(
        default=None,
        le=1e9,
        gt=0,
        description="Seconds of an episode in its environment, all calls together; the episode then ends as it stands. "
        "The time that the model takes does not count. null: as many as it likes.",
    )
    workers: int = Field(
        default=2, ge=1, le=65536, description="Processes that environments live in, each with as many as are needed."
    )
    memory_mib: float | None = Field(
        default=4096,
        gt=0,
        description="Memory that a process may take beyond what it holds when the class is imported; null: no limit.",
    )


def check_environment_settings(config: RunConfig) -> None:
    """Raise ConfigError for an environment without the function that plays it, or the other way round."""
    rollout = config.rollout
    if (rollout.function == "environment") != (rollout.environment is not None):
        raise ConfigError("rollout.environment", rollout.environment,
                          f"goes together with rollout.function: environment (it is {rollout.function!r})",
                          "set both, or neither")  # fmt: skip
    if rollout.environment is not None:
        check_choice("rollout.environment", rollout.environment, ())
    elif rollout.environment_options:
        raise ConfigError("rollout.environment_options", rollout.environment_options, "has no class to go to",
                          "name it in rollout.environment")  # fmt: skip
    _check_chat(config)
    usable = ("grpo", *TIMED_ADVANTAGES)
    if rollout.environment_credit == "steps" and config.algorithm.advantage not in usable:
        raise ConfigError("rollout.environment_credit", "steps",
                          f"algorithm.advantage {config.algorithm.advantage} reads rewards of whole rollouts alone",
                          f"use episode, or one of the advantages {', '.join(usable)}")  # fmt: skip


def _check_chat(config: RunConfig) -> None:
    """Raise ConfigError where episodes are chats and the run could not play them, or credit their steps."""
    if config.rollout.environment_turns != "chat":
        return
    if not config.data.apply_chat_template:
        raise ConfigError("rollout.environment_turns", "chat", "needs messages, and data.apply_chat_template is false",
                          "set it, or use text")  # fmt: skip
    timed = config.algorithm.advantage in TIMED_ADVANTAGES and config.rollout.environment_credit != "episode"
    if timed and config.algorithm.credit != "turns":
        raise ConfigError("rollout.environment_turns", "chat",
                          f"an episode may be several sequences, and algorithm.advantage {config.algorithm.advantage} "
                          "spreads its reward over the steps of all of them",
                          "set algorithm.credit: turns, or rollout.environment_credit: episode")  # fmt: skip

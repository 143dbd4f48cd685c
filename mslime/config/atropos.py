"""Settings of runs whose rollouts are those of Atropos' environments, and what goes together with them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import AfterValidator, Field, PlainSerializer, SecretStr, model_validator

from mslime.config.agents import check_address
from mslime.config.base import Section
from mslime.config.errors import ConfigError
from mslime.config.keys import read_secret, refuse_empty, shown_secret

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig

FUNCTION = "atropos"
"""`rollout.function` of such a run."""

GIVEN = "mslime.algorithms.given:advantages"
"""`algorithm.advantage` that takes the numbers that an environment gives."""

Token = Annotated[
    SecretStr,
    AfterValidator(partial(refuse_empty, "rollout.atropos.token")),
    PlainSerializer(shown_secret, return_type=str),
]


class AtroposConfig(Section):
    """Where Atropos' environments find the run: the model below /v1, the trainer beside it (docs/environments.md)."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on, and under which environments find the run. Another one than loopback needs "
        "a token.",
    )
    port: int = Field(default=8000, ge=0, le=65535, description="0: a free one, which the log tells.")
    token: Token | None = Field(
        default=None,
        description="First part of the path of every URL, since Atropos' environments show the trainer no key: "
        "env:NAME, file:PATH, or the token itself. null: a random one, in atropos.json of the run's directory.",
    )
    silent_s: float = Field(
        default=600,
        le=1e9,
        gt=0,
        description="Seconds in which no environment asks for anything while groups are waited for. The rollout has "
        "then failed (rollout.on_error). Environments ask every second or so.",
    )
    keep_s: float = Field(
        default=900,
        le=1e9,
        gt=0,
        description="Seconds after its last reply for which a conversation is kept that was not handed in. Its tokens "
        "are dropped then (ledger/dropped/unused_tokens).",
    )
    waiting: int = Field(
        default=256,
        ge=1,
        description="Groups that may wait, handed in before they were needed. Further ones are dropped "
        "(rollout/atropos/no_room).",
    )

    def secret(self) -> str:
        """The token; empty where there is none. Raises ConfigError when it cannot be found."""
        return "" if self.token is None else read_secret(self.token, "rollout.atropos.token")

    @model_validator(mode="after")
    def _closed_to_others(self) -> Self:
        check_address("rollout.atropos", self.host, self.token is not None)
        return self


def check_atropos_settings(config: RunConfig) -> None:
    """Raise ConfigError for what Atropos' environments cannot have, or what has no meaning without them."""
    rollout, data = config.rollout, config.data
    if rollout.function != FUNCTION:
        if config.algorithm.advantage == GIVEN:
            raise ConfigError("algorithm.advantage", GIVEN, "takes the advantages that Atropos' environments give, and "
                              f"rollout.function is {rollout.function!r}",
                              f"set rollout.function: {FUNCTION}, or another advantage")  # fmt: skip
        return
    for setting, value, rule, way_out in (
        ("data.prompts", data.prompts, "Atropos' environments bring prompts of their own", "leave it out"),
        ("data.source", data.source, "Atropos' environments bring prompts of their own", "leave it out"),
        ("data.eval_sets", [s.name for s in data.eval_sets], "Atropos' environments evaluate by themselves, and cannot "
         "play rows of a run", "leave them out; see steps_per_eval of the environment"),
        ("rollout.managers", rollout.managers - 1 and rollout.managers, "environments find one manager: groups are "
         "handed in at one address", "set it to 1"),
        ("rollout.on_stale", rollout.on_stale if rollout.on_stale == "reroll" else None, "an environment cannot be "
         "asked for a single rollout again", "use keep, mask or drop"),
        ("reward", "" if config.reward == type(config.reward)() else config.reward.kind, "Atropos' environments score "
         "by themselves", "leave it out"),
        ("train.task", config.train.task if config.train.task == "sft" else None, "supervised training reads files",
         "use train.task: rl"),
    ):  # fmt: skip
        if value:
            raise ConfigError(setting, value, f"{rule} (rollout.function: {FUNCTION})", way_out)

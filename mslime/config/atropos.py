"""Settings of runs whose rollouts are those of Atropos' environments; `rollout` has the rules about them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Self

from pydantic import AfterValidator, Field, PlainSerializer, SecretStr, model_validator

from mslime.config.agents import check_address
from mslime.config.base import Seconds, Section
from mslime.config.keys import read_secret, refuse_empty, shown_secret

FUNCTION = "atropos"
"""`rollout.function` of such a run."""

GIVEN = "mslime.algorithms.given:advantages"
"""`algorithm.advantage` that takes the numbers that an environment gives."""

AtroposToken = Annotated[
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
    port: int = Field(default=8000, ge=0, le=65535, description="0: a free one, named in the log.")
    token: AtroposToken | None = Field(
        default=None,
        description="First part of every URL's path, because Atropos' environments send no key: env:NAME, file:PATH, "
        "or the token itself. null: random, in RUN/atropos.json.",
    )
    silent_s: Seconds = Field(
        default=600,
        description="Seconds without a request of any environment, while groups are needed, after which the rollout "
        "fails (rollout.on_error).",
    )
    keep_s: Seconds = Field(
        default=900,
        description="Seconds after its last reply for which an unused conversation is kept "
        "(ledger/dropped/unused_tokens).",
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

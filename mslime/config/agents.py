"""Settings of rollouts that chat: what one may take, and the server that agents speak to."""

from __future__ import annotations

import ipaddress
from functools import partial
from typing import Annotated, Self

from pydantic import AfterValidator, Field, PlainSerializer, SecretStr, model_validator

from mslime.config.base import Seconds, Section
from mslime.config.errors import ConfigError
from mslime.config.keys import read_secret, refuse_empty, shown_secret

Token = Annotated[
    SecretStr,
    AfterValidator(partial(refuse_empty, "rollout.server.token")),
    PlainSerializer(shown_secret, return_type=str),
]


class AgentLimits(Section):
    """What one rollout that chats may take. A request beyond is refused by the limit's name; what was said is kept."""

    turns: int = Field(default=200, ge=1, description="Replies of the model.")
    sequences: int = Field(
        default=32,
        ge=1,
        description="Training samples of a rollout. An edited history, or a template that drops reasoning, begins "
        "another one; the error counts the reasons (docs/agents.md).",
    )
    tokens: int = Field(default=1_000_000, ge=1, description="Sampled tokens, over all sequences.")
    idle_s: Seconds = Field(
        default=3600,
        description="Seconds without a request after which an agent counts as dead: the rollout ends with an error "
        "(rollout.on_error).",
    )
    wall_s: Seconds = Field(
        default=4 * 3600,
        description="Seconds from the first request to the last accepted one. The tokens are kept; without a running "
        "request the rollout ends as with a dead agent.",
    )


class AgentServer(Section):
    """The server that OpenAI's and Anthropic's clients speak to; it starts when a rollout asks for its endpoint."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on, and under which agents find it. Another one than loopback needs a token.",
    )
    port: int = Field(default=0, ge=0, le=65535, description="0: a free one.")
    token: Token | None = Field(
        default=None,
        description="First part of every rollout's key, so that a proxy can refuse other requests: env:NAME, "
        "file:PATH, or the token itself.",
    )
    max_request_mib: int = Field(default=64, ge=1, le=4096, description="Largest request.")

    def secret(self) -> str:
        """The token; empty where there is none. Raises ConfigError when it cannot be found."""
        return "" if self.token is None else read_secret(self.token, "rollout.server.token")

    @model_validator(mode="after")
    def _closed_to_others(self) -> Self:
        check_address("rollout.server", self.host, self.token is not None)
        return self


def check_address(section: str, host: str, has_token: bool) -> None:
    """Raise ConfigError for an address that others reach without a token, or that is none to be found under."""
    if not has_token and not _is_loopback(host):
        raise ConfigError(f"{section}.token", None, f"the server would be reached by others, at {host}",
                          f"set a token (env:NAME), or leave {section}.host at 127.0.0.1")  # fmt: skip
    if host in ("", "0.0.0.0", "::", "*"):
        raise ConfigError(f"{section}.host", host, "is no address under which agents find the server",
                          "give an address of this machine")  # fmt: skip


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

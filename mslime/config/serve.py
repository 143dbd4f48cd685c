"""Section `serve`, and client requests of `mslime serve` for a trainer: losses by name, an optimizer's step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field

from mslime.config.base import Section
from mslime.config.keys import Secret, not_empty

ClientLoss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
CLIENT_LOSSES: tuple[str, ...] = get_args(ClientLoss)
"""Names of losses in the wire format of the SDK."""

LOSS_SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
}
"""Keys of each loss's `loss_fn_config`, with the public service's defaults."""


@dataclass(frozen=True)
class LossChoice:
    """A client's loss.

    Attributes:
        low, high: bounds of the ratio of probabilities, for ppo and cispo.
        beta: weight of the squared log ratio, for dro.
    """

    name: ClientLoss
    low: float = 0.8
    high: float = 1.2
    beta: float = 0.05


@dataclass(frozen=True)
class AdamParams:
    """One step of AdamW: `AdamParams` of the SDK.

    Attributes:
        clip: largest norm of all gradients together; 0: they are never scaled.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float


class ServeConfig(Section):
    """`mslime serve`: address, key, and limits of sessions and adapters."""

    port: int = Field(default=0, ge=0, le=65535, description="Port on 127.0.0.1; 0: any free port, which is printed.")
    key: Annotated[Secret, not_empty("serve.key")] | None = Field(
        default=None,
        description="Key of clients, which must begin with tml-: env:NAME, file:PATH, or the key itself. Default: a "
        "new one in RUN/serve.json.",
    )
    model_name: str | None = Field(
        default=None,
        description="Clients' name for the base model, for example Qwen/Qwen3-8B. model.path is always valid, too.",
    )
    max_adapters: int = Field(
        default=8, ge=1, le=1024, description="Maximum adapters in training at once, over all clients."
    )
    engine_adapters: int = Field(
        default=8, ge=1, le=1024, description="Maximum adapters loaded in an engine at once; others wait on disk."
    )
    silence_s: float = Field(
        default=120.0,
        le=1e9,
        ge=1,
        description="Seconds without a heartbeat after which a client's adapters are freed. The SDK sends one every 10 "
        "s.",
    )
    stable_reinforce: Literal["importance_sampling", "ppo", "cispo", "dro"] | None = Field(
        default=None,
        description="Loss that replaces a client's stable_reinforce, whose definition is not public; its settings and "
        "inputs differ. null: such requests are rejected.",
    )
    max_requests: int = Field(
        default=4096,
        ge=1,
        description="Maximum unfinished requests of all clients; further ones get HTTP 429, and clients retry them.",
    )

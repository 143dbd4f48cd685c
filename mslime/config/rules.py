"""Rules that span sections of the run configuration. Each refuses one silent corruption or one senseless pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig


def check_run(config: RunConfig) -> None:
    """Raise ConfigError for the first broken rule."""
    config.megatron.layout(config.cluster.trainer_ranks)

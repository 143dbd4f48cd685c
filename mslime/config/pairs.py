"""Engines that are pairs of servers, one that prefills and one that decodes (`sglang.pairs`): what they go with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mslime.config.errors import ConfigError

if TYPE_CHECKING:
    from mslime.config.schema import RunConfig


def check_pairs(config: RunConfig) -> None:
    """Raise ConfigError where engines cannot be pairs."""
    engine = config.sglang
    if engine.pairs is None:
        return
    if engine.urls:
        raise _refusal(engine.pairs, f"engines are attached to ({engine.urls[0]}), and mslime pairs what it starts",
                       "remove sglang.urls, or pairs")  # fmt: skip
    for field, value, needed, why in (
        ("sglang.nnodes", engine.nnodes, 1, "each half of a pair lies on one machine"),
        ("cluster.placement", config.cluster.placement, "separate", "a pair was never put to sleep"),
        ("rollout.pause_mode", config.rollout.pause_mode, "abort",
         "a request that waits in a pair while its weights change would be prefilled by one version, and decoded by "
         "another"),
        ("sglang.rejoin", engine.rejoin, "sync", "weights of a peer go to one server, and a pair has two"),
    ):  # fmt: skip
        if value != needed:
            raise ConfigError(field, value, f"{why} (sglang.pairs: {engine.pairs})", f"set it to {needed}, or remove "
                              "sglang.pairs")  # fmt: skip
    if config.syncs_adapters:
        raise _refusal(engine.pairs, "adapters alone are given to engines of one server (lora.sync: adapter)",
                       "remove it, or set lora.sync: merged")  # fmt: skip
    cpu, tcp = config.cluster.device == "cpu", engine.pairs == "mooncake_tcp"
    if cpu and not tcp:
        raise _refusal(engine.pairs, "it moves memory of GPUs", "set it to mooncake_tcp, which is for tests")


def _refusal(pairs: Any, rule: str, way_out: str) -> ConfigError:
    return ConfigError("sglang.pairs", pairs, rule, way_out)

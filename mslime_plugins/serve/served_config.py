"""The configuration of a server: a run's settings for training and generation, without prompts and steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mslime.config.algorithm import AlgorithmConfig
from mslime.config.base import Section
from mslime.config.data import DataConfig
from mslime.config.errors import ConfigError
from mslime.config.loader import build, merge
from mslime.config.lora import LORA_GROUPS, LoraConfig
from mslime.config.output import CheckpointConfig
from mslime.config.rollout import RolloutConfig
from mslime.config.schema import RunConfig
from mslime.config.train import TrainConfig
from mslime_plugins.serve.sessions import AdapterAsk

_FIXED: dict[str, Any] = {
    "train": {"task": "rl", "replay": "off", "lr_decay_style": "constant"},
    "lora": {"sync": "adapter"},
    "data": {"prompts": ["(of clients)"]},
    "rollout": {"max_response_tokens": 1, "pause_mode": "in_place", "concurrency": 1_000_000},
}
"""Settings that a server fixes: clients provide the data, the loss and the steps; requests wait in engines."""
_SECTIONS: dict[str, tuple[type[Section], frozenset[str]]] = {
    "train": (
        TrainConfig,
        frozenset(
            {"max_tokens_per_micro_batch", "quadratic_tokens", "packed", "log_prob_chunk_tokens", "logits_mib", "fp8"}
        ),
    ),
    "rollout": (RolloutConfig, frozenset({"max_total_tokens"})),
    "data": (DataConfig, frozenset()),
    "algorithm": (AlgorithmConfig, frozenset()),
    "checkpoint": (CheckpointConfig, frozenset()),
}
"""Sections of which only these settings are used. Unknown names are kept, so that validation rejects them."""
MLP_GROUPS = ("mlp", "shared_experts", "experts")
_DROPPED = ("adapters", "reward", "hooks", "critic", "teacher")
"""Sections that a server ignores."""


def _of_server(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that a server uses."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in _DROPPED:
            continue
        if name in _SECTIONS and isinstance(value, Mapping):
            section, kept = _SECTIONS[name]
            known = set(section.model_fields)
            value = {key: each for key, each in value.items() if key in kept or key not in known}
        found[name] = value
    return found


def served_config(values: Mapping[str, Any]) -> RunConfig:
    """The configuration of a server.

    Args:
        values: settings of the file and the flags.

    Raises:
        ConfigError: there are no adapters, engines share the trainer's GPUs, or a setting is invalid.
    """
    given = _of_server(values)
    lora = given.get("lora")
    if not (isinstance(lora, Mapping) and lora.get("rank")):
        raise ConfigError("lora.rank", 0, "must be above 0: clients train adapters on a frozen base",
                          "set it to the largest rank that a client may request, for example 32")  # fmt: skip
    config = build(merge(given, _FIXED))
    if config.sglang.pairs is not None:
        raise ConfigError("sglang.pairs", config.sglang.pairs, "a server does not support engine pairs", "remove it")
    if config.colocated:
        raise ConfigError("cluster.placement", "colocated", "not supported: a server generates during training",
                          "set it to separate")  # fmt: skip
    if config.lora.init is not None:
        raise ConfigError("lora.init", str(config.lora.init), "a client's adapter starts new, or from a state that it "
                          "saved", "remove it")  # fmt: skip
    if config.lora.shares_outer:
        raise ConfigError("lora.experts", "shared_outer", "clients save adapters in peft's format, "
                          "which has no factors shared by experts", "remove it")  # fmt: skip
    if config.lora.together and config.megatron.counts_over_a_step:
        raise ConfigError(
            "lora.together", True,
            "routers count tokens over a whole pass (moe_router_load_balancing_type: global_aux_loss)", "remove it",
        )  # fmt: skip
    # An engine serves two versions more than a run may lag behind.
    behind = {"max_staleness": max(config.serve.engine_adapters - 2, 0), "pause_mode": "in_place"}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=behind)})


def base_names(path: Path, name: str | None) -> tuple[str, ...]:
    """Names of the base for clients: `serve.model_name`, and its directory as written and absolute."""
    named = (name,) if name else ()
    return tuple(dict.fromkeys((*named, str(path), str(path.resolve()))))


def adapted_parts(lora: LoraConfig) -> tuple[bool, bool]:
    """Whether attention, and whether MLP layers, may have adapters; single layer names count for both."""
    targets = lora.targets
    named = any(target not in LORA_GROUPS for target in targets)
    return named or "attention" in targets, named or any(t in targets for t in LORA_GROUPS if t != "attention")


def targets_of(lora: LoraConfig, ask: AdapterAsk) -> tuple[str, ...]:
    """`lora.targets` without layers that a client excludes. Raises ConfigError for names of single layers, which cannot
    be classified."""
    wanted = {"attention": ask.attention, **dict.fromkeys(MLP_GROUPS, ask.mlp)}
    if not (ask.attention and ask.mlp) and (named := [t for t in lora.targets if t not in LORA_GROUPS]):
        raise ConfigError("lora_config", "train_attn, train_mlp", f"this server adapts {', '.join(named)} by name",
                          "train attention and MLP layers together")  # fmt: skip
    return tuple(target for target in lora.targets if wanted.get(target, True))


def adapter_config(config: RunConfig, ask: AdapterAsk) -> RunConfig:
    """The configuration of a client's adapter, as for a run of it alone."""
    chosen = {"rank": ask.rank, "targets": targets_of(config.lora, ask), "init": None}
    return config.model_copy(update={"lora": config.lora.model_copy(update=chosen), "seed": ask.seed})

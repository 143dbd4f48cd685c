"""What every family answers about a checkpoint, and the readers of config.json that families share.

A setting that changes the model's arithmetic and that mslime does not build is refused by name, never ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from mslime.config.errors import CheckpointError
from mslime.convert.table import RuleTable

HFConfig = Mapping[str, object]


def as_list(value: object) -> list[object] | None:
    """A JSON array, or None."""
    return cast("list[object]", value) if isinstance(value, list) else None


def as_object(value: object) -> dict[str, object] | None:
    """A JSON object, or None."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


@dataclass(frozen=True)
class ModelFields:
    """What a model needs beside megatron-core's TransformerConfig.

    Attributes:
        vocab_size: rows of the embedding, without padding.
        max_positions: longest sequence that the checkpoint was made for, in tokens.
        rotary_base, rotary_percent: rotary embedding.
        tie_embeddings: the output layer is the embedding.
        num_layers: transformer layers.
        moe_layer_ids: global ids of the layers that route.
        num_experts, top_k: 0 for a dense model.
    """

    vocab_size: int
    max_positions: int
    rotary_base: float
    rotary_percent: float
    tie_embeddings: bool
    num_layers: int
    moe_layer_ids: tuple[int, ...]
    num_experts: int
    top_k: int


class Family(ABC):
    """One architecture: how its config.json becomes a Megatron model, and how its tensors are named.

    Attributes:
        architecture: name in config.json's `architectures`.
    """

    architecture: str

    @abstractmethod
    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        """megatron-core TransformerConfig fields by name, as plain values (the activation as the string `silu`).

        Raises:
            CheckpointError: a setting of config.json is missing or not supported.
        """

    @abstractmethod
    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        """What lies outside TransformerConfig. Raises like `transformer_fields`."""

    def refuse_for_engine(self, hf_config: HFConfig) -> None:  # noqa: B027  most families have nothing to refuse
        """Raise CheckpointError when SGLang, at the pinned version, would serve another function of these weights."""

    @abstractmethod
    def rules(self, hf_config: HFConfig) -> RuleTable:
        """The conversion table of this model. Raises like `transformer_fields`."""


def required_int(config: HFConfig, *names: str) -> int:
    """A positive integer of config.json under the first of `names` that is present (old and new spellings)."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(
            f"config.json: {names[0]}", value, "must be a positive integer", "use the config.json of the checkpoint"
        )
    return value


def required_number(config: HFConfig, name: str) -> float:
    """A number of config.json."""
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(
            f"config.json: {name}", value, "must be a number", "use the config.json of the checkpoint"
        )
    return float(value)


def flag(config: HFConfig, name: str, default: bool) -> bool:
    """A boolean of config.json; absent or null means `default`, the value of the transformers class."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(
            f"config.json: {name}", value, "must be true or false", "use the config.json of the checkpoint"
        )
    return value


def refuse_unless(config: HFConfig, name: str, allowed: Iterable[object]) -> None:
    """An absent setting, or one of `allowed`; anything else changes arithmetic that mslime does not build."""
    choices = tuple(allowed)
    if name in config and config[name] not in choices:
        raise CheckpointError(
            f"config.json: {name}", config[name], f"mslime builds this family with {choices[-1]!r} only",
            "use another checkpoint, or add the setting to the family's file in mslime/convert/families",
        )  # fmt: skip


def rotary(config: HFConfig) -> tuple[float, float]:
    """(base, fraction of the head that rotates) in both spellings: `rope_parameters`, or `rope_theta` + `rope_scaling`.

    Raises:
        CheckpointError: a rope scaling other than none, or no base.
    """
    parameters: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if value is None:
            continue
        section = as_object(value)
        if section is None:
            raise CheckpointError(
                f"config.json: {name}", value, "must be an object", "use the config.json of the checkpoint"
            )
        parameters.update(section)
        scaling = parameters.get("rope_type", parameters.get("type", "default"))
        if scaling != "default":
            raise CheckpointError(
                f"config.json: {name}.rope_type", scaling, "mslime builds plain rotary embeddings only ('default')",
                "use the checkpoint without context extension",
            )  # fmt: skip
    merged = {**config, **parameters}
    share = merged.get("partial_rotary_factor")
    percent = 1.0 if share is None else required_number(merged, "partial_rotary_factor")
    return required_number(merged, "rope_theta"), percent

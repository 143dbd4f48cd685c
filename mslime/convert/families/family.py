"""Interface of a model family, and readers of config.json that families share.

A setting that changes the model's arithmetic and that mslime does not build is rejected by name, never ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast

from mslime.config.errors import CheckpointError
from mslime.config.model_facts import ModelFacts
from mslime.convert.table import RuleTable

HFConfig = Mapping[str, object]


def as_list(value: object) -> list[object] | None:
    """A JSON array, or None."""
    return cast("list[object]", value) if isinstance(value, list) else None


def as_object(value: object) -> dict[str, object] | None:
    """A JSON object, or None."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else None


@dataclass(frozen=True, kw_only=True)
class ModelFields(ModelFacts):
    """Model settings outside megatron-core's TransformerConfig.

    Attributes:
        rotary_base, rotary_percent: rotary embedding; the latter is the share of a head that rotates.
        tie_embeddings: the output layer is the embedding.
        position_embedding: `rope`, or `yarn` (its settings are TransformerConfig's `yarn_*`); multi-latent attention
            builds its own embedding and ignores both.
        llama3_factor: factor of Llama 3's frequency scaling; None: not scaled.
        joint_qk_norm: queries, and keys, are normed over all heads together (`backends.megatron.model.layers`).
        post_norms: outputs of attention and MLP are normed before they are added to the residual stream.
    """

    rotary_base: float
    rotary_percent: float
    tie_embeddings: bool
    position_embedding: Literal["rope", "yarn"] = "rope"
    llama3_factor: float | None = None
    joint_qk_norm: bool = False
    post_norms: bool = False


@dataclass(frozen=True)
class Support:
    """Tested support of a family; source of `docs/models.md`.

    Attributes:
        models: published checkpoints of the family that the tests convert at full size, by their usual names.
        not_trained: reason why training is not supported; empty if it is.
        not_served: reason why the engine is not supported or not tested; empty if generation was compared with
            transformers.
        largest_engine_tp: largest `sglang.tp_size` at which SGLang computes this family; None: any that divides it.
        renderers: candidates for the family's chat format; each is compared with the checkpoint's template.
        served_adapters: whether engines with adapters were compared with merged weights (`lora.sync: adapter`).
        notes: for users, one sentence each.
    """

    models: tuple[str, ...]
    not_trained: str = ""
    not_served: str = ""
    largest_engine_tp: int | None = None
    renderers: tuple[str, ...] = ()
    served_adapters: bool = False
    notes: tuple[str, ...] = ()


class Family(ABC):
    """One architecture: conversion of its config.json to a Megatron model, and names of its tensors.

    Attributes:
        architecture: name in config.json's `architectures`.
        support: tested support.
        harmless: settings of config.json that the family does not read and that change nothing in training: `HARMLESS`
            and the family's own.
        sections: families that read a nested section of config.json, by its name.
    """

    architecture: str
    support: Support
    harmless: frozenset[str] = frozenset()
    sections: Mapping[str, Family] = MappingProxyType({})

    @abstractmethod
    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        """megatron-core TransformerConfig fields by name, as plain values (the activation as the string `silu`).

        Raises:
            CheckpointError: a setting of config.json is missing or not supported.
        """

    @abstractmethod
    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        """Model settings outside TransformerConfig. Raises like `transformer_fields`."""

    def refuse_for_engine(self, hf_config: HFConfig) -> None:  # noqa: B027  most families have nothing to refuse
        """Raise CheckpointError if the pinned version of SGLang would compute these weights differently."""

    @abstractmethod
    def rules(self, hf_config: HFConfig) -> RuleTable:
        """Conversion table of this model. Raises like `transformer_fields`."""


HARMLESS = frozenset({
    # Origin of the file.
    "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype", "_name_or_path",
    "name_or_path", "id2label", "label2id", "problem_type", "tokenizer_class", "task_specific_params",
    # Special tokens, and transformers' generation, initialisation and regularisation.
    "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "initializer_range", "initializer_factor",
    "max_length", "output_router_logits", "router_aux_loss_coef", "router_z_loss_coef", "router_jitter_noise",
    "aux_loss_alpha", "aux_loss_coef", "seq_aux", "pretraining_tp", "output_attentions", "output_hidden_states",
    "return_dict", "use_return_dict", "chunk_size_feed_forward", "is_encoder_decoder",
    "_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation",
    # Text generation in transformers 4.
    "do_sample", "temperature", "top_k", "top_p", "typical_p", "min_p", "repetition_penalty", "length_penalty",
    "diversity_penalty", "num_beams", "num_beam_groups", "num_return_sequences", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "early_stopping", "min_length", "max_new_tokens", "bad_words_ids",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "output_scores", "return_dict_in_generate", "prefix", "sep_token_id",
    "decoder_start_token_id", "finetuning_task", "torchscript", "tf_legacy_loss", "use_bfloat16", "pruned_heads",
    # Written by tools.
    "model_name", "unsloth_version", "unsloth_fixed",
    # Read for every family when a checkpoint is opened.
    "quantization_config", "compression_config",
})  # fmt: skip


class _Recorder(Mapping[str, object]):
    """A config.json that records which of its settings were read."""

    def __init__(self, config: HFConfig) -> None:
        self._config = config
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> object:
        self.read.add(name)
        return self._config[name]

    def __contains__(self, name: object) -> bool:
        self.read.add(str(name))
        return name in self._config

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)


def refuse_unread(family: Family, hf_config: HFConfig, ignored: Collection[str] = ()) -> None:
    """Check that the family reads every setting of config.json, or that the setting is known to change nothing.

    Args:
        ignored: settings that the user has declared harmless (`model.ignored_config_fields`).

    Raises:
        CheckpointError: naming all unread settings; and everything that the family itself rejects.
    """
    unread = _unread(family, hf_config, ignored)
    if unread:
        names = ", ".join(unread)
        subject = "this field is" if len(unread) == 1 else "these fields are"
        raise refused(
            names, next(iter(unread.values())) if len(unread) == 1 else unread,
            f"{subject} unknown for {family.architecture}",
            f"if the forward pass does not depend on it, set model.ignored_config_fields: [{names}] (in a conversion, "
            "--ignore-field for each); else add it to the family's file in mslime/convert/families",
        )  # fmt: skip


def _unread(family: Family, hf_config: HFConfig, ignored: Collection[str]) -> dict[str, object]:
    """Unread settings of the family and its sections, with their values."""
    recorder = _Recorder(hf_config)
    family.transformer_fields(recorder)
    family.model_fields(recorder)
    family.rules(recorder)
    found: dict[str, object] = {}
    for name, part in family.sections.items():
        found |= _unread(part, as_object(hf_config.get(name)) or {}, ignored)
    known = recorder.read | HARMLESS | family.harmless | set(ignored)
    return found | {name: value for name, value in hf_config.items() if name not in known and value is not None}


def refused(
    name: str, value: object, rule: str, hint: str = "use the config.json of the checkpoint"
) -> CheckpointError:
    """Error for a setting of config.json."""
    return CheckpointError(f"config.json: {name}", value, rule, hint)


def required_int(config: HFConfig, *names: str) -> int:
    """A positive integer of config.json under the first of `names` that is present (old and new spellings)."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise refused(names[0], value, "must be a positive integer below 2^31")
    return value


def required_number(config: HFConfig, name: str) -> float:
    """A number of config.json."""
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise refused(name, value, "must be a number")
    return float(value)


def norm_epsilon(config: HFConfig) -> float:
    """`rms_norm_eps`, checked to be small: a large one indicates another file."""
    value = required_number(config, "rms_norm_eps")
    if not 0 < value <= 1e-2:
        raise refused("rms_norm_eps", value, "must be positive and at most 0.01")
    return value


def flag(config: HFConfig, name: str, default: bool) -> bool:
    """A boolean of config.json; absent or null means `default`, the value of the transformers class."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(name, value, "must be true or false")
    return value


def refuse_unless(config: HFConfig, name: str, allowed: Iterable[object]) -> None:
    """Raise CheckpointError unless the setting is absent or `allowed`: other values change unsupported arithmetic."""
    choices = tuple(allowed)
    if name in config and config[name] not in choices:
        raise refused(
            name, config[name], f"only {choices[-1]!r} is supported for this family",
            "use another checkpoint, or add the setting to the family's file in mslime/convert/families",
        )  # fmt: skip


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of a checkpoint.

    Attributes:
        base: of the frequencies.
        percent: share of a head's features that rotate.
        kind: `default`, or the scaling: `llama3`, `yarn`.
        settings: the scaling's own numbers, as config.json names them.
    """

    base: float
    percent: float
    kind: str
    settings: Mapping[str, object]


_ROTARY_SETTINGS = {
    "default": frozenset[str](),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary(
    config: HFConfig, kinds: Collection[str] = ("default",), base: float | None = None, percent: float = 1.0
) -> Rotary:
    """Rotary settings in both spellings: `rope_parameters`, or `rope_theta` beside `rope_scaling`.

    Args:
        kinds: scalings that the family builds.
        base, percent: defaults of the family's transformers class.

    Raises:
        CheckpointError: another scaling, an unread setting, or no base.
    """
    section: dict[str, object] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if value is None:
            continue
        given = as_object(value)
        if given is None:
            raise refused(name, value, "must be an object")
        section.update(given)
    kind = str(section.pop("rope_type", section.pop("type", "default")))
    section.pop("type", None)
    if kind not in kinds or kind not in _ROTARY_SETTINGS:
        raise refused(
            "rope_scaling.rope_type", kind, f"only {', '.join(sorted(kinds))} is supported for this family",
            "use a checkpoint without context extension",
        )  # fmt: skip
    merged = {name: config[name] for name in ("rope_theta", "partial_rotary_factor") if config.get(name) is not None}
    merged |= {name: section.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in section}
    settings = {name: value for name, value in section.items() if value is not None}
    for name in settings.keys() - _ROTARY_SETTINGS[kind]:
        raise refused(
            f"rope_scaling.{name}", settings[name], f"unknown setting of {kind!r}",
            "use a checkpoint without context extension",
        )  # fmt: skip
    if "partial_rotary_factor" in merged:
        percent = required_number(merged, "partial_rotary_factor")
    theta = base if base is not None and "rope_theta" not in merged else required_number(merged, "rope_theta")
    return Rotary(theta, percent, kind, settings)


def llama3_factor(rope: Rotary) -> float | None:
    """Factor of Llama 3's frequency scaling, None when there is none.

    megatron-core builds the scaling with the published constants (`RotaryEmbedding._apply_scaling`).

    Raises:
        CheckpointError: other constants.
    """
    if rope.kind != "llama3":
        return None
    for name, built in _LLAMA3_CONSTANTS.items():
        if rope.settings.get(name) != built:
            raise refused(
                f"rope_scaling.{name}", rope.settings.get(name), f"megatron-core supports {built} only",
                "use a checkpoint with Llama 3.1's constants",
            )  # fmt: skip
    return required_number(rope.settings, "factor")


def yarn_fields(rope: Rotary) -> dict[str, object]:
    """TransformerConfig fields of the YaRN scaling (https://arxiv.org/abs/2309.00071), with transformers' defaults."""
    settings = dict(rope.settings)
    return {
        "yarn_rotary_scaling_factor": required_number(settings, "factor"),
        "yarn_original_max_position_embeddings": required_int(settings, "original_max_position_embeddings"),
        "yarn_beta_fast": required_number({"beta_fast": 32.0} | settings, "beta_fast"),
        "yarn_beta_slow": required_number({"beta_slow": 1.0} | settings, "beta_slow"),
        "yarn_mscale": settings.get("mscale"),
        "yarn_mscale_all_dim": settings.get("mscale_all_dim"),
        "yarn_correction_range_round_to_int": flag(settings, "truncate", True),
    }

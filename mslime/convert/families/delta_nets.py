"""Sizes, layer kinds and rules shared by models with gated delta-net layers (https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mslime.config.errors import CheckpointError
from mslime.convert.families.family import HFConfig, as_list, required_int
from mslime.convert.families.gqa import Attention, attention_rules
from mslime.convert.table import Rule
from mslime.convert.tensor_layouts import Column, DeltaConv, DeltaHeads, GatedQKV, Kind, Replicated, Row

FLOAT32_PARAMETERS = (".self_attention.A_log", ".self_attention.out_norm.weight")
"""Name endings of parameters that stay in float32 in a bfloat16 model, as in the published Qwen3.5."""

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."


def delta_heads(config: HFConfig) -> DeltaHeads:
    """Sizes of the gated delta-net layers.

    Raises:
        CheckpointError: the number of value heads is not a multiple of the key heads.
    """
    keys, values = required_int(config, "linear_num_key_heads"), required_int(config, "linear_num_value_heads")
    if values % keys:
        raise CheckpointError(
            "config.json: linear_num_value_heads", values, f"must be a multiple of the {keys} key heads",
            "use the config.json of the checkpoint",
        )  # fmt: skip
    dims = required_int(config, "linear_key_head_dim"), required_int(config, "linear_value_head_dim")
    return DeltaHeads(keys, values, *dims, required_int(config, "hidden_size"))


def linear_layers(config: HFConfig) -> tuple[int, ...]:
    """Ids of the gated delta-net layers: from `layer_types`, else all but every `full_attention_interval`-th.

    Raises:
        CheckpointError: the two contradict each other, or a layer is of another kind.
    """
    layers = required_int(config, "num_hidden_layers")
    given = config.get("full_attention_interval") is not None
    interval = required_int(config, "full_attention_interval") if given else 4
    regular = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]
    types = as_list(config.get("layer_types")) or regular
    known = len(types) == layers and set(types) <= {"full_attention", "linear_attention"}
    if not known or (given and types != regular):
        raise CheckpointError(
            "config.json: layer_types", types,
            f"names {layers} layers, each linear_attention or full_attention, by full_attention_interval",
            "use the config.json of the checkpoint",
        )  # fmt: skip
    return tuple(layer for layer, kind in enumerate(types) if kind == "linear_attention")


def gated_attention_rules(a: Attention, layers: Sequence[int]) -> tuple[Rule, ...]:
    """Attention whose query projection includes the output gate."""
    gated = GatedQKV(a.heads, a.groups, a.head_dim, a.hidden)
    return tuple(
        replace(rule, kind=gated) if rule.megatron.endswith(".linear_qkv.weight") else rule
        for rule in attention_rules(a, layers)
    )


def delta_rules(
    heads: DeltaHeads, width: int, at: tuple[int, ...], names: tuple[str, ...], projection: Kind, dtype: str | None
) -> tuple[Rule, ...]:
    """Gated delta-net and the norm before it, in each of the layers `at`."""
    m, h = f"{_M}self_attention.", f"{_H}linear_attn."
    per_head, norm = Column((heads.values,)), Replicated((heads.value_dim,))
    return (
        Rule(f"{_M}input_layernorm.weight", (f"{_H}input_layernorm.weight",), Replicated((heads.hidden,)), at),
        Rule(f"{m}in_proj.weight", tuple(f"{h}{name}.weight" for name in names), projection, at),
        Rule(f"{m}conv1d.weight", (f"{h}conv1d.weight",), DeltaConv(heads, width), at),
        Rule(f"{m}dt_bias", (f"{h}dt_bias",), per_head, at),
        Rule(f"{m}A_log", (f"{h}A_log",), per_head, at, dtype=dtype),
        Rule(f"{m}out_norm.weight", (f"{h}norm.weight",), norm, at, dtype=dtype),
        Rule(f"{m}out_proj.weight", (f"{h}out_proj.weight",), Row((heads.hidden, heads.all_values)), at),
    )


def mtp_rules(block: Sequence[Rule], hidden: int) -> tuple[Rule, ...]:
    """The multi-token-prediction layer around a decoder layer's rules.

    Its projection reads [embedding of the next token; hidden state] in both spellings (SGLang `qwen3_next_mtp`).
    """
    m, norm = "mtp.layers.0.", Replicated((hidden,))
    moved = (
        replace(
            rule,
            megatron=rule.megatron.replace(_M, f"{m}transformer_layer."),
            hf=tuple(name.replace(_H, "mtp.layers.0.") for name in rule.hf),
            layers=(),
        )
        for rule in block
    )
    return (
        Rule(f"{m}enorm.weight", ("mtp.pre_fc_norm_embedding.weight",), norm),
        Rule(f"{m}hnorm.weight", ("mtp.pre_fc_norm_hidden.weight",), norm),
        Rule(f"{m}eh_proj.weight", ("mtp.fc.weight",), Column((hidden, 2 * hidden))),
        *moved,
        Rule(f"{m}final_layernorm.weight", ("mtp.norm.weight",), norm),
    )

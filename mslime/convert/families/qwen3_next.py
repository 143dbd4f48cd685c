"""Qwen3-Next: Qwen3NextForCausalLM (https://qwen.ai/blog?id=qwen3-next; transformers `models/qwen3_next`).

Three of four layers mix tokens with a gated delta-net (https://arxiv.org/abs/2412.06464), the others with attention
whose output is gated; zero-centred norms, a quarter of each head rotates, many small experts and a gated shared one.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from mslime.convert.families.experts import Experts
from mslime.convert.families.family import (
    Family,
    HFConfig,
    ModelFields,
    Support,
    as_list,
    as_object,
    flag,
    refuse_unless,
    refused,
    required_int,
)
from mslime.convert.families.gqa import (
    Attention,
    Decoder,
    attention_rules,
    dense_mlp_rules,
    mlp_norm_rules,
    prediction_layer,
    read_attention,
    whole_model,
)
from mslime.convert.families.qwen_moe import experts_and_a_shared_one, refuse_dense_layers_for_engine
from mslime.convert.table import Rule, RuleTable
from mslime.convert.tensor_layouts import (
    Column,
    DeltaByKeyHead,
    DeltaConv,
    DeltaHeads,
    DeltaParts,
    FusedGatedMLP,
    GatedQKV,
    Kind,
    Replicated,
    Row,
    Shape,
)

NOT_SERVED = "SGLang 0.5.23 needs sgl-kernel for gated delta-nets on CPUs, and it has no CPU package"
_NO_CP = "megatron-core's gated delta-net layer does not support it"
FLOAT32_PARAMETERS = (".self_attention.A_log", ".self_attention.out_norm.weight")
"""Name endings of parameters that stay in float32 in a bfloat16 model, as in the published Qwen3.5."""
_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."
_MTP_NAMES = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")


def delta_heads(config: HFConfig) -> DeltaHeads:
    """Sizes of the gated delta-net layers.

    Raises:
        CheckpointError: the number of value heads is not a multiple of the key heads.
    """
    keys, values = required_int(config, "linear_num_key_heads"), required_int(config, "linear_num_value_heads")
    if values % keys:
        raise refused("linear_num_value_heads", values, f"must be a multiple of the {keys} key heads")
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
        raise refused(
            "layer_types", types,
            f"must list {layers} layers, each linear_attention or full_attention, by full_attention_interval",
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


class Qwen3Next(Decoder):
    """The Qwen3-Next family; its `mtp` layer is carried, not trained."""

    architecture = "Qwen3NextForCausalLM"
    support = Support(
        ("Qwen3-Next-80B-A3B",),
        renderers=("qwen3",),
        not_served=NOT_SERVED,
        notes=(f"Context parallelism is not supported: {_NO_CP}.",),
    )
    rope_kinds = ("default",)
    rope_base = 1e7
    partial_rotary = 0.25
    harmless = frozenset({"max_window_layers", "sliding_window"})
    own_dtype: str | None = None
    """Dtype in which the file keeps the decay rates and the norm inside a gated delta-net layer; None: the model's."""

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "attention_bias", (None, False))
        refuse_unless(hf_config, "use_sliding_window", (None, False))
        return read_attention(hf_config, norm="head")

    def experts(self, hf_config: HFConfig) -> Experts:
        return experts_and_a_shared_one(hf_config, normalised=True)

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        heads, linear = delta_heads(hf_config), linear_layers(hf_config)
        layers = range(required_int(hf_config, "num_hidden_layers"))
        return super().transformer_fields(hf_config) | {
            "attention_output_gate": True,
            "layernorm_zero_centered_gamma": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(layer in linear) for layer in layers],
            "linear_conv_kernel_dim": required_int(hf_config, "linear_conv_kernel_dim"),
            "linear_key_head_dim": heads.key_dim,
            "linear_value_head_dim": heads.value_dim,
            "linear_num_key_heads": heads.keys,
            "linear_num_value_heads": heads.values,
        }

    def refuse_for_engine(self, hf_config: HFConfig) -> None:
        refuse_dense_layers_for_engine(hf_config, "Qwen3-Next")

    def rules(self, hf_config: HFConfig) -> RuleTable:
        a, experts, linear = self.attention(hf_config), self.experts(hf_config), linear_layers(hf_config)
        layers = range(required_int(hf_config, "num_hidden_layers"))
        full, dense = ([i for i in layers if i not in others] for others in (linear, experts.layers))
        width = required_int(hf_config, "linear_conv_kernel_dim")
        table = whole_model(hf_config, (
            *gated_attention_rules(a, full),
            *delta_rules(delta_heads(hf_config), width, linear, *self.projection(hf_config), self.own_dtype),
            *mlp_norm_rules(a.hidden, layers),
            *(dense_mlp_rules(hf_config, dense) if dense else ()),
            *self.expert_rules(hf_config, a.hidden),
        ))  # fmt: skip
        predicting = replace(experts, layers=(0,)).rules(a.hidden)
        block = (*gated_attention_rules(a, [0]), *mlp_norm_rules(a.hidden, [0]), *predicting)
        mtp = prediction_layer(block, a.hidden, 0, "mtp.layers.0.", _MTP_NAMES)
        return replace(table, rules=(*table.rules, *mtp), undivided={"cp": _NO_CP})

    def projection(self, hf_config: HFConfig) -> tuple[tuple[str, ...], Kind]:
        """Names and layout of a gated delta-net layer's input projection."""
        return ("in_proj_qkvz", "in_proj_ba"), DeltaByKeyHead(delta_heads(hf_config))

    def expert_rules(self, hf_config: HFConfig, hidden: int) -> tuple[Rule, ...]:
        """Router, experts and shared expert of the trained layers."""
        return self.experts(hf_config).rules(hidden)


# Qwen3.5 mixture of experts: Qwen3_5MoeForConditionalGeneration (transformers `models/qwen3_5_moe`).
#
# The text part is Qwen3-Next's network with experts stacked in the file and the delta-net's projection in whole parts;
# its settings are in `text_config`. For text, the three sections of its rotary embedding use the same position, which
# is plain rotation. The vision part is carried, not trained; `vision_config` defines its tensors.

_EXPERT, _EXPERTS = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.", "model.layers.{layer}.mlp.experts."


class Qwen35MoeText(Qwen3Next):
    """The text part, from its section of config.json; its tensors have the names of a stand-alone model."""

    harmless = frozenset({"mamba_ssm_dtype"})  # of the engine's recurrent state
    own_dtype = "float32"

    def attention(self, hf_config: HFConfig) -> Attention:
        refuse_unless(hf_config, "attn_output_gate", (None, True))
        refuse_unless(hf_config, "output_gate_type", (None, "swish"))
        return super().attention(hf_config)

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        refuse_unless(hf_config, "mlp_only_layers", (None, []))
        refuse_unless(hf_config, "mtp_num_hidden_layers", (None, 0, 1))
        refuse_unless(hf_config, "mtp_use_dedicated_embeddings", (None, False))
        # megatron-core needs a dense layer's size, although no layer is dense.
        dense: dict[str, object] = {"intermediate_size": hf_config.get("moe_intermediate_size")}
        return super().transformer_fields(ChainMap(dense, cast("dict[str, object]", hf_config)))

    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        return super().model_fields(_for_text(hf_config))

    def projection(self, hf_config: HFConfig) -> tuple[tuple[str, ...], Kind]:
        return ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), DeltaParts(delta_heads(hf_config))

    def expert_rules(self, hf_config: HFConfig, hidden: int) -> tuple[Rule, ...]:
        experts = self.experts(hf_config)
        if "quantization_config" in hf_config:
            return experts.rules(hidden)  # FP8 files have one tensor per expert
        at, number = experts.layers, experts.number
        joined, down = FusedGatedMLP(experts.ffn, hidden), Row((hidden, experts.ffn))
        return (
            *(rule for rule in experts.rules(hidden) if not rule.experts),
            Rule(f"{_EXPERT}linear_fc1.weight", (f"{_EXPERTS}gate_up_proj",), joined, at, number),
            Rule(f"{_EXPERT}linear_fc2.weight", (f"{_EXPERTS}down_proj",), down, at, number),
        )


class Qwen35Moe(Family):
    """The Qwen3.5 family: the text part under `model.language_model`, the vision part under `model.visual`."""

    architecture = "Qwen3_5MoeForConditionalGeneration"
    support = Support(
        ("Qwen3.5-35B-A3B", "Qwen3.5-397B-A17B"),
        renderers=("qwen3.5", "qwen3.6", "qwen3.8"),
        not_served=NOT_SERVED,
        notes=(
            "Trained on text; the vision part is copied from the source checkpoint when exporting.",
            "Qwen3.6's files, which also stack the experts of the multi-token-prediction layer, are not supported.",
            *Qwen3Next.support.notes,
        ),
    )
    harmless = frozenset({"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"})
    text = Qwen35MoeText()
    sections = {"text_config": text}

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        return self.text.transformer_fields(_text_config(hf_config))

    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        return self.text.model_fields(_text_config(hf_config))

    def rules(self, hf_config: HFConfig) -> RuleTable:
        table = self.text.rules(_text_config(hf_config))
        rules = (replace(rule, hf=tuple(map(_under_language_model, rule.hf))) for rule in table.rules)
        return replace(table, rules=(*rules, *_vision_rules(hf_config)))


def _section(config: HFConfig, name: str) -> dict[str, object]:
    section = as_object(config.get(name))
    if section is None:
        raise refused(name, config.get(name), "must be an object")
    return section


def _text_config(config: HFConfig) -> HFConfig:
    """Settings of the text part; the outer section defines whether embeddings are tied."""
    section, tied = _section(config, "text_config"), flag(config, "tie_word_embeddings", False)
    if flag(section, "tie_word_embeddings", tied) != tied:
        raise refused("tie_word_embeddings", tied, "text_config has a different value", "set both to the same value")
    quantised = {name: config[name] for name in ("quantization_config",) if name in config}
    return section | {"tie_word_embeddings": tied} | quantised


def _for_text(config: HFConfig) -> HFConfig:
    """The settings with the rotary embedding of text: all its sections use the same position."""
    rope = dict(_section(config, "rope_parameters"))
    rope.pop("mrope_section", None)
    rope.pop("mrope_interleaved", None)
    return ChainMap({"rope_parameters": rope}, cast("dict[str, object]", config))


def _under_language_model(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _vision_rules(config: HFConfig) -> tuple[Rule, ...]:
    """Shapes of transformers' `Qwen3_5MoeVisionModel`."""
    vision = _section(config, "vision_config")
    width, ffn, patch = (required_int(vision, name) for name in ("hidden_size", "intermediate_size", "patch_size"))
    merged = width * required_int(vision, "spatial_merge_size") ** 2
    pixels = (required_int(vision, "in_channels"), required_int(vision, "temporal_patch_size"), patch, patch)
    block: dict[str, Shape] = {
        **_linear("attn.qkv", 3 * width, width), **_linear("attn.proj", width, width),
        **_linear("mlp.linear_fc1", ffn, width), **_linear("mlp.linear_fc2", width, ffn),
        **_norm("norm1", width), **_norm("norm2", width),
    }  # fmt: skip
    outside: dict[str, Shape] = {
        "patch_embed.proj.weight": (width, *pixels),
        "patch_embed.proj.bias": (width,),
        "pos_embed.weight": (required_int(vision, "num_position_embeddings"), width),
        **_norm("merger.norm", width),
        **_linear("merger.linear_fc1", merged, merged),
        **_linear("merger.linear_fc2", required_int(vision, "out_hidden_size"), merged),
    }
    blocks = range(required_int(vision, "depth"))
    shapes = outside | {f"blocks.{i}.{name}": shape for i in blocks for name, shape in block.items()}
    return tuple(Rule(f"vision.{name}", (f"model.visual.{name}",), Replicated(shape)) for name, shape in shapes.items())


def _linear(name: str, out: int, hidden: int) -> dict[str, Shape]:
    return {f"{name}.weight": (out, hidden), f"{name}.bias": (out,)}


def _norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}

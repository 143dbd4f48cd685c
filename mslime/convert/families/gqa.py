"""Settings and layer rules shared by decoders with grouped-query attention.

A family of this kind is a subclass of `Decoder` that defines its attention and its experts. Other families use only the
builders of rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mslime.convert.families.experts import Experts
from mslime.convert.families.family import (
    Family,
    HFConfig,
    ModelFields,
    flag,
    llama3_factor,
    norm_epsilon,
    refuse_unless,
    refused,
    required_int,
    rotary,
    yarn_fields,
)
from mslime.convert.table import Rule, RuleTable
from mslime.convert.tensor_layouts import Column, FusedQKV, GatedMLP, Heads, Kind, Replicated, Row, Vocabulary

_M, _H = "decoder.layers.{layer}.", "model.layers.{layer}."


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention.

    Attributes:
        hidden: features of the residual stream.
        heads, groups, head_dim: query heads, key-value heads, features of each.
        bias: of the query, key and value projections.
        norm: RMS norm of queries and keys: on every `head` by itself, on all heads jointly (`projection`), or none.
    """

    hidden: int
    heads: int
    groups: int
    head_dim: int
    bias: bool = False
    norm: Literal["none", "head", "projection"] = "none"


def read_attention(
    config: HFConfig, bias: bool = False, norm: Literal["none", "head", "projection"] = "none"
) -> Attention:
    """Attention sizes from config.json."""
    hidden, heads = required_int(config, "hidden_size"), required_int(config, "num_attention_heads")
    head_dim = required_int(config, "head_dim") if config.get("head_dim") is not None else hidden // heads
    return Attention(
        hidden, heads, required_int(config, "num_key_value_heads", "num_attention_heads"), head_dim, bias, norm
    )


def refuse_windows(config: HFConfig) -> None:
    """Check that every layer attends to the whole sequence: Qwen's and Mistral's sliding windows are off.

    Raises:
        CheckpointError: a layer has a window.
    """
    refuse_unless(config, "use_sliding_window", (None, False))
    refuse_unless(config, "layer_types", (None, ["full_attention"] * required_int(config, "num_hidden_layers")))


def attention_rules(attention: Attention, layers: Sequence[int]) -> tuple[Rule, ...]:
    """Attention and the norm before it, in each of `layers`."""
    a, at, names = attention, tuple(layers), [f"{_H}self_attn.{part}_proj" for part in "qkv"]
    rules = [
        Rule(f"{_M}input_layernorm.weight", (f"{_H}input_layernorm.weight",), Replicated((a.hidden,)), at),
        Rule(f"{_M}self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in names),
             FusedQKV(a.heads, a.groups, a.head_dim, a.hidden), at),
    ]  # fmt: skip
    if a.bias:
        kind = FusedQKV(a.heads, a.groups, a.head_dim, None)
        rules += [Rule(f"{_M}self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in names), kind, at)]
    for part, heads in (("q", a.heads), ("k", a.groups)) if a.norm != "none" else ():
        norm: Kind = Replicated((a.head_dim,)) if a.norm == "head" else Heads(heads, a.head_dim)
        rules += [Rule(f"{_M}self_attention.{part}_layernorm.weight", (f"{_H}self_attn.{part}_norm.weight",), norm, at)]
    output = Row((a.hidden, a.heads * a.head_dim))
    return (*rules, Rule(f"{_M}self_attention.linear_proj.weight", (f"{_H}self_attn.o_proj.weight",), output, at))


def mlp_norm_rules(hidden: int, layers: Sequence[int]) -> tuple[Rule, ...]:
    """The norm before the MLP or the experts, in each of `layers`."""
    norm = Replicated((hidden,))
    return (Rule(f"{_M}pre_mlp_layernorm.weight", (f"{_H}post_attention_layernorm.weight",), norm, tuple(layers)),)


def dense_mlp_rules(config: HFConfig, layers: Sequence[int]) -> tuple[Rule, ...]:
    """A gated MLP without biases in each of `layers`."""
    hidden, ffn = required_int(config, "hidden_size"), required_int(config, "intermediate_size")
    gate_up, at = (f"{_H}mlp.gate_proj.weight", f"{_H}mlp.up_proj.weight"), tuple(layers)
    return (
        Rule(f"{_M}mlp.linear_fc1.weight", gate_up, GatedMLP(ffn, hidden), at),
        Rule(f"{_M}mlp.linear_fc2.weight", (f"{_H}mlp.down_proj.weight",), Row((hidden, ffn)), at),
    )


def whole_model(config: HFConfig, layer_rules: Sequence[Rule]) -> RuleTable:
    """Embedding, final norm and output layer around the rules of the layers."""
    hidden, vocab = required_int(config, "hidden_size"), required_int(config, "vocab_size")
    tied, vocabulary = flag(config, "tie_word_embeddings", False), Vocabulary(vocab, hidden)
    output = ("model.embed_tokens.weight" if tied else "lm_head.weight",)
    rules = (
        Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary),
        *layer_rules,
        Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Replicated((hidden,))),
        # With tied embeddings the last pipeline stage holds a copy under this name: loaded, never exported.
        Rule("output_layer.weight", output, vocabulary, exported=not tied),
    )
    return RuleTable(rules, ignored=("lm_head.weight",) if tied else ())


# Multi-token prediction: the layers that DeepSeek-V3 and similar models publish behind the last one.
#
# Training does not build them. They are declared so that checkpoints are checked, converted and exported completely. A
# layer is a decoder layer between the projection of [embedding of the next token; hidden state], in this order in all
# spellings (SGLang `qwen3_next_mtp`), and a norm before the shared output layer.


def prediction_layer(
    block: Iterable[Rule], hidden: int, number: int, hf: str, names: tuple[str, str, str, str]
) -> tuple[Rule, ...]:
    """Rules of one prediction layer around those of a decoder layer.

    Args:
        block: the decoder layer's.
        hidden: features of a hidden state.
        hf: what replaces `model.layers.{layer}.` in Hugging Face names.
        names: Hugging Face names of the embedding's norm, the hidden state's norm, the projection and the last norm.
    """
    m, norm = f"mtp.layers.{number}.", Replicated((hidden,))
    embedding, state, projection, last = ((f"{name}.weight",) for name in names)
    moved = (
        replace(
            rule,
            megatron=rule.megatron.replace(_M, f"{m}transformer_layer."),
            hf=tuple(name.replace(_H, hf) for name in rule.hf),
            layers=(),
        )
        for rule in block
    )
    return (
        Rule(f"{m}enorm.weight", embedding, norm),
        Rule(f"{m}hnorm.weight", state, norm),
        Rule(f"{m}eh_proj.weight", projection, Column((hidden, 2 * hidden))),
        *moved,
        Rule(f"{m}final_layernorm.weight", last, norm),
    )


def with_multi_token_prediction(table: RuleTable, config: HFConfig, depth: int) -> RuleTable:
    """The table with `depth` prediction layers, whose decoder layer is the last one of the table.

    Hugging Face continues the numbers of the layers, and some checkpoints repeat the embedding and the output layer
    inside them.
    """
    hidden, layers = required_int(config, "hidden_size"), required_int(config, "num_hidden_layers")
    last = [rule for rule in table.rules if layers - 1 in rule.layers]
    output = next(rule for rule in table.rules if rule.megatron == "output_layer.weight")
    rules, aliases = list(table.rules), dict(table.aliases)
    for k in range(depth):
        h = f"model.layers.{layers + k}."
        names = (f"{h}enorm", f"{h}hnorm", f"{h}eh_proj", f"{h}shared_head.norm")
        rules += prediction_layer(last, hidden, k, h, names)
        aliases |= {f"{h}embed_tokens.weight": "model.embed_tokens.weight", f"{h}shared_head.head.weight": output.hf[0]}
    return replace(table, rules=tuple(rules), aliases=aliases)


def mtp_depth(table: RuleTable) -> int:
    """Number of prediction layers."""
    return len({name.split(".")[2] for name, rule in table.all_bound.items() if rule.untrained == "mtp"})


class Decoder(Family):
    """A family of pre-norm decoders with grouped-query attention, gated MLPs and, in routed layers, experts.

    Attributes:
        rope_kinds: scalings of the rotary embedding that the family's checkpoints use.
        rope_base: default of the rotary base; None: config.json must set it.
        partial_rotary: default of the share of a head that rotates; None: always all of it.
    """

    rope_kinds: tuple[str, ...] = ("default",)
    rope_base: float | None = None
    partial_rotary: float | None = None

    def attention(self, hf_config: HFConfig) -> Attention:
        """The attention; raises like `transformer_fields`."""
        return read_attention(hf_config)

    def experts(self, hf_config: HFConfig) -> Experts | None:
        """The experts, None in a dense model; raises like `transformer_fields`."""
        return None

    def transformer_fields(self, hf_config: HFConfig) -> dict[str, object]:
        refuse_unless(hf_config, "hidden_act", ("silu",))
        refuse_unless(hf_config, "attention_dropout", (None, 0, 0.0))
        layers, attention = required_int(hf_config, "num_hidden_layers"), self.attention(hf_config)
        experts = self.experts(hf_config)
        rope = rotary(hf_config, self.rope_kinds, self.rope_base) if "yarn" in self.rope_kinds else None
        return (
            (yarn_fields(rope) if rope is not None and rope.kind == "yarn" else {})
            | {
                "num_layers": layers,
                "hidden_size": attention.hidden,
                "ffn_hidden_size": required_int(hf_config, "intermediate_size"),
                "num_attention_heads": attention.heads,
                "num_query_groups": attention.groups,
                "kv_channels": attention.head_dim,
                # For a norm of each head; the layer spec has a norm of all heads (`ModelFields.joint_qk_norm`).
                "qk_layernorm": attention.norm == "head",
                "normalization": "RMSNorm",
                "layernorm_epsilon": norm_epsilon(hf_config),
                "activation_func": "silu",
                "gated_linear_unit": True,
                "add_bias_linear": False,
                "add_qkv_bias": attention.bias,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "rotary_interleaved": False,
            }
            | (experts.transformer_fields(layers) if experts else {})
        )

    def model_fields(self, hf_config: HFConfig) -> ModelFields:
        rope = rotary(hf_config, self.rope_kinds, self.rope_base, self.partial_rotary or 1.0)
        if rope.percent != 1.0 and self.partial_rotary is None:
            raise refused("partial_rotary_factor", rope.percent, f"{self.architecture} rotates whole heads")
        experts = self.experts(hf_config)
        return ModelFields(
            vocab_size=required_int(hf_config, "vocab_size"),
            max_positions=required_int(hf_config, "max_position_embeddings"),
            rotary_base=rope.base,
            rotary_percent=rope.percent,
            tie_embeddings=flag(hf_config, "tie_word_embeddings", False),
            num_layers=required_int(hf_config, "num_hidden_layers"),
            moe_layer_ids=experts.layers if experts else (),
            num_experts=experts.number if experts else 0,
            top_k=experts.top_k if experts else 0,
            llama3_factor=llama3_factor(rope),
            position_embedding="yarn" if rope.kind == "yarn" else "rope",
            joint_qk_norm=self.attention(hf_config).norm == "projection",
        )

    def rules(self, hf_config: HFConfig) -> RuleTable:
        attention, experts = self.attention(hf_config), self.experts(hf_config)
        layers = range(required_int(hf_config, "num_hidden_layers"))
        routed = experts.layers if experts else ()
        return whole_model(hf_config, (
            *attention_rules(attention, layers),
            *mlp_norm_rules(attention.hidden, layers),
            *self.mlp_rules(hf_config, [layer for layer in layers if layer not in routed]),
            *(experts.rules(attention.hidden) if experts else ()),
        ))  # fmt: skip

    def mlp_rules(self, hf_config: HFConfig, layers: Sequence[int]) -> tuple[Rule, ...]:
        """Rules of the MLP in the given dense layers."""
        return dense_mlp_rules(hf_config, layers)
